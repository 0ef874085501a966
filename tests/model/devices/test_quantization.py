"""Quantized models: small error, a fraction of the memory."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from commands.perplexity import measure
from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, Sample, SampledToken, SampleError, Sampling, StepPlan
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.paths import EMBEDDED

CPU = torch.device("cpu")


def make_runner(folder: Path, quantization: str) -> ModelRunner:
    options = EngineOptions("cpu", "float32", 1, 16, 20, None, 320, 4, 64, quantization)
    return ModelRunner.load(folder, read_spec(folder), options)


def test_a_numerical_error_fails_its_row_alone(tmp_path: Path) -> None:
    runner = make_runner(make_checkpoint(SHAPES[3], tmp_path).folder, "int8")
    embedding: Any = runner.decoder.token_embedding
    # Scales of NaN.
    embedding.set_blocks(
        7, torch.full((1, embedding.form.row_bytes(embedding.shape[1])), 255, dtype=torch.uint8)
    )
    sample = Sample(Sampling(temperature=0.0), [1], [])
    broken, fine = runner.run(
        StepPlan(
            (
                Row(0, [7, 1], 0, [array("q", [0])], sample),
                Row(1, [1, 2], 0, [array("q", [1])], sample),
            )
        )
    ).drawn
    assert isinstance(broken, SampleError) and isinstance(fine, SampledToken)


def test_the_embedded_model_in_int8_takes_a_quarter_and_says_much_the_same() -> None:
    whole, small = (make_runner(EMBEDDED, quantization) for quantization in ("none", "int8"))
    assert (
        small.weight_bytes <= 0.27 * whole.weight_bytes
        and make_runner(EMBEDDED, "int4").weight_bytes <= 0.16 * whole.weight_bytes
    )
    ids = list(range(300, 340))
    plan = StepPlan(
        (Row(0, ids, 0, [array("q", range(20))], Sample(Sampling(temperature=0.0), ids, [])),)
    )
    (before,), (after,) = whole.run(plan).drawn, small.run(plan).drawn
    assert isinstance(before, SampledToken) and isinstance(after, SampledToken)
    assert before.token == after.token and abs(before.logprob - after.logprob) < 0.1


@pytest.mark.parametrize(("kind", "cost"), [("int8", 0.005), ("int4", 0.15)])
def test_perplexity(kind: str, cost: float) -> None:
    """int8 costs the embedded model 0.36 %: it has few weights for all that it learnt."""
    with Progress(disable=True) as progress:
        forms = {"float32": ("float32", "none"), kind: ("float32", kind)}
        perplexity = measure(EMBEDDED, read_spec(EMBEDDED), "cpu", forms, None, progress).perplexity
    assert abs(perplexity[kind] / perplexity["float32"] - 1) < cost
