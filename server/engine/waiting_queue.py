"""WaitingQueue: sequences by id, with a heap on (priority, arrival).

Invariant: every sequence in the dictionary has an entry in the heap. An entry whose sequence has left the dictionary is skipped;
the heap is rebuilt when there are many of these.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from server.engine.sequence import Sequence


class WaitingQueue(dict[int, Sequence]):
    """A dictionary of sequences; `pop` and `del` remove one from the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        """(key, serial number to break ties, sequence)"""
        self._serial = count()

    def put(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        self[sequence.id] = sequence
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [entry for entry in self._heap if self.get(entry[2].id) is entry[2]]
            heapify(self._heap)
        heappush(self._heap, (sequence.key, next(self._serial), sequence))

    def first(self) -> Sequence | None:
        """The sequence to serve next; it stays in the queue."""
        while self._heap and self.get(self._heap[0][2].id) is not self._heap[0][2]:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None
