"""Fair shares of an engine among clients, by virtual token counters (Sheng et al. 2024, "Fairness
in Serving Large Language Models").

A client's counter is the tokens that it was served, divided by its weight. The client with the
smallest counter is admitted next, so that clients that always have sequences waiting are served in
proportion to their weights. Invariant: a client has no claim to what it did not wait for: when it
begins to wait, its counter is lifted to the smallest one of those that wait already, or to the
largest of all if none does. This module decides; it preempts and admits nothing, and knows no pages
but their number.
"""

from collections import defaultdict
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from server.engine.account import Account
from server.engine.sequence import Sequence
from server.engine.waiting_queue import WaitingQueue
from server.protocol import Share

QUANTUM = 256
"""How far, in tokens, a waiting client's counter must be below a running one's before a sequence of
the latter is preempted."""


@dataclass(slots=True)
class _Holding:
    """The part of the running set and of the KV cache that a client holds."""

    sequences: int = 0
    pages: int = 0

    def add(self, sequence: Sequence, number: int = 1) -> None:
        self.sequences += number
        self.pages += number * num_pages(sequence)


class FairShares:
    """The accounts of the clients of one scheduler. `running` and `waiting` are the scheduler's."""

    def __init__(
        self, max_running: int, num_pages: int, running: dict[int, Sequence], waiting: WaitingQueue
    ) -> None:
        self._max_running, self._num_pages = max_running, num_pages
        self._running, self._waiting = running, waiting
        self.accounts: dict[str, Account] = {}
        self._top = 0.0
        """The largest counter there ever was."""

    def account(self, share: Share) -> Account:
        """The account of a client that submits a sequence."""
        contenders = self._contenders()
        waiting = [head.account.served for head in contenders if head.rank <= share.rank]
        self._top = max([self._top, *(account.served for account in self.accounts.values())])
        floor = min(waiting, default=self._top)
        account = self.accounts.get(share.client)
        if account is None:
            self._forget(floor)
            account = self.accounts[share.client] = Account(share.client)
        account.weight, account.max_running = share.weight, share.max_running
        if all(head.account is not account for head in contenders):
            account.served = max(account.served, floor)
        return account

    def _forget(self, floor: float) -> None:
        """Drops the accounts of clients without sequences that would be lifted when they came back,
        if there are many accounts.
        """
        if len(self.accounts) > 2 * (len(self._running) + len(self._waiting)) + 64:
            active = {
                sequence.account for sequence in (*self._running.values(), *self._waiting.values())
            }
            self.accounts = {
                client: account
                for client, account in self.accounts.items()
                if account in active or account.served > floor
            }

    def _contenders(self) -> list[Sequence]:
        """The next sequence of each client that has any waiting and fewer running than it may."""
        heads = self._waiting.heads()
        if any(head.account.max_running for head in heads):
            held = self._held()
            heads = [
                head
                for head in heads
                if not 0 < head.account.max_running <= held[head.account].sequences
            ]
        return heads

    def next(self) -> Sequence | None:
        """The sequence to admit next; it stays in the queue."""
        return min(self._contenders(), key=served_order, default=None)

    def _held(self) -> defaultdict[Account, _Holding]:
        held: defaultdict[Account, _Holding] = defaultdict(_Holding)
        for sequence in self._running.values():
            held[sequence.account].add(sequence)
        return held

    def is_behind(self, account: Account) -> bool:
        """Whether a client that waits was served less than a running one, by more than the
        quantum.
        """
        return any(
            sequence.account.served > account.served + QUANTUM
            for sequence in self._running.values()
        )

    def victims(self, waiter: Sequence, places: int, pages: int, needed: int) -> list[Sequence]:
        """The sequences to preempt so that `waiter`, which needs `needed` pages, gets the places
        and pages that are missing: the newest of the clients that were served most. Empty if it
        would not get them.

        No client is left with a smaller part of the running set or the cache (the larger of the
        two, by weight) than the waiting one gets. A sequence that was preempted before has
        generated a token since, so that sequences cannot preempt each other for ever.
        """
        held = self._held()
        own = held[waiter.account]
        wanted = self._part(_Holding(own.sequences + 1, own.pages + needed), waiter.account)
        rest = [
            sequence
            for sequence in self._running.values()
            if sequence.account.served > waiter.account.served + QUANTUM
            and sequence.rank >= waiter.rank
            and len(sequence.output) > sequence.preempted_at
        ]
        rest.sort(key=lambda sequence: (sequence.account.served, sequence.key))
        chosen: list[Sequence] = []
        while (places > 0 or pages > 0) and rest:
            sequence = rest.pop()
            holding = held[sequence.account]
            if self._part(holding, sequence.account) > wanted:
                chosen.append(sequence)
                holding.add(sequence, -1)
                places, pages = places - 1, pages - num_pages(sequence)
        return [] if places > 0 or pages > 0 else chosen

    def _part(self, holding: _Holding, account: Account) -> float:
        """The part of the engine that a client holds, by its weight."""
        return (
            max(holding.sequences / self._max_running, holding.pages / self._num_pages)
            / account.weight
        )


def served_order(sequence: Sequence) -> tuple[int, float, int]:
    """Sequences of the client that was served least first, but for those that clients with that
    right have put before or after others.
    """
    return sequence.rank, sequence.account.served, sequence.id


def step_counts(sequences: Ordered[Sequence], spare: int) -> dict[int, int]:
    """How many tokens of each sequence to compute in a step: one, and more as far as a token budget
    of `spare` allows, the client that was served least first.
    """
    counts = {sequence.id: 1 for sequence in sequences}
    for sequence in sorted(
        [sequence for sequence in sequences if sequence.num_plannable > 1], key=served_order
    ):
        more = min(sequence.num_plannable - 1, spare // sequence.token_cost)
        counts[sequence.id] += more
        spare -= more * sequence.token_cost
    return counts


def num_pages(sequence: Sequence) -> int:
    """Pages that a sequence lists; those that it shares with others are counted for each."""
    return sum(len(pages) for pages in sequence.table.pages)
