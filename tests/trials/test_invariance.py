"""The same request gives the same bits in every condition of support/conditions.py, for several
families; and an engine by narrower kernels, or by none, says so and draws the same tokens.
"""

import json
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Sampling
from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.support.conditions import (
    Case,
    Engine,
    Outcome,
    alone,
    compare,
    finish,
    make_cases,
    passes,
    preemptions,
    torch_threads,
)
from tests.support.families import FamilyCheckpoint
from tests.support.processes import ServerProcess
from tests.trials.invariance import body_of

COUNT, CONTEXT, PAGE = 20, 192, 16
PASSES = "batch32", "steps16", "steps", "prefix", "preemption", "threads2x7"
FAMILIES = [("gpt_bigcode", 2), ("falcon", 1), ("gemma", 0), ("gemma3_text", 1), ("deepseek_v3", 4)]
"""With heads that the kernels take: multiples of 16."""


def engine_of(folder: Path, quantization: str = "none", dtype: str = "auto") -> tuple[Engine, int]:
    """An engine over the checkpoint, and its vocabulary's size."""
    spec = read_spec(folder)
    options = EngineOptions("cpu", dtype, 1, PAGE, 600, None, CONTEXT, 64, 512, quantization)
    return Engine(ModelRunner.load(folder, spec, options), CONTEXT), spec.vocab_size


def problems(engine: Engine, cases: list[Case], names: tuple[str, ...]) -> list[str]:
    """Of every pass what differs, or that what it is about did not take place."""
    (reference,) = alone(engine, cases, lambda ended: None)
    found = []
    for name in names:
        for outcome in passes()[name](engine, cases, lambda ended: None):
            result = compare(reference.traces, outcome, cases)
            if result["differ"] or not result["occurred"]:
                found.append(f"{outcome.name}, {outcome.evidence}: {result['first_difference']}")
    return found


def test_every_case_can_be_sent() -> None:
    for case in make_cases(40, 100, 192, 0):
        assert json.loads(json.dumps(body_of(case)))["prompt"] == case.prompt


@pytest.mark.parametrize(
    ("family", "number", "quantization"),
    [
        *((*each, "none") for each in FAMILIES),
        *(
            pytest.param(
                *each,
                kind,
                marks=() if each[0] in ("gpt_bigcode", "deepseek_v3") else pytest.mark.slow,
            )
            for kind in ("int8", "int4")
            for each in FAMILIES
        ),
    ],
)
def test_the_same_bits_in_every_condition(
    family: str,
    number: int,
    quantization: str,
    tmp_path: Path,
    family_checkpoint: Callable[[str, int], FamilyCheckpoint],
) -> None:
    ours = family == "gpt_bigcode"
    folder = (
        make_checkpoint(SHAPES[number], tmp_path) if ours else family_checkpoint(family, number)
    ).folder
    with torch_threads(1):
        engine, vocab_size = engine_of(folder, quantization)
        assert problems(engine, make_cases(COUNT, vocab_size, CONTEXT, seed=0), PASSES) == []


def test_cases_are_of_every_kind() -> None:
    cases = make_cases(200, 300, 512, seed=0)
    assert cases == make_cases(200, 300, 512, seed=0) != make_cases(200, 300, 512, seed=1)
    lengths = [len(case.prompt) for case in cases]
    assert (
        min(lengths) == 1
        and max(lengths) == 488
        and {case.tokens for case in cases} == set(range(1, 25))
    )
    assert any(case.scored for case in cases) and any(case.num_top for case in cases)


def test_the_same_bits_with_weights_and_cache_of_16_bits(
    family_checkpoint: Callable[[str, int], FamilyCheckpoint],
) -> None:
    with torch_threads(1):
        engine, vocab_size = engine_of(family_checkpoint("gemma3_text", 1).folder, dtype="bfloat16")
        assert (
            problems(
                engine,
                make_cases(COUNT, vocab_size, CONTEXT, seed=0),
                ("batch32", "prefix", "preemption"),
            )
            == []
        )


def test_a_difference_is_found(tiny_folder: Path) -> None:
    engine, vocab_size = engine_of(tiny_folder)
    cases = make_cases(3, vocab_size, CONTEXT, seed=0)
    (reference,) = alone(engine, cases, lambda ended: None)
    other = Outcome("other", {number: list(trace) for number, trace in reference.traces.items()})
    kind, token, logprob, *rest = other.traces[1][0]
    nearly = float.fromhex(logprob) + 2.0**-40
    other.traces[1][0] = (kind, token, nearly.hex(), *rest)
    other.traces[2].pop()
    result = compare(reference.traces, other, cases)
    assert result["differ"] == 2 and nearly.hex() in result["first_difference"]
    calm = preemptions(engine, cases[:1], lambda ended: None)[0]
    assert not calm.occurred and calm.evidence == "0 preempted, 0 preemptions"


# --- other processors, and none of our kernels

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: TinyCheckpoint) -> list[int]:
    """What this processor's kernels draw."""
    engine, _ = engine_of(tiny_checkpoint.folder)
    return [
        item[1] for item in finish(engine.core(1), 0, Case(PROMPT, 40, Sampling(temperature=0.0)))
    ]


@pytest.mark.parametrize(
    ("flags", "name", "kernels"),
    [("asimddp,atomics", "dotprod", "native"), ("asimd", "neon", "native")]
    if platform.machine() == "aarch64"
    else [
        ("avx512f,avx512bw,avx512dq,avx512vl", "avx512bw", "native"),
        ("avx2,fma,f16c", "avx2", "native"),
        ("sse2", "unfused", "native-unfused"),
    ],
)
def test_an_engine_of_a_processor_with_fewer_features(
    flags: str, name: str, kernels: str, tiny_folder: Path, expected: list[int]
) -> None:
    server = ServerProcess(
        tiny_folder, "--cache.pages", "64", launcher=("tests.support.masked", flags)
    )
    body = {
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, answer = server.post("/v1/completions", body)
    server.process.send_signal(signal.SIGTERM)
    _, log = server.process.communicate(timeout=60)
    assert status == 200 and answer["choices"][0]["token_ids"] == expected, answer
    assert answer["system_fingerprint"].endswith(f"-cpu-{kernels}"), answer["system_fingerprint"]
    assert f" on cpu ({name}), by {kernels}, batch-invariant; " in log, log
    assert server.process.returncode == 0
