"""The runner that launches, over a stream that is late: tokens taken on the device, captured steps,
and what a step leaves behind.
"""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from cache.layout import pages_for
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.decode import NO_SAMPLE, DecodeTable
from model.devices import find_device
from model.devices.gpu.attention.configurations import Sizes, choose_decode
from model.devices.gpu.attention.plan import FEW_TOKENS
from model.runner.cuda_graphs import all_in_page_0, captured_sizes
from model.runner.pending_step import PendingStep
from model.runner.runner import ModelRunner, largest_step
from model.step import PENDING, Row, Sample, SampledToken, SampleError, Sampling, StepPlan
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Failed, Token
from tests.model.test_decoder import CPU, finish, load, make_core, make_pool
from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.support.delayed import _copy
from tests.support.integrity import integrity
from tests.support.listed_backend import ListedReference
from tests.support.recording_stream import RecordingStream
from tests.support.submitting import submit
from tests.support.torch_blocks import BlockProducts

PAGE = 16
MAX_CONTEXT = 200


class Launched(ModelRunner):
    """What a plan refers to is read when it is launched: on a device the work is told by then, here
    it is done later.
    """

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.decode is not None:
            plan.decode.samples[:] = [
                replace(sample, output=list(sample.output)) for sample in plan.decode.samples
            ]
        return super().launch(StepPlan(tuple(map(_copy, plan.listed)), plan.clear, plan.decode))


def overlapped(
    folder: Path,
    stream: RecordingStream,
    *,
    captured: bool,
    num_pages: int = 60,
    max_running: int = 8,
) -> EngineCore:
    decoder = load(folder)
    pool = make_pool(decoder, num_pages + 1, PAGE)
    backend = ListedReference(pool, decoder.spec.attention_scale, decoder.spec.num_query_heads)
    runner = Launched(decoder, pool, backend, find_device("cpu"), stream, 64, 64)
    if captured:
        assert runner.capture(MAX_CONTEXT) > 0
        runner.warm_up(MAX_CONTEXT)
    limits = Limits(
        num_pages * pool.layout.pages_per_block, pool.layout, MAX_CONTEXT, max_running, 64
    )
    return EngineCore(Scheduler(limits), runner)


FAMILIES = [("gpt_bigcode", 1), ("falcon", 1), ("gemma3_text", 1), ("minicpm3", 1)]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _ in FAMILIES])
def checkpoint(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    family_checkpoint: Callable[[str, int], Any],
) -> Any:
    family, number = request.param
    if family == "gpt_bigcode":
        return make_checkpoint(SHAPES[number], tmp_path_factory.mktemp(family))
    return family_checkpoint(family, number)


def requests(vocab_size: int) -> list[tuple[list[int], int, Sampling]]:
    rng = random.Random(3)
    samplings = [
        Sampling(temperature=0.0),
        Sampling(seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=0.0, repetition_penalty=1.3),
        Sampling(temperature=0.0, logit_bias={5: 2.0}),
        Sampling(temperature=0.9, top_k=5, seed=3),
    ]
    return [
        (
            [rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 5, 30, 90]))],
            rng.randint(1, 40),
            samplings[number % len(samplings)],
        )
        for number in range(14)
    ]


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_are_those_of_steps_that_are_waited_for(
    checkpoint: TinyCheckpoint, captured: bool
) -> None:
    rng = random.Random(7)
    stream = RecordingStream(rng.random)
    core = overlapped(checkpoint.folder, stream, captured=captured)
    expected_core = make_core(checkpoint, 60, 8, page_size=PAGE)
    for id, (prompt, max_new, sampling) in enumerate(
        requests(load(checkpoint.folder).spec.vocab_size)
    ):
        for one in (core, expected_core):
            submit(one.scheduler, id, list(prompt), max_new, sampling)
    assert finish(core) == finish(expected_core)
    assert stream.most_queued == 2
    experts = load(checkpoint.folder).spec.experts is not None
    assert (stream.num_replays > 20) is (captured and not experts)


def test_cancelled_and_preempted_in_flight_with_captured_steps(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(SHAPES[1], tmp_path)
    vocab_size = load(tmp_path).spec.vocab_size
    preemptions = cancelled = replays = 0
    for seed in range(6):
        rng = random.Random(seed)
        stream = RecordingStream(rng.random)
        core = overlapped(tmp_path, stream, captured=True, num_pages=14)
        asked = {
            id: (
                [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 60))],
                rng.randint(5, 60),
                Sampling(temperature=0.0),
            )
            for id in range(8)
        }
        outputs: dict[int, list[int]] = {id: [] for id in asked}
        for id, (prompt, max_new, sampling) in asked.items():
            submit(core.scheduler, id, list(prompt), max_new, sampling)
        gone: set[int] = set()
        while core.scheduler.has_work:
            if core.scheduler.running and rng.random() < 0.03:
                victim = rng.choice(list(core.scheduler.running))
                cancelled += core.scheduler.running[victim].num_in_flight > 0
                core.scheduler.cancel(victim)
                gone.add(victim)
            for event in core.step():
                assert isinstance(event, Token) and event.id not in gone
                outputs[event.id].append(event.token)
            assert integrity(core.scheduler) == []
        for id, (prompt, max_new, sampling) in asked.items():
            alone = make_core(checkpoint, 60, 8, page_size=PAGE)
            submit(alone.scheduler, 0, prompt, max_new, sampling)
            expected = finish(alone)[0]
            assert outputs[id] == (expected[: len(outputs[id])] if id in gone else expected)
        preemptions += core.scheduler.num_preemptions
        replays += stream.num_replays
    assert preemptions and cancelled and replays


