"""The scheduler under random submits, cancels and tiny pools: nothing leaks, nothing starves, everyone ends exactly once."""

import random
from collections import Counter

import pytest

from model.step import Drawn, NotDrawn, Sampling, StepPlan, StepResult
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, NeverFits, Scheduler
from tests.hash_model import HashModel, oracle

SEEDS = 10_000


def run_seed(seed: int) -> Counter[str]:
    """One random history, checked after every step; what happened in it, for the test that the histories are worth having."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    num_pages = rng.randint(2, 40) if rng.random() < 0.3 else -(-rng.randint(40, 160) // page_size)
    max_running = rng.randint(1, 8)
    limits = Limits(num_pages, page_size, rng.randint(20, 200), max_running, rng.randint(max_running, max_running + 24))
    scheduler = Scheduler(limits)
    model = HashModel(page_size, end_rate=rng.choice([0.0, 0.05, 0.3]))
    core = EngineCore(scheduler, model)
    requests: dict[int, tuple[list[int], int, int, frozenset[int]]] = {}
    outputs: dict[int, list[int]] = {}
    ended: Counter[int] = Counter()
    cancelled: set[int] = set()
    started: set[int] = set()
    seen: Counter[str] = Counter()
    to_submit = rng.randint(1, 12)
    computed_bound = 0
    steps = 0
    while to_submit or scheduler.has_work:
        while to_submit and rng.random() < 0.6:
            to_submit -= 1
            id = len(requests)
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 30))]
            max_new, min_new = rng.randint(1, 40), rng.choice([0, 0, 3])
            stops = frozenset({0}) if rng.random() < 0.7 else frozenset()
            requests[id] = prompt, max_new, min_new, stops
            done = oracle(prompt, max_new, min_new, stops, seed=id, end_rate=model.end_rate)[:-1]
            done = done[: rng.randint(0, len(done))] if rng.random() < 0.2 else []  # As after the death of another engine.
            try:
                scheduler.submit(id, list(prompt), max_new, Sampling(seed=id), done, min_new, stops)
            except NeverFits:
                assert len(prompt) + max_new > min(limits.max_context, num_pages * page_size)
                cancelled.add(id)
                seen["never fits"] += 1
                continue
            outputs[id] = list(done)
            computed_bound += len(prompt) + max_new
        if scheduler.has_work and rng.random() < 0.04:
            victim = rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.cancel(victim)
            cancelled.add(victim)
            seen["cancelled"] += 1
        before = {s.id: (len(s.output), s.num_computed) for s in [*scheduler.running.values(), *scheduler.waiting.values()]}
        advances = core.step()
        assert len(model.last_rows) <= max_running and sum(map(len, model.last_rows.values())) <= limits.step_tokens
        if before:
            oldest = min(before)
            assert oldest in model.last_rows, "the oldest did not advance"
        order = [*scheduler.running, *scheduler.waiting]
        assert order == sorted(order), "arrival order is lost"
        for id in scheduler.take_started():
            assert id not in started, "started twice"
            started.add(id)
        for advance in advances:
            assert ended[advance.id] == 0 and advance.id not in cancelled
            assert advance.index == len(outputs[advance.id])
            outputs[advance.id].append(advance.drawn.token)
            ended[advance.id] += advance.finish is not None
        assert scheduler.integrity() == []
        assert scheduler.allocator.num_free + scheduler.allocator.num_owned == num_pages
        steps += 1
        assert steps < 50 * (computed_bound + 10), "no end in sight"
    assert scheduler.allocator.num_owned == 0
    for id, output in outputs.items():
        expected = oracle(*requests[id], seed=id, end_rate=model.end_rate)
        if id in cancelled:
            assert output == expected[: len(output)] and ended[id] == 0
        else:
            assert output == expected and ended[id] == 1
            seen["finished"] += 1
    seen["preempted"] += scheduler.num_preemptions
    return seen


@pytest.mark.parametrize("part", range(8))
def test_every_admitted_request_ends_once_and_nothing_leaks(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, 8):
        try:
            seen += run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # The histories are worth something only if the rare things happen in them often.
    assert min(seen[kind] for kind in ("finished", "cancelled", "preempted", "never fits")) > 300


def test_arrival_order_decides_who_starts_and_who_is_preempted() -> None:
    scheduler = Scheduler(Limits(num_pages=4, page_size=1, max_context=100, max_running=4, step_tokens=8))
    scheduler.submit(0, [1, 2], 2, Sampling())
    scheduler.submit(1, [3], 3, Sampling())
    plan = scheduler.plan()
    assert [row.sequence for row in plan.rows] == [0, 1]
    scheduler.commit(plan, StepResult((Drawn(9, 0.0), Drawn(9, 0.0))))
    plan = scheduler.plan()  # 0 takes a third page; 1, the youngest, finds none for its second token and makes way.
    assert [row.sequence for row in plan.rows] == [0] and list(scheduler.waiting) == [1] and scheduler.num_preemptions == 1
    (advance,) = scheduler.commit(plan, StepResult((Drawn(9, 0.0),)))
    assert advance.finish == "length"
    (row,) = scheduler.plan().rows
    assert (row.sequence, list(row.tokens), row.start) == (1, [3, 9], 0)


def test_a_long_prompt_is_chunked_and_does_not_stall_the_others() -> None:
    scheduler = Scheduler(Limits(num_pages=100, page_size=4, max_context=300, max_running=4, step_tokens=16))
    scheduler.submit(0, list(range(100)), 5, Sampling())
    scheduler.submit(1, [1], 5, Sampling())
    first = scheduler.plan()
    assert [(row.sequence, len(row.tokens)) for row in first.rows] == [(0, 16)]
    scheduler.commit(first, StepResult((None,)))
    scheduler.cancel(0)
    scheduler.commit(scheduler.plan(), StepResult((Drawn(7, 0.0),)))
    scheduler.submit(2, list(range(100)), 5, Sampling())
    mixed = scheduler.plan()
    assert [(row.sequence, len(row.tokens)) for row in mixed.rows] == [(1, 1), (2, 15)]
    assert mixed.rows[1].sample is None


def test_a_replayed_sequence_goes_on_behind_its_output() -> None:
    scheduler = Scheduler(Limits(num_pages=10, page_size=4, max_context=40, max_running=1, step_tokens=40))
    scheduler.submit(0, [1, 2, 3], 10, Sampling(), output=[4, 5])
    plan = scheduler.plan()
    assert list(plan.rows[0].tokens) == [1, 2, 3, 4, 5]
    (advance,) = scheduler.commit(plan, StepResult((Drawn(6, 0.0),)))
    assert advance.index == 2


@pytest.mark.parametrize(
    ("prompt", "max_new"),
    [([], 5), ([1], 0)],
)
def test_nonsense_is_refused(prompt: list[int], max_new: int) -> None:
    scheduler = Scheduler(Limits(num_pages=10, page_size=4, max_context=40, max_running=1, step_tokens=40))
    with pytest.raises(ValueError):
        scheduler.submit(0, prompt, max_new, Sampling())


def test_budget_below_the_running_set_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens"):
        Scheduler(Limits(num_pages=10, page_size=4, max_context=40, max_running=8, step_tokens=4))


def test_an_empty_plan_when_idle() -> None:
    scheduler = Scheduler(Limits(num_pages=10, page_size=4, max_context=40, max_running=8, step_tokens=40))
    assert scheduler.plan() == StepPlan(())
    assert not scheduler.has_work


def test_a_row_that_cannot_draw_ends_alone_and_frees_its_pages() -> None:
    scheduler = Scheduler(Limits(num_pages=10, page_size=4, max_context=40, max_running=8, step_tokens=40))
    scheduler.submit(0, [1, 2], 5, Sampling())
    scheduler.submit(1, [1, 2], 5, Sampling())
    failed, fine = scheduler.commit(scheduler.plan(), StepResult((NotDrawn("why"), Drawn(3, 0.0))))
    assert failed.drawn == NotDrawn("why") and fine.drawn == Drawn(3, 0.0)
    assert list(scheduler.running) == [1] and scheduler.integrity() == []


def test_a_page_to_spare_for_each_that_runs_or_the_newcomer_waits() -> None:
    scheduler = Scheduler(Limits(num_pages=6, page_size=4, max_context=100, max_running=4, step_tokens=32))
    for id in range(3):
        scheduler.submit(id, [1] * 7, 2, Sampling())  # Two pages each: the third would leave none to grow into.
    assert [row.sequence for row in scheduler.plan().rows] == [0, 1]


def test_everyone_running_gets_a_token_before_anyone_gets_more() -> None:
    scheduler = Scheduler(Limits(num_pages=100, page_size=4, max_context=300, max_running=3, step_tokens=10))
    scheduler.submit(0, [1] * 4, 5, Sampling())
    scheduler.submit(1, [1] * 50, 5, Sampling())
    scheduler.submit(2, [1] * 50, 5, Sampling())
    assert [(row.sequence, len(row.tokens)) for row in scheduler.plan().rows] == [(0, 4), (1, 6)]
    scheduler = Scheduler(Limits(num_pages=100, page_size=4, max_context=300, max_running=3, step_tokens=10))
    for id in range(3):
        scheduler.submit(id, [1] * 5, 50, Sampling())
    scheduler.commit(scheduler.plan(), StepResult((Drawn(7, 0.0), Drawn(7, 0.0))))
    counts = [(row.sequence, len(row.tokens)) for row in scheduler.plan().rows]
    assert counts == [(0, 1), (1, 1), (2, 5)]
