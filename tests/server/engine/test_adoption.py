"""An engine that takes over from one that died goes on where that one was, with the same tokens."""

import random
from typing import Any

import pytest

from cache.layout import CacheLayout
from cache.ledger import PageLedger
from model.step import Sampling
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Token
from tests.support.hash_model import HashModel, oracle
from tests.support.integrity import integrity
from tests.support.submitting import submit

LAYOUTS = [
    CacheLayout.of(1, (), 4),
    CacheLayout.of(3, (6, None, 6), 4),
    CacheLayout.of(2, (9, 9), 4),
    CacheLayout.of(4, (1, 20, None, None), 2),
]


class Engines:
    """One engine after another over the same memory, with sequences that outlive them."""

    def __init__(self, seed: int, pages_per_sequence: int) -> None:
        self.rng = random.Random(seed)
        self.layout = LAYOUTS[seed % len(LAYOUTS)]
        num_pages = 8 * pages_per_sequence * self.layout.pages_per_block
        self.limits = Limits(num_pages, self.layout, 80, 6, self.rng.randint(6, 40))
        self.slots: dict[Any, Any] = {}
        # What was damaged holds nothing.
        self.ledger = PageLedger(
            num_pages, self.layout, lambda pages: [(page, 0) in self.slots for page in pages]
        )
        self.prompts = [
            [self.rng.randrange(30) for _ in range(self.rng.randint(1, 30))] for _ in range(10)
        ]
        self.outputs: list[list[int]] = [[] for _ in self.prompts]
        self.open = set(range(len(self.prompts)))
        self.start()

    def start(self) -> None:
        self.scheduler = Scheduler(self.limits, None, self.ledger)
        self.scheduler.prefixes.adopt()
        assert integrity(self.scheduler) == []
        model = HashModel(self.layout)
        model.slots = self.slots
        self.core = EngineCore(self.scheduler, model)
        for id in sorted(self.open):
            submit(
                self.scheduler,
                id,
                self.prompts[id],
                40,
                Sampling(seed=id),
                [*self.outputs[id]],
                0,
                frozenset(),
            )

    def step(self) -> None:
        for event in self.core.step():
            assert isinstance(event, Token)
            self.outputs[event.id].append(event.token)
            if event.finish is not None:
                self.open.remove(event.id)
        assert integrity(self.scheduler) == []

    def check(self) -> None:
        for id, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            assert output == oracle(prompt, 40, 0, frozenset(), id, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_what_was_computed_is_not_computed_again(seed: int) -> None:
    engines, deaths = Engines(seed, pages_per_sequence=40), 0
    while engines.open:
        engines.step()
        if engines.rng.random() < 0.15:
            deaths += 1
            known = {id: s.num_computed for id, s in engines.scheduler.running.items()}
            engines.start()
            plan = engines.scheduler.plan()
            for id, sequence in engines.scheduler.running.items():
                if id in known and engines.layout.groups[0].window is None:
                    (row,) = [row for row in plan.rows if row.sequence == id]
                    assert row.start == min(known[id], sequence.num_skippable), "to the token"
            engines.start()  # As it had not computed that plan when it died too.
    assert deaths
    engines.check()


@pytest.mark.parametrize("seed", range(40))
def test_every_output_is_right_where_pages_are_short_and_some_are_damaged(seed: int) -> None:
    engines = Engines(seed, pages_per_sequence=5)
    while engines.open:
        engines.step()
        if engines.rng.random() < 0.2:
            num_pages = engines.limits.num_pages
            for page in engines.rng.sample(range(num_pages), num_pages // 4):
                for offset in range(engines.layout.page_size):
                    engines.slots.pop((page, offset), None)
            engines.start()
    engines.check()


def test_a_sequence_that_differs_within_a_block_takes_no_tail_of_it() -> None:
    engines = Engines(0, pages_per_sequence=40)
    engines.prompts, engines.outputs, engines.open = [[1, 2, 3, 4, 5, 6]], [[]], {0}
    engines.start()
    engines.step()
    engines.prompts = [[1, 2, 3, 4, 9, 7], [1, 2, 3, 4, 5, 6]]
    engines.outputs, engines.open = [[], []], {0, 1}
    engines.start()
    plan = engines.scheduler.plan()
    assert {row.sequence: row.start for row in plan.rows} == {0: 4, 1: 5}
    assert engines.scheduler.prefixes.tails == {}
    engines.start()
    while engines.open:
        engines.step()
    engines.check()


def test_a_tail_behind_a_window_takes_no_more_pages_than_there_are() -> None:
    """Prompts of every length that the smallest pools hold, whose engine dies while it computes
    them.
    """
    rng = random.Random(5)
    for _ in range(400):
        layout = CacheLayout.of(2, (None, rng.randint(1, 9)), 4)
        num_pages, step_tokens = rng.randint(4, 13), rng.randint(1, 9)
        limits = Limits(num_pages, layout, 60, 1, step_tokens)
        ledger, slots = (
            PageLedger(num_pages, layout, lambda pages: [True] * len(pages)),
            dict[Any, Any](),
        )
        if limits.capacity < 4:
            continue
        prompt = [rng.randrange(9) for _ in range(rng.randint(2, limits.capacity - 1))]
        for num_steps in (rng.randint(1, 5), rng.randint(0, 3), 10**3):
            scheduler, model = Scheduler(limits, None, ledger), HashModel(layout)
            scheduler.prefixes.adopt()
            model.slots = slots
            submit(scheduler, 1, prompt, 1, Sampling(), [], 0, frozenset())
            core = EngineCore(scheduler, model)
            while scheduler.has_work and num_steps:
                core.step()
                num_steps -= 1
