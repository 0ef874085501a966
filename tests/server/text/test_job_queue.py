"""The queue of jobs: bounds, turns and lanes, in a simulation of many clients."""

import random
from collections import Counter

import pytest

from server.errors import Overloaded
from server.text.job_queue import (
    MAX_CHARS,
    MAX_CLIENT_CHARS,
    MAX_CLIENT_JOBS,
    MAX_JOBS,
    QUANTUM,
    JobQueue,
    Ticket,
)


class Simulation:
    """Clients that add jobs of random cost, on so many places a lane; time passes in steps of the
    quantum's tenth.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.places = self.rng.randint(1, 3), self.rng.randint(1, 3)
        self.queue = JobQueue(*self.places)
        self.left: dict[Ticket, float] = {}
        """Job -> processor time that it still needs."""
        self.cost: dict[Ticket, float] = {}
        self.used: dict[Ticket, float] = {}
        self.done: list[Ticket] = []
        self.begun: list[Ticket] = []

    def add(self, client: str, cost: float) -> Ticket:
        ticket = self.queue.add(client, 10)
        self.left[ticket] = self.cost[ticket] = cost
        return ticket

    def step(self, seconds: float = QUANTUM / 10) -> None:
        for ticket in self.queue.start():
            assert ticket.running
            self.left[ticket], self.used[ticket] = self.cost[ticket], 0.0
            self.begun.append(ticket)
        for ticket in [ticket for ticket in self.left if ticket.running]:
            self.left[ticket] -= seconds
            self.used[ticket] += seconds
            if self.left[ticket] <= 0:
                self.end(ticket)
            elif self.used[ticket] >= QUANTUM and not self.queue.is_slow(ticket):
                self.queue.slow_down(ticket)
        running = Counter(self.queue.is_slow(ticket) for ticket in self.left if ticket.running)
        assert running[False] <= self.places[0] and running[True] <= self.places[1]

    def end(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        del self.left[ticket]
        self.done.append(ticket)


@pytest.mark.parametrize("part", range(4))
def test_every_job_ends_and_nothing_is_left_behind(part: int) -> None:
    for seed in range(part, 1000, 4):
        simulation, rng = Simulation(seed), random.Random(seed)
        added = []
        for _ in range(rng.randint(1, 60)):
            added.append(simulation.add(rng.choice("abc"), rng.choice([0.01, 0.05, 0.3, 1.0])))
            for _ in range(rng.randint(0, 4)):
                simulation.step()
            if simulation.left and rng.random() < 0.1:  # A client leaves.
                simulation.end(rng.choice([*simulation.left]))
        for _ in range(100_000):
            if not simulation.left:
                break
            simulation.step()
        assert sorted(map(id, simulation.done)) == sorted(map(id, added)), seed
        assert not simulation.queue._jobs and simulation.queue.add("z", MAX_CLIENT_CHARS + 1), seed


def test_a_cheap_job_waits_for_one_turn_of_each_other_client_only() -> None:
    for seed in range(1000):
        simulation, rng = Simulation(seed), random.Random(seed)
        attackers = [str(number) for number in range(rng.randint(1, 4))]
        for client in attackers:
            for _ in range(50):
                simulation.add(client, 10.0)
        for _ in range(rng.randint(0, 100)):
            simulation.step()
        cheap = simulation.add("victim", 0.01)
        # It waits for what runs, and for one job of each client whose turn comes before.
        for _ in range(11 * (len(attackers) + 1)):
            simulation.step()
        assert cheap in simulation.done, seed


def test_one_client_leaves_a_place_to_others() -> None:
    queue = JobQueue(3, 3)
    mine = [queue.add("a", 1) for _ in range(10)]
    assert list(queue.start()) == mine[:2]
    other = queue.add("b", 1)
    assert list(queue.start()) == [other]
    queue.slow_down(mine[0])
    queue.slow_down(mine[1])
    assert mine[0].running and mine[1].running and list(queue.start()) == mine[2:4]
    queue.slow_down(mine[2])
    assert not mine[2].running, "two of the three places in the slow lane are its client's"


def test_what_waits_is_bounded_by_client_and_in_all() -> None:
    queue = JobQueue(1, 1)
    tickets = [queue.add("a", 1) for _ in range(MAX_CLIENT_JOBS)]
    with pytest.raises(Overloaded, match=f"at most {MAX_CLIENT_JOBS}") as refused:
        queue.add("a", 1)
    assert refused.value.retry_after
    for client in "bcd":
        for _ in range(MAX_CLIENT_JOBS):
            queue.add(client, 1)
    with pytest.raises(Overloaded, match=f"at most {MAX_JOBS}"):
        queue.add("e", 1)
    queue.remove(tickets[0])
    queue.add("e", MAX_CLIENT_CHARS + 1)

    queue = JobQueue(1, 1)
    queue.add("a", MAX_CHARS + 1)
    for client in "ab":
        with pytest.raises(Overloaded, match="characters"):
            queue.add(client, 1)
