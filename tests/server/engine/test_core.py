"""Overlapped steps: with each step launched before the tokens of the previous one are known, every
request ends as without overlap.
"""

import weakref
from collections import Counter

import pytest

from cache.layout import pages_for
from model.step import SampleError, Sampling, StepPlan, StepResult
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.engine.sequence import Sequence
from server.protocol import PromptScores, Token
from tests.server.engine.test_scheduler import History
from tests.support.delayed import DelayedRunner
from tests.support.hash_model import HashModel, one_group, oracle
from tests.support.integrity import integrity
from tests.support.submitting import submit

SEEDS, MANY = 400, 4000
"""Histories of every run of the tests, and of `-m slow`."""


class OverlappedHistory(History):
    """The random histories of the scheduler with two steps in flight and, now and then, a step that
    does not fit into memory.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.short = self.rng.random() < 0.2
        self.runner = DelayedRunner(self.model.run, None, self.fits, self.rng.random)
        self.core.runner = self.runner
        self.idle = 0

    def fits(self, plan: StepPlan) -> None:
        if self.short and len(plan.rows) > 1 and self.rng.random() < 0.1:
            self.seen["memory"] += 1
            raise MemoryError("a test's")

    def cancel(self) -> None:
        if not (self.scheduler.running or self.scheduler.waiting):
            return  # All that is left is in flight.
        self.seen["cancelled in flight"] += sum(
            sequence.num_in_flight > 0 for sequence in self.scheduler.running.values()
        )
        super().cancel()
        self.idle = 0  # What was computed for it is discarded.

    def step(self) -> None:
        scheduler, preemptions = self.scheduler, self.scheduler.num_preemptions
        leaving = len(scheduler.ended_in_flight)
        computed, had_work = scheduler.num_computed_tokens, scheduler.has_work
        news = self.core.step()
        if scheduler.num_preemptions > preemptions:
            self.seen["preempted after a step"] += 1
        self.seen["an extra step"] += len(scheduler.ended_in_flight) > leaving
        self.take(news)
        # A step may only be launched, and the next only land: with three in which nothing moves,
        # but for masks, nothing ever will.
        self.idle = (
            0 if news or not had_work or scheduler.num_computed_tokens > computed else self.idle + 1
        )
        assert self.idle < 4 + 2 * self.most_delay or not scheduler.has_work, "nothing moves"
        assert len(scheduler.running) <= self.limits.max_running

    def check_windows(self, sequence: Sequence) -> None:
        """The checks of the plain history, with allowance for the row in flight and for a row that
        was not planned after all.
        """
        layout = self.limits.layout
        for group, pages in zip(layout.groups, sequence.table.pages, strict=True):
            if group.window is not None:
                kept = sum(page >= 0 for page in pages) // group.num_stacks
                assert (
                    kept <= pages_for(group.window + self.limits.step_tokens, layout.page_size) + 1
                ), "a layer keeps more than its window and a page"


def check_histories(seeds: range) -> None:
    """Whether every history holds, and rare things happen in them."""
    seen: Counter[str] = Counter()
    most_in_flight = 0
    for seed in seeds:
        history = OverlappedHistory(seed)
        try:
            seen.update(history.run())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert not history.runner.queue
        most_in_flight = max(most_in_flight, history.runner.most_in_flight)
    assert most_in_flight == 2
    for happened in (
        "finished",
        "preempted",
        "shared",
        "scored",
        "cancelled in flight",
        "an extra step",
        "memory",
    ):
        assert seen[happened], f"no history in which anything was {happened}"


@pytest.mark.parametrize("part", range(4))
def test_every_request_ends_as_without_overlap_and_nothing_leaks(part: int) -> None:
    check_histories(range(part, SEEDS, 4))


@pytest.mark.slow
def test_every_request_ends_as_without_overlap_and_nothing_leaks_in_many_histories() -> None:
    check_histories(range(SEEDS, MANY))


class Watched(DelayedRunner):
    """Records the plans as they were when launched, in order."""

    def __init__(self, model: HashModel) -> None:
        super().__init__(model.run)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        self.plans.append(StepPlan(tuple(plan.rows), plan.clear))
        return super().launch(plan)


def watched(
    num_pages: int = 64, max_running: int = 8, give: object = None
) -> tuple[Scheduler, Watched, EngineCore]:
    scheduler = Scheduler(Limits(num_pages, one_group(4), 200, max_running, 32))
    runner = Watched(HashModel(one_group(4)))
    return scheduler, runner, EngineCore(scheduler, runner)


def outputs_of(core: EngineCore) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    while core.scheduler.has_work:
        for event in core.step():
            assert isinstance(event, Token)
            outputs.setdefault(event.id, []).append(event.token)
        assert integrity(core.scheduler) == []
    return outputs


def test_two_steps_are_in_flight_and_none_is_wasted_on_a_length() -> None:
    scheduler, runner, core = watched()
    for id in range(3):
        submit(scheduler, id, [1, 2, 3], 6, Sampling(seed=id))
    assert core.step() == [] and len(runner.queue) == 1
    assert len(core.step()) == 3 and len(runner.queue) == 1
    outputs = {
        id: [first, *rest]
        for (id, rest), first in zip(outputs_of(core).items(), [0] * 3, strict=True)
    }
    assert all(len(output) == 6 for output in outputs.values())
    assert len(runner.plans) == 6 and runner.most_in_flight == 2


def test_who_ends_by_a_token_takes_one_more_step_and_keeps_its_pages_for_it() -> None:
    scheduler, runner, core = watched()
    prompt, seed = [5, 6, 7], 1
    expected = oracle(prompt, 9, 0, frozenset(), seed, 0.0)
    stop = expected[3]
    length = expected.index(stop) + 1
    submit(scheduler, 0, prompt, 9, Sampling(seed=seed), stop_token_ids=frozenset({stop}))
    ended = False
    while not ended:
        ended = any(
            isinstance(event, Token) and event.finish == "eos_token" for event in core.step()
        )
    assert (
        not scheduler.running
        and scheduler.has_work
        and scheduler.allocator.num_owned == 1 + (2 + length) // 4
    )
    assert core.step() == [] and not scheduler.has_work and scheduler.allocator.num_owned == 0
    assert len(runner.plans) == length + 1


def test_a_cancelled_sequence_keeps_its_pages_until_its_row_is_back() -> None:
    scheduler, _, core = watched()
    submit(scheduler, 0, [1, 2, 3], 50, Sampling())
    core.step()
    scheduler.cancel(0)
    assert scheduler.allocator.num_owned == 1 and integrity(scheduler) == []
    assert core.step() == [] and scheduler.allocator.num_owned == 0 and not scheduler.has_work


def test_an_id_that_comes_again_gets_nothing_of_the_row_that_was_in_flight() -> None:
    scheduler, _, core = watched()
    submit(scheduler, 0, [1, 2, 3], 50, Sampling())
    core.step()
    scheduler.cancel(0)
    submit(scheduler, 0, [4, 5], 6, Sampling())
    assert outputs_of(core) == {0: oracle([4, 5], 6, 0, frozenset(), 0, 0.0)}


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler, runner, core = watched(num_pages=4, max_running=2)
    submit(scheduler, 0, [1, 2, 3, 4, 5, 6], 8, Sampling(seed=0))
    submit(scheduler, 1, [1, 2, 3, 4, 5], 9, Sampling(seed=1))
    preempted_at = []
    outputs: Counter[int] = Counter()
    while scheduler.has_work:
        before, flying = scheduler.num_preemptions, len(runner.queue)
        for event in core.step():
            outputs[event.id] += 1
        if scheduler.num_preemptions > before:
            preempted_at.append(flying)
    assert preempted_at and set(preempted_at) == {0} and outputs == {0: 8, 1: 9}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.1),
        Sampling(bad_words=[[1, 2]]),
        Sampling(frequency_penalty=0.5),
    ],
)
def test_a_draw_that_reads_the_output_waits_for_it_and_holds_up_nobody(sampling: Sampling) -> None:
    scheduler, runner, core = watched()
    submit(scheduler, 0, [1, 2, 3], 6, sampling)
    submit(scheduler, 1, [1, 2, 3], 12, Sampling(seed=1))
    outputs_of(core)
    with_0 = [any(row.sequence == 0 for row in plan.rows) for plan in runner.plans]
    assert with_0[:12] == [True, False] * 6
    assert (
        all(any(row.sequence == 1 for row in plan.rows) for plan in runner.plans)
        and len(runner.plans) == 12
    )


class Spoiling(DelayedRunner):
    """The row with this number, of one sequence, has non-finite logits."""

    def __init__(self, model: HashModel, sequence: int, number: int) -> None:
        super().__init__(self._run)
        self.model, self.sequence, self.left = model, sequence, number
        self.clears: list[tuple[int, ...]] = []

    def _run(self, plan: StepPlan) -> StepResult:
        self.clears.append(plan.clear)
        result = self.model.run(plan)
        drawn = list(result.drawn)
        for index, row in enumerate(plan.rows):
            if row.sequence == self.sequence:
                self.left -= 1
                if self.left == 0:
                    drawn[index] = SampleError("numbers", code="numerical_error")
        return StepResult(tuple(drawn), result.scored)


@pytest.mark.parametrize("cancelled", [False, True])
def test_pages_of_a_row_that_failed_in_flight_are_cleared_before_anyone_has_them(
    cancelled: bool,
) -> None:
    scheduler = Scheduler(Limits(8, one_group(4), 200, 2, 32))
    runner = Spoiling(HashModel(one_group(4)), 0, 2)
    core = EngineCore(scheduler, runner)
    submit(scheduler, 0, [1, 2, 3, 4, 5], 20, Sampling())
    core.step()
    core.step()  # The second row is in flight.
    pages = set(scheduler.running[0].table.owned)
    if cancelled:
        scheduler.cancel(0)
    while scheduler.has_work:
        core.step()
    assert len(scheduler.allocator.cached) == 0
    submit(scheduler, 1, [1, 2, 3, 4, 5], 20, Sampling())
    outputs_of(core)
    assert pages <= {page for clear in runner.clears for page in clear}


def test_scores_of_a_prompt_in_chunks_come_in_order() -> None:
    scheduler, _, core = watched()
    prompt = list(range(1, 50)) + list(range(1, 40))
    submit(scheduler, 0, prompt, 3, Sampling(), score_prompt=True)
    submit(scheduler, 1, [9], 30, Sampling(seed=1))
    scores: list[float] = []
    while scheduler.has_work:
        for event in core.step():
            if isinstance(event, PromptScores):
                assert event.first == len(scores) + 1
                scores.extend(score.logprob for score in event.scores)
    assert scores == [-float(position) for position in range(1, len(prompt))]


def test_those_who_must_wait_are_computed_together_and_not_by_turns() -> None:
    scheduler, runner, core = watched(num_pages=200)
    for id in range(6):
        submit(scheduler, id, list(range(1, 15)), 20, Sampling(repetition_penalty=1.1, seed=id))
    outputs_of(core)
    together = [len(plan.rows) for plan in runner.plans]
    assert len(together) < 20 + 6 and together[4:20] == [6] * 16


@pytest.mark.parametrize("launches", [False, True])
def test_what_a_step_had_made_is_gone_before_its_parts_are_computed(launches: bool) -> None:
    class Tensors:
        pass

    made: list[weakref.ref[Tensors]] = []

    def begin(plan: StepPlan) -> None:
        assert all(reference() is None for reference in made), (
            "the step that did not fit is still there"
        )
        if len(plan.rows) > 1:
            tensors = Tensors()
            made.append(weakref.ref(tensors))
            raise MemoryError("a test's")

    def run(plan: StepPlan) -> StepResult:
        begin(plan)
        return model.run(plan)

    model = HashModel(one_group(4))
    scheduler = Scheduler(Limits(64, one_group(4), 200, 8, 32))
    core = EngineCore(scheduler, DelayedRunner(run, model.run, begin))
    if not launches:
        core.runner = model
        model.run, run_whole = lambda plan: begin(plan) or run_whole(plan), model.run  # type: ignore[method-assign, func-returns-value]
    for id in range(3):
        submit(scheduler, id, [1, 2, 3, 4, 5], 6, Sampling(seed=id))
    assert all(len(output) == 6 for output in outputs_of(core).values()) and made
