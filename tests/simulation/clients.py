"""The clients of a simulated server: whose requests are whose, and the check that no client is
passed over.

Invariant: a waiting sequence whose client may have more running is admitted before any of a client
that was served more, unless that one has a right of its own to come first (its rank). It knows no
pages: where the first in turn does not fit, no other may be admitted either.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.protocol import Share
from tests.simulation.front import Violation

if TYPE_CHECKING:
    from tests.simulation.plan import Scenario

QUANTUM = 3
"""Replaces that of server.engine.fair_shares, as simulated sequences have few tokens."""


def give_clients(scenario: "Scenario", seed: int) -> None:
    """Divides the requests of a scenario among two or three clients, some with a weight, a limit or
    a rank of their own.
    """
    rng = random.Random(f"clients of {seed}")
    shares = [
        Share(
            name,
            rng.choice([0.5, 1.0, 1.0, 3.0]),
            rng.choice([0, 0, 1, 2]),
            rng.choice([0, 0, 0, 0, 1]),
        )
        for name in "abc"[: rng.randint(2, 3)]
    ]
    for call in scenario.calls:
        share = rng.choice(shares)
        for choice in call.choices:
            choice.share = share


@dataclass
class Turns:
    """The order in which one engine admits sequences. `check` is to be called after each of its
    operations.
    """

    _running: set[int] = field(default_factory=set)
    _served: dict[str, float] = field(default_factory=dict)
    _first: list[Sequence] = field(default_factory=list)
    """The waiting sequences that were next in turn for their clients after the operation before."""

    def check(self, scheduler: Scheduler) -> None:
        """Raises Violation where a client was passed over, or has more running than it may."""
        held = dict.fromkeys(self._served, 0)
        for sequence in scheduler.running.values():
            held[sequence.account.client] = held.get(sequence.account.client, 0) + 1
        for sequence in scheduler.running.values():
            account = sequence.account
            if 0 < account.max_running < held[account.client]:
                raise Violation(
                    f"client {account.client} has {held[account.client]} running, and may have "
                    f"{account.max_running}"
                )
            if sequence.id not in self._running:
                self._check_admitted(sequence, scheduler, held)
        self._running = set(scheduler.running)
        self._served = {
            sequence.account.client: sequence.account.served
            for sequence in scheduler.waiting.values()
        }
        self._first = [head for head in scheduler.waiting.heads() if _may_run(head, held)]

    def _check_admitted(
        self, sequence: Sequence, scheduler: Scheduler, held: dict[str, int]
    ) -> None:
        served = self._served.get(sequence.account.client)
        if served is None:  # It has come since.
            return
        for head in self._first:
            passed_over = (
                head.id in scheduler.waiting
                and head.account is not sequence.account
                and _may_run(head, held)
            )
            if passed_over and head.rank <= sequence.rank and head.account.served < served:
                raise Violation(
                    f"sequence {sequence.id} of client {sequence.account.client}, served "
                    f"{served}, is admitted before {head.id} of "
                    f"client {head.account.client}, served {head.account.served}"
                )


def _may_run(sequence: Sequence, held: dict[str, int]) -> bool:
    account = sequence.account
    return not account.max_running or held.get(account.client, 0) < account.max_running
