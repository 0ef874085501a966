"""The scheduler under random submits, cancels and tiny pools: no page leaks, no sequence starves,
each ends exactly once.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cache.layout import CacheLayout, pages_for
from model.step import SampledToken, SampleError, Sampling, StepPlan, StepResult
from server.engine.core import EngineCore
from server.engine.open_sequences import Event
from server.engine.scheduler import Limits, NeverFits, Scheduler
from server.engine.sequence import Sequence
from server.protocol import Failed, Guidance, PromptScores, Share, Token
from tests.support.hash_model import HashModel, Next, next_token, one_group, oracle
from tests.support.integrity import integrity
from tests.support.submitting import submit

SEEDS, MANY = 600, 10_000
"""Histories of every run of the tests, and of `-m slow`."""
KINDS = (
    "finished",
    "cancelled",
    "preempted",
    "never fits",
    "scored",
    "shared",
    "window passed",
    "waited for a mask",
)


ALL_TOKENS = b"\xff" * 8


def forced_after(output: list[int]) -> list[int]:
    """The forced tokens of a simulated grammar after an output: now and then a few, decided by the
    last token and the length.
    """
    if not output or (output[-1] + len(output)) % 4:
        return []
    return [1 + (output[-1] * k) % 63 for k in range(1, 2 + output[-1] % 3)]


class Forcing:
    """The simulated grammar as a constraint, which allows all tokens. An answer is there after so
    many looks as `delays` gives.
    """

    def __init__(self, delays: Callable[[], int] = lambda: 0) -> None:
        self.delays = delays
        self.left = 0
        self.running = False

    @property
    def is_pending(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def begin(self, output: list[int]) -> bool:
        assert not self.running
        self.running, self.left = True, self.delays()
        self.output: list[int] = []
        self.forced: list[int] = []
        # A replayed output was cut anywhere, also among forced tokens: what was forced then is
        # forced again.
        while len(self.output) < len(output):
            self.output.append(output[len(self.output)])
            self.forced = forced_after(self.output)
            known = output[len(self.output) : len(self.output) + len(self.forced)]
            self.output += self.forced
            if len(known) < len(self.forced):
                self.forced = self.forced[len(known) :]
                break
            self.forced = []
        return True

    def advance(self, token: int) -> bool:
        assert self.running and self.left < 0, "a token is sampled without its mask"
        self.left = self.delays()
        self.output.append(token)
        self.forced = forced_after(self.output)
        self.output += self.forced
        return True

    def take(self) -> Guidance:
        assert self.running and self.left < 0
        return Guidance(ALL_TOKENS, self.forced)

    def end(self) -> None:
        self.running = False


def forced_oracle(
    prompt: list[int],
    max_new: int,
    min_new: int,
    stops: frozenset[int],
    seed: int,
    end_rate: float,
    give: Next = next_token,
) -> list[int]:
    """The output of a request with the simulated grammar when it is served alone."""
    output: list[int] = []
    while len(output) < max_new:
        output.append(
            give(prompt + output, seed, end_rate, len(output) >= min_new or 0 not in stops)
        )
        if output[-1] in stops:
            break
        for token in forced_after(output):
            if len(output) < max_new:
                output.append(token)
    return output


class History:
    """One random history of a scheduler with a small pool, checked after every step. `seen` counts
    what happened in it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.choice([1, 2, 4, 16])
        num_pages = (
            rng.randint(2, 40) if rng.random() < 0.3 else -(-rng.randint(40, 160) // page_size)
        )
        max_running = rng.randint(1, 8)
        layout = one_group(page_size) if rng.random() < 0.5 else self.windowed(page_size)
        self.limits = Limits(
            num_pages * layout.pages_per_block,
            layout,
            rng.randint(20, 200),
            max_running,
            rng.randint(max_running, max_running + 24),
        )
        self.scheduler = Scheduler(self.limits)
        self.priorities = rng.random() < 0.3
        self.model = HashModel(layout, end_rate=rng.choice([0.0, 0.05, 0.3]))
        self.core = EngineCore(self.scheduler, self.model)
        self.requests: dict[int, tuple[list[int], int, int, frozenset[int], bool]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list[float] | None] = {}
        self.ended: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.started: set[int] = set()
        self.seen: Counter[str] = Counter()
        self.computed_bound = 0
        self.most_delay = rng.choice([0, 0, 1, 4])
        """The most steps that an answer of a constraint takes."""
        self.last_first: int | None = None
        self.num_held = 0
        """Steps in a row in which the first in order did not advance."""

    def delays(self) -> int:
        return self.rng.randint(0, self.most_delay)

    def windowed(self, page_size: int) -> CacheLayout:
        """A layout in which some or all layers have a sliding window."""
        window = self.rng.choice([1, 3, 8, 20])
        windows = [
            window if self.rng.random() < 0.7 else None for _ in range(self.rng.choice([1, 3, 6]))
        ]
        return CacheLayout.of(len(windows), windows, page_size)

    def run(self) -> Counter[str]:
        to_submit, steps = self.rng.randint(1, 12), 0
        while to_submit or self.scheduler.has_work:
            while to_submit and self.rng.random() < 0.6:
                to_submit -= 1
                self.submit()
            if self.scheduler.has_work and self.rng.random() < 0.04:
                self.cancel()
            self.step()
            steps += 1
            assert steps < 50 * (self.computed_bound + 10), "no end in sight"
        assert self.scheduler.allocator.num_owned == 0
        for id in self.outputs:
            self.check_output(id)
        self.seen["preempted"] += self.scheduler.num_preemptions
        self.seen["shared"] += self.scheduler.num_hit_tokens > 0
        return self.seen

    def expected(self, id: int) -> list[int]:
        prompt, max_new, min_new, stops, forces = self.requests[id]
        outcome = forced_oracle if forces else oracle
        return outcome(prompt, max_new, min_new, stops, id, self.model.end_rate, self.model.give)

    def submit(self) -> None:
        rng, id = self.rng, len(self.requests)
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 30))]
        if self.requests and rng.random() < 0.5:
            other = rng.choice(list(self.requests))
            shared = [*self.requests[other][0], *self.outputs.get(other, ())][: rng.randint(1, 40)]
            prompt = shared if rng.random() < 0.5 else shared + prompt
        max_new, min_new = rng.randint(1, 40), rng.choice([0, 0, 3])
        stops = frozenset({0}) if rng.random() < 0.7 else frozenset()
        forces = rng.random() < 0.3
        min_new = 0 if forces else min_new  # A grammar decides where its output ends.
        self.requests[id] = prompt, max_new, min_new, stops, forces
        done = self.expected(id)[:-1]
        # As after the death of another engine.
        done = done[: rng.randint(0, len(done))] if rng.random() < 0.2 else []
        scores = not done and rng.random() < 0.3
        self.scored[id] = [] if scores else None
        try:
            submit(
                self.scheduler,
                id,
                list(prompt),
                max_new,
                Sampling(seed=id),
                done,
                min_new,
                stops,
                share=self.share(),
                score_prompt=scores,
                constraint=Forcing(self.delays) if forces else None,
            )
        except NeverFits:
            assert len(prompt) + max_new > self.limits.capacity
            self.cancelled.add(id)
            self.seen["never fits"] += 1
            return
        self.outputs[id] = list(done)
        self.computed_bound += len(prompt) + max_new

    def share(self) -> Share:
        return Share(rank=self.rng.randint(-1, 1) if self.priorities else 0)

    def cancel(self) -> None:
        victim = self.rng.choice([*self.scheduler.running, *self.scheduler.waiting])
        self.scheduler.cancel(victim)
        self.cancelled.add(victim)
        self.seen["cancelled"] += 1

    def step(self) -> None:
        scheduler, model, limits = self.scheduler, self.model, self.limits
        # Whoever runs already goes before a newcomer of a better priority, which has to find a
        # place first.
        order = [s.key for s in scheduler.running.values()] or [
            s.key for s in scheduler.waiting.values()
        ]
        model.last_rows = {}
        news = self.core.step()
        assert (
            len(model.last_rows) <= limits.max_running
            and sum(map(len, model.last_rows.values())) <= limits.step_tokens
        )
        first = min(order)[1] if order else None
        self.num_held = (
            0
            if first is None or first in model.last_rows or first != self.last_first
            else self.num_held + 1
        )
        self.last_first = first
        assert self.num_held <= (first is not None and self.requests[first][4]) * (
            1 + self.most_delay
        ), "the first in order did not advance"
        self.seen["waited for a mask"] += self.num_held > 0
        if scheduler.running and scheduler.waiting and not self.priorities:
            assert max(scheduler.running) < min(scheduler.waiting), "arrival order is lost"
        self.take(news)

    def take(self, news: list[Event]) -> None:
        """Takes the events of a step, and checks their order."""
        scheduler = self.scheduler
        for sequence in scheduler.take_started():
            assert sequence.id not in self.started, "started twice"
            self.started.add(sequence.id)
        for event in news:
            self.hear(event)
        assert scheduler.has_work or not self.core.is_blocked, "an idle engine waits for a mask"
        assert integrity(scheduler) == []
        assert (
            scheduler.allocator.num_available + scheduler.allocator.num_owned
            == self.limits.num_pages
        )
        for sequence in scheduler.running.values():
            self.check_windows(sequence)

    def check_windows(self, sequence: Sequence) -> None:
        """Between two steps, layers with a sliding window keep at most one page more than the
        window.
        """
        layout = self.limits.layout
        for group, pages in zip(layout.groups, sequence.table.pages, strict=True):
            if group.window is not None:
                kept = sum(page >= 0 for page in pages) // group.num_stacks
                assert kept <= pages_for(group.window, layout.page_size) + 1, (
                    "a layer keeps more than its window and a page"
                )
                self.seen["window passed"] += -1 in pages

    def hear(self, event: Event) -> None:
        assert self.ended[event.id] == 0 and event.id not in self.cancelled
        if isinstance(event, PromptScores):
            known = self.scored[event.id]
            assert (
                known is not None and event.first == len(known) + 1 and self.outputs[event.id] == []
            )
            known.extend(score.logprob for score in event.scores)
            self.seen["scored"] += 1
            return
        assert isinstance(event, Token) and event.index == len(self.outputs[event.id])
        self.outputs[event.id].append(event.token)
        self.ended[event.id] += event.finish is not None

    def check_output(self, id: int) -> None:
        output, expected, known = self.outputs[id], self.expected(id), self.scored[id]
        if known is not None and output:
            assert known == [
                -float(position) for position in range(1, len(self.requests[id][0]))
            ], "not every prompt token once"
        if id in self.cancelled:
            assert output == expected[: len(output)] and self.ended[id] == 0
        else:
            assert output == expected and self.ended[id] == 1
            self.seen["finished"] += 1