@pytest.mark.parametrize(("multiple", "num_sizes"), [(1, 9), (256, 1)])
def test_a_step_larger_than_any_captured_is_launched_piece_by_piece(
    multiple: int, num_sizes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a step of few rows is replayed where the smallest graph has 256 rows."""
    make_checkpoint(SHAPES[1], tmp_path)
    stream = RecordingStream()
    sizes = captured_sizes(64, multiple)
    monkeypatch.setattr("model.runner.runner.captured_sizes", lambda *_: sizes)
    core = overlapped(tmp_path, stream, captured=False)
    runner = core.runner
    # 1 to 64 rows; contexts of a page.
    assert isinstance(runner, ModelRunner) and runner.capture(PAGE) == num_sizes
    submit(core.scheduler, 0, [5, 6, 7], 40, Sampling(temperature=0.0))
    finish(core)
    # The prompt, and tokens up to the end of the first page.
    assert stream.num_replays == 1 + PAGE - 3 and stream.num_enqueued == 40


def test_long_contexts_are_captured_however_many_pages_a_block_has(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the bound."""
    monkeypatch.setattr("model.runner.cuda_graphs.MOST_BLOCKS", 64 * 2)
    runner: Any = overlapped(checkpoint.folder, RecordingStream(), captured=True).runner
    layout = runner.pool.layout
    for num_keys, is_captured in ((2 * PAGE, True), (2 * PAGE + 1, False)):
        row = Row(0, [0], num_keys - 1, all_in_page_0(layout, num_keys), NO_SAMPLE)
        step = DecodeTable.of(layout, [row] * 64, [PENDING] * 64).advance()
        assert (runner._graphs.find(step) is not None) is is_captured
        assert not is_captured or len(runner._graphs._pack(step, 64)) <= len(
            runner._graphs._numbers
        )


@pytest.mark.parametrize("most_rows", [8, 64, 100, 189, 256])
def test_the_warm_up_computes_every_kernel_of_single_tokens(
    most_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    runner: Any = overlapped(tmp_path, RecordingStream(), captured=False).runner
    runner._most_rows, runner._most_tokens, plans = most_rows, 2048, list[StepPlan]()
    monkeypatch.setattr(runner, "run", plans.append)
    runner.warm_up(4096)
    counts = [[len(row.tokens) for row in plan.listed] for plan in plans]
    sizes = Sizes(16, 128, 128, 2, 64)
    warmed = {choose_decode(sizes, sum(n for n in each if n <= FEW_TOKENS)) for each in counts}
    assert warmed == {choose_decode(sizes, n) for n in range(1, most_rows + FEW_TOKENS + 1)}


def test_short_chunks_of_prompts_beside_single_tokens_are_captured(tmp_path: Path) -> None:
    """Whole prompts, parts of one, and their prefixes that were cached; unless what they read again
    would take too long.
    """
    checkpoint = make_checkpoint(SHAPES[1], tmp_path)
    stream = RecordingStream()
    core = overlapped(tmp_path, stream, captured=True)
    expected = make_core(checkpoint, 60, 8, page_size=PAGE)
    outputs: dict[int, list[int]] = {}
    launched = stream.num_enqueued - stream.num_replays  # To warm up.
    for id in range(6):
        for one in (core, expected):
            submit(
                one.scheduler,
                id,
                [5 + id, *range(20, 28 + 20 * id)],
                30,
                Sampling(temperature=0.7, seed=id),
            )
        for _ in range(3):
            for event in core.step():
                assert isinstance(event, Token)
                outputs.setdefault(event.id, []).append(event.token)
    for id, tokens in finish(core).items():
        outputs.setdefault(id, []).extend(tokens)
    assert outputs == finish(expected)
    assert stream.num_enqueued - stream.num_replays == launched


@pytest.mark.parametrize("num_chunk", [3, 64])
def test_a_chunk_without_finite_states_fails_alone(num_chunk: int, tmp_path: Path) -> None:
    """Also one that draws nothing. As captured, so launched."""
    make_checkpoint(SHAPES[1], tmp_path)
    stream = RecordingStream()
    runner: Any = overlapped(tmp_path, stream, captured=True).runner
    runner.pool.numbers_PN[1].fill_(torch.nan)
    greedy = Sample(Sampling(temperature=0.0), [1], [])

    def row(id: int, num_tokens: int, first_page: int, sample: Sample | None) -> Row:
        num_pages = pages_for(PAGE + num_tokens, PAGE)
        pages = [
            array("q", range(first_page, first_page + num_pages * group.num_stacks))
            for group in runner.pool.layout.groups
        ]
        return Row(id, [7] * num_tokens, PAGE, pages, sample)

    decode = DecodeTable.of(runner.pool.layout, [row(0, 1, 20, greedy)], [PENDING]).advance()
    rows = (
        row(1, num_chunk, 1, None),
        row(2, 4, 10, greedy),
        row(3, 2, 1, greedy),
        row(4, 5, 30, None),
    )
    before = stream.num_replays
    drawn = runner.run(StepPlan(rows, decode=decode)).drawn
    assert stream.num_replays - before == (num_chunk == 3)
    assert [type(one) for one in drawn] == [
        SampledToken,
        SampleError,
        SampledToken,
        SampleError,
        type(None),
    ]


def test_what_chunks_would_read_again_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    replays = []
    for most in (3, 2):
        monkeypatch.setattr("model.runner.cuda_graphs.MOST_KEYS_AGAIN", most * 4)
        core = overlapped(tmp_path, stream := RecordingStream(), captured=True)
        before = stream.num_replays
        submit(core.scheduler, 0, [5, 6, 7, 8], 5, Sampling(temperature=0.0))
        finish(core)
        replays.append(stream.num_replays - before)
    assert replays == [5, 4]


def test_nothing_is_captured_for_a_backend_without_lists(tmp_path: Path) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    core = make_core(make_checkpoint(SHAPES[1], tmp_path))
    runner: Any = core.runner
    launched = Launched(
        runner.decoder, runner.pool, runner.backend, find_device("cpu"), RecordingStream(), 32, 64
    )
    assert launched.capture(MAX_CONTEXT) == 0


def test_numbers_that_are_not_finite_fail_their_own_row_of_a_captured_step(tmp_path: Path) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    core = overlapped(tmp_path, RecordingStream(), captured=True)
    runner: Any = core.runner
    submit(core.scheduler, 0, [5, 6, 7], 20, Sampling(temperature=0.0))
    submit(core.scheduler, 1, [5, 6, 8], 20, Sampling(temperature=0.0))
    for _ in range(3):
        core.step()
    page = core.scheduler.running[0].table.owned[0]
    runner._stream.enqueue(lambda: runner.pool.numbers_PN[page].fill_(torch.nan))
    failed: list[int] = []
    finished: list[int] = []
    while core.scheduler.has_work:
        for event in core.step():
            if isinstance(event, Failed):
                assert event.code == "numerical_error"
                failed.append(event.id)
            elif isinstance(event, Token) and event.finish:
                finished.append(event.id)
    assert (failed, finished) == ([0], [1])


def test_the_largest_step_has_every_token_and_every_draw_there_can_be(tmp_path: Path) -> None:
    runner: Any = make_core(make_checkpoint(SHAPES[1], tmp_path), 60, 8, page_size=PAGE).runner
    for max_running, step_tokens, max_context in ((8, 100, 40), (8, 8, 40), (1, 3, 512)):
        plan = largest_step(runner.pool.layout, step_tokens, max_running, max_context)
        assert (
            sum(len(row.tokens) for row in plan.rows) == step_tokens
            and max(len(row.tokens) for row in plan.rows) <= max_context
        )
        drawn = runner.run(plan).drawn
        assert sum(isinstance(one, SampledToken) for one in drawn) == max_running


def test_a_captured_step_of_quantized_weights(tmp_path: Path) -> None:
    """Whose table's dtype says nothing of the logits'."""
    make_checkpoint(SHAPES[1], tmp_path)
    decoder = load_decoder(tmp_path, read_spec(tmp_path), torch.float32, CPU, BlockProducts("int8"))
    outputs = []
    for captured in (False, True):
        pool = make_pool(decoder, 10, PAGE)
        backend = ListedReference(pool, decoder.spec.attention_scale, decoder.spec.num_query_heads)
        runner = Launched(
            decoder, pool, backend, find_device("cpu"), stream := RecordingStream(), 4, 64
        )
        assert not captured or runner.capture(MAX_CONTEXT)
        core = EngineCore(Scheduler(Limits(9, pool.layout, 100, 4, 64)), runner)
        submit(core.scheduler, 0, [5, 6, 7], 20, Sampling(temperature=0.0))
        outputs.append(finish(core))
        assert bool(stream.num_replays) is captured
    assert outputs[0] == outputs[1]
