"""Clients share an engine by the tokens that they were served; none starves, and none gains by
waiting or leaving.
"""

import random
from collections import Counter, defaultdict

import pytest

from model.step import Sampling
from server.engine import fair_shares
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Share, Token
from tests.server.engine.test_core import OverlappedHistory
from tests.server.engine.test_scheduler import History, run_histories
from tests.support.hash_model import HashModel, one_group
from tests.support.integrity import integrity
from tests.support.submitting import submit

SEEDS, MANY = 500, 100_000
"""Histories of every run of the tests, and of `-m slow`."""
ALICE, BOB = Share("alice"), Share("bob")


class ClientHistory(History):
    """The random histories of the scheduler with several clients, some with a weight, a limit or a
    rank of their own.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shares = [
            Share(
                name,
                self.rng.choice([0.5, 1.0, 1.0, 3.0]),
                self.rng.choice([0, 0, 0, 1, 2]),
                self.rng.choice([0, 0, 0, 0, -1, 1]),
            )
            for name in "abcd"[: self.rng.randint(2, 4)]
        ]

    def share(self) -> Share:
        return self.rng.choice(self.shares)

    def step(self) -> None:
        scheduler, preemptions = self.scheduler, self.scheduler.num_preemptions
        had_work, self.model.last_rows = scheduler.has_work, {}
        news = self.core.step()
        rows = self.model.last_rows
        awaited = any(sequence.awaits_mask for sequence in scheduler.running.values())
        assert rows or not had_work or awaited, "nothing was computed"
        assert (
            len(rows) <= self.limits.max_running
            and sum(map(len, rows.values())) <= self.limits.step_tokens
        )
        self.take(news)
        self.check_clients(scheduler.num_preemptions - preemptions)

    def check_clients(self, preempted: int) -> None:
        scheduler = self.scheduler
        running = Counter(sequence.account.client for sequence in scheduler.running.values())
        assert all(
            running[share.client] <= share.max_running for share in self.shares if share.max_running
        ), "more than it may"
        if preempted:
            others = [
                s
                for s in scheduler.waiting.values()
                if s.payer is not None and s.payer is not s.account
            ]
            self.seen["preempted for another client"] += len(others) > 0


class OverlappedClientHistory(OverlappedHistory, ClientHistory):
    """The same with two steps in flight."""

    def step(self) -> None:
        preemptions = self.scheduler.num_preemptions
        OverlappedHistory.step(self)
        self.check_clients(self.scheduler.num_preemptions - preemptions)


@pytest.fixture
def small_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "QUANTUM", 2)


@pytest.mark.usefixtures("small_quantum")
@pytest.mark.parametrize("history", [ClientHistory, OverlappedClientHistory])
def test_every_client_is_served_to_the_end_with_the_same_tokens(history: type[History]) -> None:
    seen = run_histories(range(SEEDS // 2), history)
    assert seen["preempted for another client"] > 30 and seen["finished"] > 300, seen


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("small_quantum")
@pytest.mark.parametrize("history", [ClientHistory, OverlappedClientHistory])
def test_every_client_is_served_to_the_end_in_many_histories(history: type[History]) -> None:
    run_histories(range(SEEDS, MANY), history)


class Demand:
    """Clients that always have sequences waiting, each with its own lengths, on one scheduler."""

    def __init__(
        self,
        shares: list[Share],
        seed: int,
        max_running: int = 8,
        num_pages: int = 400,
        longest: int = 60,
    ) -> None:
        self.rng, self.shares = random.Random(seed), shares
        limits = Limits(
            num_pages,
            one_group(4),
            max_context=400,
            max_running=max_running,
            step_tokens=max_running + 32,
        )
        self.scheduler = Scheduler(limits)
        self.core = EngineCore(self.scheduler, HashModel(one_group(4)))
        self.lengths = {
            share.client: (self.rng.randint(1, longest), self.rng.randint(1, longest))
            for share in shares
        }
        self.cost: Counter[str] = Counter()
        self.owner: dict[int, Share] = {}

    def submit(self, share: Share, num_prompt: int, num_output: int) -> int:
        id = len(self.owner)
        self.owner[id] = share
        prompt = [self.rng.randrange(64) for _ in range(num_prompt)]
        submit(self.scheduler, id, prompt, num_output, Sampling(seed=id), share=share)
        return id

    def step(self, backlogged: list[Share]) -> list[Token]:
        waiting = Counter(self.owner[id].client for id in self.scheduler.waiting)
        for share in backlogged:
            for _ in range(12 - waiting[share.client]):
                self.submit(share, *self.lengths[share.client])
        events = [event for event in self.core.step() if isinstance(event, Token)]
        for event in events:
            share = self.owner[event.id]
            self.cost[share.client] += 2 + (event.index == 0) * len(
                self.scheduler.running[event.id].prompt if not event.finish else ()
            )
        return events


@pytest.mark.parametrize("seed", range(12))
def test_backlogged_clients_are_served_by_weight(seed: int) -> None:
    """Whatever lengths they ask for, and though the first had the server for itself before."""
    shares = [ALICE, Share("bob", weight=3.0)] if seed % 2 else [ALICE, BOB, Share("carol")]
    demand = Demand(shares, seed)
    for _ in range(100):
        demand.step(shares[:1])
    before = {
        share.client: account.served
        for share in shares
        if (account := demand.scheduler._shares.accounts.get(share.client))
    }
    for _ in range(1500):
        demand.step(shares)
    start = before["alice"]
    served = [demand.scheduler._shares.accounts[share.client].served - start for share in shares]
    assert max(served) < 1.1 * min(served), served


@pytest.mark.parametrize("how", ["places", "pages", "long prompts"])
def test_a_newcomer_is_served_at_once_though_another_client_holds_and_awaits_everything(
    how: str,
) -> None:
    demand = Demand([ALICE, BOB], 1, max_running=8, num_pages=400 if how == "places" else 60)
    prompt, output = (150, 4) if how == "long prompts" else (4, 40)
    demand.lengths["alice"] = prompt, output
    for _ in range(60):
        demand.step([ALICE])
    id = demand.submit(BOB, 5, 3)
    steps = 0
    while not any(event.id == id for event in demand.step([ALICE])):
        steps += 1
        assert steps < 40, "it waits for the other client's requests"
    assert integrity(demand.scheduler) == []


def tokens_of(demand: Demand, steps: int | None = None) -> dict[int, list[int]]:
    """The tokens of every sequence in so many steps, or to the end."""
    outputs: dict[int, list[int]] = defaultdict(list)
    while demand.scheduler.has_work if steps is None else steps:
        steps = None if steps is None else steps - 1
        for event in demand.step([]):
            outputs[event.id].append(event.token)
    return outputs


def test_the_newest_sequence_of_the_client_that_was_served_most_makes_place_and_goes_on_as_if_alone() -> (  # noqa: E501
    None
):
    demand, alone = (Demand([ALICE, BOB], 3, max_running=4) for _ in range(2))
    for _ in range(4):
        demand.submit(ALICE, 5, 120)
    before = tokens_of(demand, 40)
    demand.submit(BOB, 5, 120)
    now = tokens_of(demand, 40)
    assert list(demand.scheduler.running) == [0, 1, 2, 4] and list(demand.scheduler.waiting) == [3]
    after = tokens_of(demand)
    expected = {}
    for id in range(4):
        alone.submit(ALICE, 5, 120)
        expected[id] = tokens_of(alone)[id]
    assert {id: before[id] + now[id] + after[id] for id in range(4)} == expected


def test_idle_time_is_not_saved_and_alone_is_no_debt() -> None:
    demand = Demand([ALICE, BOB], 5)
    for _ in range(50):
        demand.step([ALICE])
    demand.submit(BOB, 4, 4)
    accounts = demand.scheduler._shares.accounts
    assert accounts["bob"].served == accounts["alice"].served > 500


def test_clients_that_left_are_forgotten() -> None:
    scheduler = Scheduler(
        Limits(num_pages=40, layout=one_group(4), max_context=16, max_running=2, step_tokens=32)
    )
    core = EngineCore(scheduler, HashModel(one_group(4)))
    for id in range(1000):
        submit(scheduler, id, [1, 2], 2, Sampling(), share=Share(f"client {id}"))
        core.step()
    assert len(scheduler._shares.accounts) < 100


def test_who_has_another_preempted_pays_for_what_is_computed_again() -> None:
    """Else a client with many tiny requests could have another compute the same tokens for ever."""
    demand = Demand([ALICE, BOB], 7, max_running=2, num_pages=60)
    demand.lengths["alice"] = 60, 100
    # Its pages displace those that were kept for the other client's sequences.
    demand.lengths["bob"] = (
        100,
        1,
    )
    for _ in range(2000):
        demand.step([ALICE, BOB])
    accounts = demand.scheduler._shares.accounts
    assert demand.scheduler.num_preemptions > 10
    assert abs(accounts["alice"].served - accounts["bob"].served) < 2000
