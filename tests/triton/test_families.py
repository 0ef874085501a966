"""The real decoder and runner over the GPU's kernels, interpreted: every family's logits and tokens
are those over the reference.
"""

from array import array
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from cache.layout import CacheLayout, Columns
from cache.pool import KVPool
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices.cpu.device import CpuDevice
from model.devices.gpu.device import GpuDevice
from model.layers import RMSNorm
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, Sampling, Scoring, StepPlan
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Token
from tests.model.test_decoder import (
    CPU,
    GREEDY,
    TOLERANCE,
    finish,
    load,
    logits_by_chunks,
    make_core,
    make_runner,
)
from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.support.families import FamilyCheckpoint, make_family_checkpoint
from tests.support.submitting import submit

FAMILIES = (
    "gpt_bigcode",
    "falcon",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "llama",
    "mistral",
    "santacoder",
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "youtu",
)
SAMPLE = [
    ("gpt_bigcode", 3),
    ("falcon", 1),
    ("gemma", 2),
    ("gemma3_text", 1),
    ("gemma4_text", 4),
    ("llama", 2),
    ("deepseek_v2", 4),
    ("minicpm3", 2),
]
"""mistral is llama with gemma3_text's windows here, santacoder is gpt_bigcode, deepseek_v3 is
deepseek_v2."""


TOO_LONG = "gemma4_text", 0
"""Fifteen layers, which take Triton's interpreter minutes."""


def make(family: str, number: int, folder: Path) -> TinyCheckpoint | FamilyCheckpoint:
    return (
        make_checkpoint(SHAPES[number], folder)
        if family == "gpt_bigcode"
        else make_family_checkpoint(family, number, folder)
    )


def check(family: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make(family, number, folder)
    decoder = load(checkpoint.folder)
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, decoder.spec.vocab_size, (70,), generator=generator).tolist()
    with torch.inference_mode():
        expected = logits_by_chunks(decoder, "reference", ids, [70], 16)
        for name in ("triton", "triton-fast"):
            found = logits_by_chunks(decoder, name, ids, [40, 1, 1, 5, 23], 16)
            assert (found - expected).abs().max() < TOLERANCE * max(
                1.0, float(expected.abs().max())
            )
        gpu = GpuDevice("cpu")
        fused = load_decoder(
            checkpoint.folder,
            decoder.spec,
            torch.float32,
            CPU,
            gpu.products(gpu.dtypes("auto"), "none", False),
        )
        assert fused.products == "cublas" and type(fused.final_norm) is not type(decoder.final_norm)
        assert (
            logits_by_chunks(fused, "reference", ids, [40, 1, 29], 16) - expected
        ).abs().max() < TOLERANCE
    outputs = []
    for name in ("reference", "triton", "triton-fast"):
        monkeypatch.setattr(CpuDevice, "backend_for", lambda *_, name=name: name)
        core = make_core(checkpoint, num_pages=40, page_size=32)  # type: ignore[arg-type]
        submit(core.scheduler, 0, ids[:21], 21, GREEDY)
        submit(core.scheduler, 1, ids[30:33], 5, GREEDY)
        outputs.append(finish(core))
    assert outputs[0] == outputs[1] == outputs[2] and [len(outputs[0][i]) for i in (0, 1)] == [
        21,
        5,
    ]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("family", "number"), SAMPLE)
def test_logits_and_greedy_tokens(
    family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, number, tmp_path, monkeypatch)


OTHERS = [
    (family, number)
    for family in FAMILIES
    for number in range(5)
    if (family, number) not in (*SAMPLE, TOO_LONG)
]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("family", "number"), OTHERS)
def test_logits_and_greedy_tokens_of_the_others(
    family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, number, tmp_path, monkeypatch)


PROMPTS = [list(range(3, 26)), list(range(100, 106)), [7]]
SAMPLINGS = [Sampling(seed=0, top_p=0.9), Sampling(seed=1), Sampling(seed=2, typical_p=0.8)]


def check_bits(runner: ModelRunner) -> None:
    """The same whole, in chunks and in a batch."""

    def drawn(submitted: list[int], step_tokens: int) -> dict[int, list[Token]]:
        core = EngineCore(
            Scheduler(Limits(runner.pool.num_pages, runner.pool.layout, 512, 8, step_tokens)),
            runner,
        )
        for i in submitted:
            submit(core.scheduler, i, PROMPTS[i], 3, SAMPLINGS[i], num_top=2)
        found: dict[int, list[Token]] = {i: [] for i in submitted}
        while core.scheduler.has_work:
            for advance in core.step():
                assert isinstance(advance, Token)
                found[advance.id].append(advance)
        return found

    together = drawn([0, 1, 2], 64)
    assert [len(together[i]) for i in range(3)] == [3, 3, 3]
    assert drawn([2, 1, 0], 8) == together
    assert {i: drawn([i], 64)[i] for i in range(3)} == together


