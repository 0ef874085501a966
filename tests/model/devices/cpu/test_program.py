"""A decoder's layers as one call of a kernel: the bits of its modules, whatever the threads; and
its memory, in which nothing overlaps.
"""

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.batch import build_batch
from model.checkpoint.families import read_spec
from model.devices.backend import Plans
from model.devices.cpu.attention import Attention as AttentionStruct
from model.devices.cpu.program import KEPT_TOKENS, RecordedForward
from model.devices.cpu.recording import ATTEND, PRODUCT, Activation, Buffer, Recorder
from model.devices.device import Device
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, StepPlan
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.families import CONFIGS, make_family_checkpoint

FORMS = [("auto", "none"), ("bfloat16", "none"), ("float16", "int8"), ("auto", "int4")]
NOT_RECORDED = {"deepseek_v2", "deepseek_v3", "minicpm3", "youtu"}
CASES = [("gpt_bigcode", number) for number in range(len(SHAPES))]
CASES += [
    (family, number)
    for family in CONFIGS
    if family != "gpt_bigcode"
    for number in range(len(CONFIGS[family]))
]
NUM_PAGES = 400


def load(family: str, number: int, folder: Path, dtype: str, quantization: str) -> ModelRunner:
    made: Any = (
        make_checkpoint(SHAPES[number], folder)
        if family == "gpt_bigcode"
        else make_family_checkpoint(family, number, folder)
    )
    options = EngineOptions("cpu", dtype, 1, 16, NUM_PAGES, None, 320, 4, 512, quantization)
    return ModelRunner.load(made.folder, read_spec(made.folder), options)


def ragged(runner: ModelRunner, rng: random.Random, num_rows: int, most_tokens: int) -> StepPlan:
    """Rows of one to `most_tokens` tokens behind contexts of up to 100, on pages of their own."""
    numbers, rows = count(), []
    for sequence in range(num_rows):
        start, num_tokens = rng.randrange(100), rng.choice((1, 1, rng.randint(1, most_tokens)))
        blocks = (start + num_tokens - 1) // 16 + 1
        pages = [
            array("q", islice(numbers, blocks * group.num_stacks))
            for group in runner.pool.layout.groups
        ]
        rows.append(Row(sequence, rng.choices(range(250), k=num_tokens), start, pages, None))
    assert next(numbers) <= NUM_PAGES
    return StepPlan(tuple(rows))


