"""WaitingQueue: who waits, by id, and who of them is first.

Invariant: whoever is in the dictionary has an entry in the heap. Whoever leaves it out of turn leaves an entry behind, which is passed
over; there are never many more of those than of others.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from server.engine.sequence import Sequence


class WaitingQueue(dict[int, Sequence]):
    """Taking one out (`pop`, `del`) is all that it takes to leave."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        """(key, ticket, sequence)"""
        self._tickets = count()

    def put(self, sequence: Sequence) -> None:
        """Adds one, in its place of the order."""
        self[sequence.id] = sequence
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [entry for entry in self._heap if self.get(entry[2].id) is entry[2]]
            heapify(self._heap)
        heappush(self._heap, (sequence.key, next(self._tickets), sequence))

    def first(self) -> Sequence | None:
        """Who is first in the order."""
        while self._heap and self.get(self._heap[0][2].id) is not self._heap[0][2]:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None