# With products that take a row's bits from the row alone.
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("family", "number"), [("gemma3_text", 1), ("deepseek_v3", 4)])
def test_the_same_bits_whole_in_chunks_and_in_company(
    family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make(family, number, tmp_path)
    monkeypatch.setattr(CpuDevice, "backend_for", lambda *_: "triton")
    check_bits(make_runner(checkpoint, num_pages=40, page_size=32))  # type: ignore[arg-type]


DETERMINISTIC = [
    ("falcon", 2, "none", torch.float32),
    ("gemma", 2, "none", torch.bfloat16),
    ("gpt_bigcode", 1, "int8", torch.bfloat16),
    ("deepseek_v2", 3, "none", torch.float32),
    ("gpt_bigcode", 3, "none", torch.float32),
    ("gemma3_text", 1, "none", torch.bfloat16),
    ("llama", 1, "none", torch.float16),
    ("llama", 3, "int4", torch.float32),
    ("deepseek_v3", 2, "int8", torch.float32),
    ("minicpm3", 2, "none", torch.float32),
]
"""Experts in float32: of torch's numbers and ours, 16 bits take different ones."""


OTHERS = [pytest.param(*each, marks=pytest.mark.slow) for each in DETERMINISTIC[4:]]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("family", "number", "quantization", "dtype"), [*DETERMINISTIC[:4], *OTHERS]
)
def test_deterministic_decoders(
    family: str,
    number: int,
    quantization: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All by kernels of ours, as on a GPU: log-probabilities are about torch's, and bits the same
    in any company.
    """
    checkpoint = make(family, number, tmp_path)
    spec = read_spec(checkpoint.folder)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**40, 2**40))
    device = GpuDevice("cpu")
    products = (
        device.products(device.dtypes("auto"), quantization, deterministic)
        for deterministic in (True, False)
    )
    decoder, usual = (load_decoder(checkpoint.folder, spec, dtype, CPU, each) for each in products)
    assert sum(p.nbytes for p in decoder.parameters()) == sum(p.nbytes for p in usual.parameters())
    left = [
        name
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm | RMSNorm) and "forward" not in vars(module)
    ]
    assert left == []
    options = EngineOptions(
        "cpu",
        str(dtype).removeprefix("torch."),
        1,
        32,
        60,
        None,
        512,
        8,
        64,
        quantization,
        deterministic=True,
    )
    runner = ModelRunner.over(decoder, device, options)
    assert runner.kernels.startswith("triton") and runner.deterministic
    unlike = ModelRunner.over(usual, device, replace(options, deterministic=False))
    assert unlike.kernels == "triton-fast+cublas" and not unlike.deterministic
    scored = [score_prompt(each) for each in (runner, unlike)]
    assert max(abs(a - b) for a, b in zip(*scored, strict=True)) < (
        1e-4 if dtype is torch.float32 and quantization == "none" else 0.3
    )
    check_bits(runner)


def score_prompt(runner: ModelRunner) -> list[float]:
    ids = PROMPTS[0]
    counts = [2 * group.num_stacks for group in runner.pool.layout.groups]
    pages = [array("q", range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]
    row = Row(0, ids[:-1], 0, pages, None, Scoring(0, ids[1:], 0))
    return [drawn.logprob for drawn in runner.run(StepPlan((row,))).scored[0]]


def test_a_gpu_gets_these_kernels_where_they_fit() -> None:
    """A meta tensor stands for the GPU's."""

    def pool(page_size: int, dtype: torch.dtype = torch.bfloat16) -> KVPool:
        layout = CacheLayout.of(2, (), page_size, [Columns(128, 128)] * 2)
        return KVPool.allocate(layout, 4, dtype, torch.device("meta"))

    backend_for = GpuDevice().backend_for
    for deterministic, expected in ((False, "triton-fast"), (True, "triton")):
        expected = "reference" if find_spec("triton") is None else expected
        found = {
            backend_for(*sizes, deterministic)
            for sizes in ((pool(64), 16), (pool(256), 71), (pool(16, torch.float32), 16))
        }
        assert found == {expected}
        assert (
            backend_for(pool(1), 16, deterministic)
            == backend_for(pool(48), 16, deterministic)
            == "reference"
        )