def run_histories(seeds: range, make: Callable[[int], History]) -> Counter[str]:
    """What happened in these histories, all of which must hold."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += make(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return seen


@pytest.mark.parametrize("part", range(4))
def test_every_admitted_request_ends_once_and_nothing_leaks(part: int) -> None:
    seen = run_histories(range(part, SEEDS, 4), History)
    # The histories are worth something only if the rare things happen in them often.
    assert min(seen[kind] for kind in KINDS) > 15, seen


@pytest.mark.slow
def test_every_admitted_request_ends_once_and_nothing_leaks_in_many_histories() -> None:
    seen = run_histories(range(SEEDS, MANY), History)
    assert min(seen[kind] for kind in KINDS) > 960, seen


def test_arrival_order_decides_who_starts_and_who_is_preempted() -> None:
    scheduler = Scheduler(
        Limits(num_pages=4, layout=one_group(1), max_context=100, max_running=4, step_tokens=8)
    )
    submit(scheduler, 0, [1, 2], 2, Sampling())
    submit(scheduler, 1, [3], 3, Sampling())
    plan = scheduler.plan()
    assert [row.sequence for row in plan.rows] == [0, 1]
    scheduler.commit(plan, StepResult((SampledToken(9, 0.0), SampledToken(9, 0.0))))
    # 0 takes a third page; 1, the youngest, finds none for its second token and makes way.
    plan = scheduler.plan()
    assert (
        [row.sequence for row in plan.rows] == [0]
        and list(scheduler.waiting) == [1]
        and scheduler.num_preemptions == 1
    )
    (advance,) = scheduler.commit(plan, StepResult((SampledToken(9, 0.0),)))
    assert advance.finish == "length"
    (row,) = scheduler.plan().rows
    assert (row.sequence, list(row.tokens), row.start) == (1, [9], 1), (
        "its first page was still there"
    )


def test_a_long_prompt_is_chunked_and_does_not_stall_the_others() -> None:
    scheduler = Scheduler(
        Limits(num_pages=100, layout=one_group(4), max_context=300, max_running=4, step_tokens=16)
    )
    submit(scheduler, 0, list(range(100)), 5, Sampling())
    submit(scheduler, 1, [1], 5, Sampling())
    first = scheduler.plan()
    assert [(row.sequence, len(row.tokens)) for row in first.rows] == [(0, 16)]
    scheduler.commit(first, StepResult((None,)))
    scheduler.cancel(0)
    scheduler.commit(scheduler.plan(), StepResult((SampledToken(7, 0.0),)))
    submit(scheduler, 2, list(range(100)), 5, Sampling())
    mixed = scheduler.plan()
    assert [(row.sequence, len(row.tokens)) for row in mixed.rows] == [(1, 1), (2, 15)]
    assert mixed.rows[1].sample is None


def test_a_token_to_be_scored_takes_twice_the_budget() -> None:
    scheduler = Scheduler(
        Limits(num_pages=100, layout=one_group(4), max_context=300, max_running=4, step_tokens=16)
    )
    submit(scheduler, 0, [1], 50, Sampling())
    submit(scheduler, 1, list(range(100)), 5, Sampling(), score_prompt=True)
    plan = scheduler.plan()
    assert [(row.sequence, len(row.tokens)) for row in plan.rows] == [(0, 1), (1, 7)]
    scheduler.commit(
        plan,
        StepResult(
            (SampledToken(7, 0.0), None), {1: [SampledToken(token, 0.0) for token in range(1, 8)]}
        ),
    )
    submit(scheduler, 2, list(range(100)), 5, Sampling(), score_prompt=True)
    assert [(row.sequence, len(row.tokens)) for row in scheduler.plan().rows] == [
        (0, 1),
        (1, 7),
        (2, 1),
    ]


def test_a_replayed_sequence_goes_on_behind_its_output() -> None:
    scheduler = Scheduler(
        Limits(num_pages=10, layout=one_group(4), max_context=40, max_running=1, step_tokens=40)
    )
    submit(scheduler, 0, [1, 2, 3], 10, Sampling(), output=[4, 5])
    plan = scheduler.plan()
    assert list(plan.rows[0].tokens) == [1, 2, 3, 4, 5]
    (advance,) = scheduler.commit(plan, StepResult((SampledToken(6, 0.0),)))
    assert advance.index == 2


@pytest.mark.parametrize(
    ("prompt", "max_new"),
    [([], 5), ([1], 0)],
)
def test_nonsense_is_refused(prompt: list[int], max_new: int) -> None:
    scheduler = Scheduler(
        Limits(num_pages=10, layout=one_group(4), max_context=40, max_running=1, step_tokens=40)
    )
    with pytest.raises(ValueError):
        submit(scheduler, 0, prompt, max_new, Sampling())


def test_budget_below_the_running_set_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens"):
        Scheduler(
            Limits(num_pages=10, layout=one_group(4), max_context=40, max_running=8, step_tokens=4)
        )


def test_an_empty_plan_when_idle() -> None:
    scheduler = Scheduler(
        Limits(num_pages=10, layout=one_group(4), max_context=40, max_running=8, step_tokens=40)
    )
    assert scheduler.plan() == StepPlan(())
    assert not scheduler.has_work


def test_a_row_that_cannot_draw_ends_alone_and_frees_its_pages() -> None:
    scheduler = Scheduler(
        Limits(num_pages=10, layout=one_group(4), max_context=40, max_running=8, step_tokens=40)
    )
    submit(scheduler, 0, [1, 2], 5, Sampling())
    submit(scheduler, 1, [1, 2], 5, Sampling())
    failed, fine = scheduler.commit(
        scheduler.plan(), StepResult((SampleError("why"), SampledToken(3, 0.0)))
    )
    assert failed == Failed(0, "why") and fine == Token(1, 0, 3, 0.0)
    assert list(scheduler.running) == [1] and integrity(scheduler) == []


def test_a_page_to_spare_for_each_that_runs_or_the_newcomer_waits() -> None:
    scheduler = Scheduler(
        Limits(num_pages=6, layout=one_group(4), max_context=100, max_running=4, step_tokens=32)
    )
    for id in range(3):
        # Two pages each: the third would leave none to grow into.
        submit(scheduler, id, [id] * 7, 2, Sampling())
    assert [row.sequence for row in scheduler.plan().rows] == [0, 1]


def test_everyone_running_gets_a_token_before_anyone_gets_more() -> None:
    scheduler = Scheduler(
        Limits(num_pages=100, layout=one_group(4), max_context=300, max_running=3, step_tokens=10)
    )
    submit(scheduler, 0, [1] * 4, 5, Sampling())
    submit(scheduler, 1, [2] * 50, 5, Sampling())
    submit(scheduler, 2, [3] * 50, 5, Sampling())
    assert [(row.sequence, len(row.tokens)) for row in scheduler.plan().rows] == [(0, 4), (1, 6)]
    scheduler = Scheduler(
        Limits(num_pages=100, layout=one_group(4), max_context=300, max_running=3, step_tokens=10)
    )
    for id in range(3):
        submit(scheduler, id, [id] * 5, 50, Sampling())
    scheduler.commit(scheduler.plan(), StepResult((SampledToken(7, 0.0), SampledToken(7, 0.0))))
    counts = [(row.sequence, len(row.tokens)) for row in scheduler.plan().rows]
    assert counts == [(0, 1), (1, 1), (2, 5)]


def test_choices_of_one_prompt_compute_its_whole_pages_once() -> None:
    """For every output length, with fewer running sequences than choices."""
    for max_new in (1, 5):
        scheduler = Scheduler(
            Limits(
                num_pages=400, layout=one_group(16), max_context=600, max_running=4, step_tokens=64
            )
        )
        model = HashModel(one_group(16))
        core = EngineCore(scheduler, model)
        prompt = list(range(60)) * 6
        for id in range(20):
            submit(scheduler, id, list(prompt), max_new, Sampling(seed=id))
        while scheduler.has_work:
            core.step()
            assert integrity(scheduler) == []
        whole = (len(prompt) - 1) // 16 * 16
        assert scheduler.num_hit_tokens == 19 * whole
        assert scheduler.num_computed_tokens == 20 * (len(prompt) + max_new - 1) - 19 * whole
        assert scheduler.allocator.num_owned == 0


def test_cached_pages_make_way_for_whoever_needs_them() -> None:
    scheduler = Scheduler(
        Limits(num_pages=6, layout=one_group(4), max_context=24, max_running=2, step_tokens=32)
    )
    model = HashModel(one_group(4))
    core = EngineCore(scheduler, model)
    submit(scheduler, 0, [1] * 9, 1, Sampling())
    # The whole pool, before the one that would share.
    submit(scheduler, 1, [2] * 20, 4, Sampling())
    submit(scheduler, 2, [1] * 9, 1, Sampling())
    ended = []
    for _ in range(20):
        ended += [event.id for event in core.step() if isinstance(event, Token) and event.finish]
        assert integrity(scheduler) == []
    assert ended == [0, 1, 2] and scheduler.allocator.num_owned == 0


def test_a_better_priority_is_served_first_and_preempted_last() -> None:
    scheduler = Scheduler(
        Limits(num_pages=4, layout=one_group(4), max_context=16, max_running=1, step_tokens=32)
    )
    core = EngineCore(scheduler, HashModel(one_group(4)))
    for id, priority in enumerate((0, 0, -5, 3)):
        submit(scheduler, id, [1, 2], 2, Sampling(), priority=priority)
    ended: list[int] = []
    while scheduler.has_work:
        ended += [event.id for event in core.step() if isinstance(event, Token) and event.finish]
    assert ended == [2, 0, 1, 3]


def test_those_who_leave_the_queue_leave_no_trace() -> None:
    scheduler = Scheduler(
        Limits(num_pages=4, layout=one_group(4), max_context=16, max_running=1, step_tokens=32)
    )
    submit(scheduler, 0, [1], 10, Sampling())
    scheduler.plan()
    for id in range(1, 2000):
        submit(scheduler, id, [1, 2], 2, Sampling(), priority=9)
        scheduler.cancel(id)
    assert sum(map(len, scheduler.waiting._heaps.values())) < 200 and not scheduler.waiting


def test_pages_are_shared_with_a_sequence_that_still_runs() -> None:
    scheduler = Scheduler(
        Limits(num_pages=40, layout=one_group(4), max_context=100, max_running=4, step_tokens=64)
    )
    model = HashModel(one_group(4))
    core = EngineCore(scheduler, model)
    submit(scheduler, 0, [1] * 21, 10, Sampling())
    core.step()
    submit(scheduler, 1, [1] * 21, 10, Sampling())
    core.step()
    assert scheduler.num_hit_tokens == 20 and integrity(scheduler) == []


def test_a_failed_sequence_publishes_nothing_and_its_pages_are_cleared_before_anyone_has_them() -> (
    None
):
    scheduler = Scheduler(
        Limits(num_pages=20, layout=one_group(4), max_context=60, max_running=1, step_tokens=8)
    )
    submit(scheduler, 0, [1] * 17, 10, Sampling())
    submit(scheduler, 1, [1] * 17, 10, Sampling())
    for _ in range(2):
        scheduler.commit(scheduler.plan(), StepResult((None,)))
    written = set(scheduler.running[0].table.owned)
    scheduler.commit(scheduler.plan(), StepResult((SampleError("numbers"),)))
    plan = scheduler.plan()
    assert plan.rows[0].start == 0, "the same prompt, and nothing to share"
    assert set(plan.clear) == written and len(written) == 5
    assert integrity(scheduler) == []
