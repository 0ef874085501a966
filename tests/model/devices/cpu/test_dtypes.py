"""engine.dtype on a CPU: weights as the checkpoint stores them or as the option says, arithmetic in
float32, and the bits of float32.
"""

from array import array
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands.options import PlanOptions
from commands.plan import make_plan
from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import CheckpointError
from model.step import Row, Sample, Sampling, Scoring, StepPlan, StepResult
from tests.support.checkpoints import SHAPES, make_checkpoint, store_as
from tests.support.families import make_family_checkpoint

HALVES = [torch.bfloat16, torch.float16]
FAMILIES = [("gpt_bigcode", 2), ("gemma3_text", 1), ("deepseek_v3", 4)]
"""With tied tables, gates, experts and their routers, and matrices for each head."""


def make_folder(family: str, number: int, folder: Path, dtype: torch.dtype) -> Path:
    """A tiny checkpoint that is stored in `dtype`."""
    made: Any = (
        make_checkpoint(SHAPES[number], folder)
        if family == "gpt_bigcode"
        else make_family_checkpoint(family, number, folder)
    )
    return store_as(made.folder, dtype)


def make_runner(folder: Path, dtype: str, quantization: str = "none") -> ModelRunner:
    return ModelRunner.load(
        folder,
        read_spec(folder),
        EngineOptions("cpu", dtype, 1, 16, 200, None, 320, 4, 64, quantization),
    )


def computed(runner: ModelRunner, most: int = 3) -> StepResult:
    """A step of two prompts, the first of them scored, and of a single token, or of the first
    `most` of these.
    """
    numbers, sample = count(), Sample(Sampling(temperature=0.0), [5], [])
    ids = list(range(5, 45))
    wanted = (ids, None, Scoring(0, ids[1:], 3)), (ids[:9], sample, None), ([7], sample, None)
    rows = []
    for sequence, (tokens, drawn, scoring) in enumerate(wanted[:most]):
        pages = [
            array("q", islice(numbers, 3 * group.num_stacks)) for group in runner.pool.layout.groups
        ]
        rows.append(Row(sequence, tokens, 0, pages, drawn, scoring))
    return runner.run(StepPlan(tuple(rows)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("family", "number"), FAMILIES)
def test_stored_weights_give_the_bits_of_float32_in_half_the_bytes(
    family: str, number: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_folder(family, number, tmp_path, dtype)
    half, whole = make_runner(folder, "auto"), make_runner(folder, "float32")
    assert computed(half) == computed(whole)
    assert half.dtype is dtype and whole.dtype is torch.float32
    assert half.pool.dtype is whole.pool.dtype is torch.float32
    # With biases and norms by the hundred.
    assert half.weight_bytes < 0.51 * whole.weight_bytes or family == "deepseek_v3"
    planned = make_plan(PlanOptions(model=folder, memory=10**9, device="cpu"))
    assert (
        planned.weight_bytes[planned.dtype] == half.weight_bytes
        and planned.weight_bytes["float32"] == whole.weight_bytes
    )
    assert (planned.dtype, planned.kv_dtype) == (str(dtype).removeprefix("torch."), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_option_rounds_weights_and_the_cache(dtype: str, tmp_path: Path) -> None:
    folder = make_folder("gemma3_text", 1, tmp_path, torch.float32)
    runner, whole = make_runner(folder, dtype), make_runner(folder, "auto")
    assert whole.dtype is torch.float32 and runner.dtype is runner.pool.dtype is getattr(
        torch, dtype
    )
    assert runner.deterministic and runner.pool.num_bytes * 2 == whole.pool.num_bytes
    assert {p.dtype for p in runner.decoder.parameters() if p.ndim == 1} == {torch.float32}
    rounded, exact = (computed(each).scored[0] for each in (runner, whole))
    assert 0 < max(abs(a.logprob - b.logprob) for a, b in zip(rounded, exact, strict=True)) < 0.2
    # The cache is rounded in addition to the weights, which alone give what a checkpoint stored in
    # the dtype gives.
    assert computed(runner) != computed(
        make_runner(store_as(folder, getattr(torch, dtype)), "auto")
    )
    planned = make_plan(PlanOptions(model=folder, memory=10**9, device="cpu", dtype=dtype))  # type: ignore[arg-type]
    assert planned.weight_bytes[dtype] == runner.weight_bytes and planned.kv_dtype == dtype


def test_int8_of_stored_weights_is_int8_of_them_in_float32(tmp_path: Path) -> None:
    folder = make_folder("deepseek_v3", 4, tmp_path, torch.bfloat16)
    stored, widened = make_runner(folder, "auto", "int8"), make_runner(folder, "float32", "int8")
    assert computed(stored) == computed(widened) and stored.weight_bytes == widened.weight_bytes
    assert stored.dtype is widened.dtype is torch.float32


def test_parts_of_a_matrix_stored_in_different_dtypes_are_widened(tmp_path: Path) -> None:
    folder = make_folder("gemma3_text", 1, tmp_path, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(
        tensors | {name: tensors[name].float()}, folder / "model.safetensors", {"format": "pt"}
    )
    mixed, whole = make_runner(folder, "auto"), make_runner(folder, "float32")
    assert computed(mixed) == computed(whole)
    found = {
        module: weight.dtype
        for module, weight in mixed.decoder.named_parameters()
        if module.endswith("qkv.weight")
    }
    assert found.pop("blocks.0.attention.qkv.weight") is torch.float32 and set(found.values()) == {
        torch.bfloat16
    }


def test_numbers_beyond_the_range_of_float16_are_refused(tmp_path: Path) -> None:
    folder = make_folder("gpt_bigcode", 2, tmp_path, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = 7e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_runner(folder, "auto")
    with pytest.raises(
        CheckpointError,
        match=r"h\.1\.mlp\.c_fc\.weight is beyond the range of torch\.float16; take another "
        r"engine\.dtype",
    ):
        make_runner(folder, "float16")