def states(
    runner: ModelRunner, forward: Any, plan: StepPlan, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of a step over pages of random numbers, and what the pages hold
    afterwards.
    """
    pages = runner.pool.numbers_PN
    pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(0)))
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            batch = build_batch(plan, runner.pool.layout, runner.device.upload)
            x_TD = forward(batch, Plans.of(runner.backend, batch)).clone()
    finally:
        torch.set_num_threads(1)
    return x_TD, pages.clone()


@pytest.mark.parametrize(("family", "number"), CASES)
def test_a_program_gives_the_bits_of_the_modules(family: str, number: int, tmp_path: Path) -> None:
    dtype, quantization = FORMS[number % len(FORMS)]
    runner = load(family, number, tmp_path, dtype, quantization)
    recordable = runner.backend.name == "native" and family not in NOT_RECORDED
    assert isinstance(runner.forward, RecordedForward) == recordable
    if not recordable:
        return
    modules = Device.forward(runner.device, runner.decoder, runner.backend)
    rng = random.Random(number)
    for threads, most_tokens in ((1, 8), (2, 1), (2, 40), (3, 8)):
        plan = ragged(runner, rng, rng.choice((1, 3, 9)), most_tokens)
        for found, expected in zip(
            states(runner, runner.forward, plan, threads),
            states(runner, modules, plan, 1),
            strict=True,
        ):
            assert torch.equal(found, expected)


def test_long_steps_take_memory_that_is_not_kept(tmp_path: Path) -> None:
    runner = load("gpt_bigcode", 0, tmp_path, "auto", "none")
    modules = Device.forward(runner.device, runner.decoder, runner.backend)
    forward: Any = runner.forward
    kept = []
    for num_tokens in (1, KEPT_TOKENS, KEPT_TOKENS + 50, 7):
        plan = StepPlan((Row(0, [5] * num_tokens, 0, [array("q", range(20))], None),))
        assert torch.equal(states(runner, forward, plan, 2)[0], states(runner, modules, plan, 2)[0])
        kept.append(len(forward.whole._memory))
    assert kept[0] < kept[1] == kept[2] == kept[3]


def test_what_modules_cannot_do_to_an_activation_is_an_error() -> None:
    x: Any = Activation(Recorder(lambda *_: (None, 0)), Buffer(8), 0, 8)
    with pytest.raises(TypeError):
        torch.sin(x)


def test_layers_of_a_group_have_the_same_number_of_heads() -> None:
    recorder = Recorder(lambda layer, heads: (AttentionStruct(value_dim=8), layer // 2))
    keys = Activation(recorder, Buffer(8), 0, 8)
    with pytest.raises(AssertionError, match="alike"):
        for layer, heads in enumerate((2, 2, 4, 2)):
            recorder.attend(layer, Activation(recorder, Buffer(8 * heads), 0, 8, heads), keys, keys)


@pytest.mark.parametrize("seed", range(300))
def test_no_two_activations_overlap_while_both_are_needed(seed: int) -> None:
    rng, attention = random.Random(seed), SimpleNamespace(value_dim=4)
    recorder = Recorder(lambda *_: (attention, 0))
    alive = [Activation(recorder, Buffer(rng.choice((8, 24, 32))), 0, 8)]
    first = alive[0].buffer
    for _ in range(rng.randrange(1, 30)):
        inputs = rng.choices(alive[-3:], k=rng.randint(1, 3))
        alive.append(recorder.add(rng.choice((PRODUCT, ATTEND)), inputs, rng.choice((8, 24, 32))))
    end = recorder.place([first], alive[-1].buffer)
    made = {id(first): -1} | {
        id(used[-1].buffer): number for number, (_, used) in enumerate(recorder.operations)
    }
    buffers = [first, *(used[-1].buffer for _, used in recorder.operations)]
    for i, a in enumerate(buffers):
        assert a.base + a.width <= end
        for b in buffers[:i]:
            both = made[id(a)] <= b.last_use or b is alive[-1].buffer
            # In other words: memory is used again later, or lies elsewhere; and only by a buffer of
            # the same width.
            if b.base < a.base + a.width and a.base < b.base + b.width:
                assert not both and (a.base, a.width) == (b.base, b.width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_rounded_as_torch_rounds_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    runner = load("gpt_bigcode", 0, tmp_path, str(dtype).removeprefix("torch."), "none")
    size, rng = runner.pool.columns(0).key, torch.Generator().manual_seed(0)
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    tied = ((exact[:-1].double() + exact[1:].double()) / 2).float()
    special = torch.tensor(
        [
            0.0,
            -0.0,
            torch.inf,
            -torch.inf,
            torch.nan,
            65519.99,
            65520.0,
            3.4e38,
            -3.4e38,
            1e-8,
            2.0**-25,
            1e-45,
        ]
    )
    x = torch.cat(
        [exact, tied, tied.nextafter(tied * 2), special, torch.randn(2**12, generator=rng)]
    )
    x_Td = torch.cat([x, x.new_zeros(-len(x) % (32 * size))]).view(-1, size)
    for k_Td in x_Td.split(32):
        batch = build_batch(
            StepPlan((Row(0, [1] * 32, 0, [array("q", [3, 5])], None),)),
            runner.pool.layout,
            runner.device.upload,
        )
        runner.backend.run(runner.backend.plan(batch), 0, torch.zeros(32, 4, size), k_Td, k_Td)
        keys_PSd, values_PSv = runner.pool.layer(0)
        keys_Td = keys_PSd[[3, 5]].view(2, size, 16).transpose(1, 2).reshape(32, size)
        values_Td = values_PSv[[3, 5]].reshape(32, size)
        for found_Td in (keys_Td, values_Td):
            assert torch.equal(found_Td.nan_to_num(7.0), k_Td.to(dtype).nan_to_num(7.0))


def test_calls_beside_one_another_compute_what_they_compute_alone(tmp_path: Path) -> None:
    runner = load("gpt_bigcode", 2, tmp_path, "auto", "none")
    linears: list[Any] = [
        runner.decoder.get_submodule(f"blocks.{layer}.mlp.{name}")
        for layer in (0, 1)
        for name in ("up", "down")
    ]
    xs = {
        linear: [torch.randn(rows, linear.shape[1]) for rows in (1, 3, 20, 7) * 50]
        for linear in linears
    }
    expected = [[linear(x) for x in xs[linear]] for linear in linears]
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(len(linears)) as pool:
            found = list(pool.map(lambda linear: [linear(x) for x in xs[linear]], linears))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pairs in map(zip, found, expected) for pair in pairs)
