"""Views of the cache: each says what the allocator and the sequences have, whatever happened
before.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from model.step import Sampling
from server import protocol
from server.engine.cache_view import MOST_WAITING, CacheViews
from server.engine.core import EngineCore
from server.engine.limits import Limits
from server.engine.scheduler import Scheduler
from server.protocol import CACHED, OWNED, SHARED, Look
from tests.server.engine.test_core import OverlappedHistory
from tests.server.engine.test_scheduler import History, run_histories
from tests.support.cache_client import CacheClient
from tests.support.hash_model import HashModel, one_group
from tests.support.submitting import submit

SEEDS, MANY = 150, 5000
"""Histories of every run of the tests, and of `-m slow`, of each kind."""


class Watcher:
    """Looks at a scheduler now and then, as the API process does, and compares a viewer's state
    with the scheduler's.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.views = CacheViews(scheduler)
        self.limits = scheduler.limits
        self.rng = random.Random(seed)
        self.chance = self.rng.choice([0.1, 0.5, 1.0])
        self.client = CacheClient()
        self.seen: Counter[str] = Counter()

    def maybe(self) -> None:
        if self.rng.random() < self.chance:
            self.look()

    def look(self) -> None:
        """Raises AssertionError where the states differ."""
        view = protocol.decode_from_engine(protocol.encode(self.views.answer(Look(dump=True))))
        assert isinstance(view, protocol.CacheView) and view.dump is not None
        if view.number != self.client.view:
            self.client.take(event_of(view, self.limits.num_pages))
        else:
            self.seen["no change"] += 1
        stacks = [group.num_stacks for group in self.limits.layout.groups]
        problems = self.client.problems(
            view.dump | {"page_size": self.limits.layout.page_size}, stacks
        )
        assert not problems, problems[:3]
        kinds = Counter(cell[0] for cell in self.client.cells)
        self.seen["looks"] += 1
        for name, kind in (
            ("cached pages", CACHED),
            ("owned pages", OWNED),
            ("shared pages", SHARED),
        ):
            self.seen[name] += kinds[kind] > 0
        for sequence in self.client.sequences.values():
            self.seen[f"{sequence['state']} sequence"] += 1


def event_of(view: protocol.CacheView, num_pages: int) -> dict[str, Any]:
    """The event that the API process makes of a view."""
    head = {"engine": 0, "view": view.number, "step": view.step, "num_pages": num_pages}
    return head | {"cells": numbers(view.runs), "sequences": view.sequences}


def numbers(cells: bytes) -> list[int]:
    return memoryview(cells).cast("q").tolist()


def watched(kind: type[History]) -> Callable[[int], History]:
    """Histories of a kind that are looked at between any two of their events."""

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.watcher = Watcher(self.scheduler, seed)

        def submit(self) -> None:
            super().submit()
            self.watcher.maybe()

        def cancel(self) -> None:
            ending = len(self.scheduler.ended_in_flight)
            super().cancel()
            self.watcher.seen["an ended one in flight"] += (
                len(self.scheduler.ended_in_flight) > ending
            )
            self.watcher.maybe()

        def step(self) -> None:
            super().step()
            self.watcher.maybe()

        def run(self) -> Counter[str]:
            super().run()
            self.watcher.look()
            assert not self.watcher.client.sequences
            return self.watcher.seen

    return Watched


KINDS = (
    "no change",
    "cached pages",
    "owned pages",
    "shared pages",
    "waiting sequence",
    "running sequence",
    "preempted sequence",
)


@pytest.mark.parametrize("kind", [History, OverlappedHistory])
def test_views_say_what_there_is(kind: type[History]) -> None:
    seen = run_histories(range(SEEDS), watched(kind))
    assert min(seen[name] for name in KINDS) > 30, seen
    assert seen["an ended one in flight"] > 2 or kind is History, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [History, OverlappedHistory])
def test_views_say_what_there_is_in_many_histories(kind: type[History]) -> None:
    run_histories(range(SEEDS, MANY), watched(kind))


def scheduler_of(num_pages: int, max_running: int = 4) -> Scheduler:
    return Scheduler(Limits(num_pages, one_group(4), 4096, max_running, max(16, max_running)))


def test_a_view_without_a_difference_keeps_its_number() -> None:
    scheduler = scheduler_of(8)
    views = CacheViews(scheduler)
    assert views.answer(Look()) == views.answer(Look()) == protocol.CacheView(1, 0, b"", [])
    submit(scheduler, 3, [1, 2, 3, 4, 5], 6, Sampling(), request="mine")
    EngineCore(scheduler, HashModel(one_group(4))).step()
    view = views.answer(Look())
    assert (view.number, view.step, numbers(view.runs)) == (2, 1, [0, 1, 2, 3, 0, 1, 1, 2, 3, 4])
    assert view.sequences == [(3, "mine", "running", 5, 0, 5, 1, 2, 0)] and view == views.answer(
        Look()
    )
    scheduler.cancel(3)
    view = views.answer(Look())
    assert (view.number, view.sequences) == (3, [])


def test_a_long_queue_is_cut() -> None:
    scheduler = scheduler_of(8)
    for id in range(MOST_WAITING + 5):
        submit(scheduler, id, [1, 2], 2, Sampling())
    assert [row[0] for row in CacheViews(scheduler).answer(Look()).sequences] == [
        *range(MOST_WAITING)
    ]


def test_reading_pages_leaves_them_to_their_sequences() -> None:
    """An array that numpy refers to cannot grow."""
    scheduler = scheduler_of(64)
    views, core = CacheViews(scheduler), EngineCore(scheduler, HashModel(one_group(4)))
    submit(scheduler, 1, [1], 100, Sampling())
    kept = []
    while scheduler.has_work:
        core.step()
        kept.append(views.answer(Look(dump=True)))
