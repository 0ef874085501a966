"""The draw at the end of captured steps, by the GPU's kernels under Triton's interpreter: the
tokens of steps that are waited for, and how many launches stand behind the graph.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.devices import create_backend
from model.devices.gpu import upload
from model.devices.gpu.device import GpuDevice
from model.runner.cuda_graphs import all_in_page_0
from model.runner.runner import ModelRunner
from model.step import Row, Sample, Sampling, StepPlan, bitmap
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Failed, Token
from tests.model.runner.test_overlapped import MAX_CONTEXT, PAGE, Launched
from tests.model.test_decoder import finish, load, make_pool
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.kernel_launches import watched
from tests.support.recording_stream import RecordingStream
from tests.support.submitting import submit

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # Padding is undefined.
]
NUM_PAGES = 60
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(temperature=0.8, repetition_penalty=1.3, top_k=5, seed=3),
    Sampling(temperature=2.0, min_p=0.2, seed=4),
    Sampling(temperature=0.9, typical_p=0.8, logit_bias={5: 2.0}, seed=5),
]


def make_runner(folder: Path, stream: RecordingStream | None, most_rows: int = 4) -> ModelRunner:
    """A GPU's device and kernels over the CPU."""
    decoder = load(folder)
    pool = make_pool(decoder, NUM_PAGES + 1, PAGE)
    backend = create_backend(
        "triton-fast", pool, decoder.spec.attention_scale, decoder.spec.num_query_heads
    )
    if stream is None:
        return ModelRunner(decoder, pool, backend, GpuDevice("cpu"))
    return Launched(decoder, pool, backend, GpuDevice("cpu"), stream, most_rows, 512)


def make_core(runner: ModelRunner) -> EngineCore:
    return EngineCore(Scheduler(Limits(NUM_PAGES, runner.pool.layout, MAX_CONTEXT, 4, 64)), runner)


def check_random_steps(folder: Path, seed: int, most_replays: int) -> None:
    """Requests in company, captured and overlapped, get the tokens of steps that are waited for;
    until so many steps were replayed.
    """
    make_checkpoint(SHAPES[1], folder)
    rng, num_replays = random.Random(seed), 0
    while num_replays < most_replays:
        stream = RecordingStream(rng.random)
        runner = make_runner(folder, stream)
        assert runner.capture(MAX_CONTEXT) == 3  # 1, 2 and 4 rows.
        core, at_once = make_core(runner), make_core(make_runner(folder, None))
        for id in range(rng.randint(4, 9)):
            prompt = [rng.randrange(3, 257) for _ in range(rng.choice([1, 3, 6, 30]))]
            sampling = replace(SAMPLINGS[id % len(SAMPLINGS)], seed=rng.randrange(100))
            for one in (core, at_once):
                submit(one.scheduler, id, prompt, 3 + id, sampling)
        assert finish(core) == finish(at_once) and stream.most_queued == 2
        num_replays += stream.num_replays


def test_random_steps_draw_what_steps_that_are_waited_for_draw(tmp_path: Path) -> None:
    check_random_steps(tmp_path, 7, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_random_steps(tmp_path: Path) -> None:
    check_random_steps(tmp_path, 11, 200)


def spoil(x: torch.Tensor) -> None:
    x.fill_(torch.nan)


def test_states_that_are_not_finite_fail_their_own_row(tmp_path: Path) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    stream = RecordingStream()
    runner = make_runner(tmp_path, stream)
    assert runner.capture(PAGE) > 0
    core = make_core(runner)
    submit(core.scheduler, 0, [5, 6, 7], 6, Sampling(temperature=0.0))
    submit(core.scheduler, 1, [5, 6, 8], 6, Sampling(seed=1))
    for _ in range(3):
        core.step()
    page = core.scheduler.running[0].table.owned[0]
    numbers_N = runner.pool.numbers_PN[page]
    stream.enqueue(lambda: spoil(numbers_N))
    failed, finished = [], []
    while core.scheduler.has_work:
        for event in core.step():
            if isinstance(event, Failed):
                assert event.code == "numerical_error" and "states" in event.reason
                failed.append(event.id)
            elif isinstance(event, Token) and event.finish:
                finished.append(event.id)
    assert (failed, finished) == ([0], [1]) and stream.num_replays > 2


NO_LAUNCH = {
    "empty",
    "view",
    "slice",
    "select",
    "alias",
    "detach",
    "detach_",
    "unbind",
    "as_strided",
    "unsqueeze",
    "expand",
    "lift_fresh",
}


class Counting(TorchDispatchMode):
    """Counts torch's operations that a GPU would run as kernels or copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = function.overloadpacket.__name__
        self.counts[name] += name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


class OutsideGraphs(RecordingStream):
    """Does work at once, and forgets what was counted until a graph was replayed; replays do
    nothing.
    """

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def enqueue(self, work: Callable[[], None]) -> None:
        super().enqueue(work)
        with self.counting:
            self.do_one()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            self.num_replays += 1
            self.counting.counts.clear()

        return replay


def samples(kind: str) -> list[Sample]:
    """Of 256 rows."""
    rng = random.Random(1)
    every = Sampling(0.8, 40, 0.9, 0.05, 1.0, 1.1, 0.2, 0.1, {3: 2.0}, bitmap(range(200)), [[4]])
    sampling = {
        "greedy": Sampling(temperature=0.0),
        "plain": Sampling(temperature=0.8, min_p=0.1),
        "top-p": Sampling(top_p=0.9),
        "penalties": Sampling(temperature=0.0, repetition_penalty=1.1),
        "all": every,
    }[kind]
    history = [rng.randrange(256) for _ in range(100)]
    masks = [bitmap(rng.sample(range(256), 100)) if kind == "all" else None for _ in range(256)]
    return [
        Sample(replace(sampling, seed=i), history, history, mask=mask)
        for i, mask in enumerate(masks)
    ]


@pytest.mark.parametrize(
    ("kind", "most"), [("greedy", 1), ("plain", 1), ("top-p", 2), ("penalties", 13), ("all", 34)]
)
def test_few_launches_stand_behind_the_graph(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    counting, uploads = Counting(), Counter[str]()
    stream = OutsideGraphs(counting)
    monkeypatch.setattr(
        "model.devices.gpu.drawing.upload",
        lambda *args: uploads.update(["upload"]) or upload(*args),
    )
    with watched(lambda name, _: counting.counts.update([name]), computes=False):
        runner = make_runner(tmp_path, stream, 256)
        assert runner.capture(PAGE) == 12
        rows = [
            Row(i, [0], 3, all_in_page_0(runner.pool.layout, 4), sample)
            for i, sample in enumerate(samples(kind))
        ]
        runner.launch(StepPlan(tuple(rows)))
    assert stream.num_replays == 1 and counting.counts.total() == most, counting.counts
    assert counting.counts["copy_"] == 1 and uploads.total() == (most > 1)


def test_the_buffers_of_draws_are_kept() -> None:
    device = GpuDevice("cpu")
    draws = device.row_draws(8, 100)
    assert device.row_draws(8, 100) is draws is device.row_draws(1, 100)
    larger = device.row_draws(9, 100)
    assert (
        larger is not draws
        and device.row_draws(8, 100) is larger
        and device.row_draws(8, 101) is not larger
    )
