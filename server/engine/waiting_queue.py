"""WaitingQueue: sequences by id, with a heap for each client on (rank, priority, arrival).

Invariant: every sequence in the dictionary has an entry in its client's heap. An entry whose
sequence has left the dictionary is skipped; a heap is rebuilt when there are many of these. Which
client is next is decided by fair_shares.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from server.engine.account import Account
from server.engine.sequence import Sequence


class WaitingQueue(dict[int, Sequence]):
    """A dictionary of sequences; `pop` and `del` remove one from the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._heaps: dict[Account, list[tuple[tuple[int, int, int], int, Sequence]]] = {}
        """(turn, serial number to break ties, sequence)"""
        self._serial = count()

    def put(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        self[sequence.id] = sequence
        heap = self._heaps.setdefault(sequence.account, [])
        if len(heap) > 2 * len(self) + 64:
            heap[:] = [entry for entry in heap if self.get(entry[2].id) is entry[2]]
            heapify(heap)
        turn = sequence.rank, sequence.priority, sequence.id
        heappush(heap, (turn, next(self._serial), sequence))

    def heads(self) -> list[Sequence]:
        """The next sequence of each client that has any."""
        heads = []
        for account, heap in list(self._heaps.items()):
            while heap and self.get(heap[0][2].id) is not heap[0][2]:
                heappop(heap)
            if heap:
                heads.append(heap[0][2])
            else:
                del self._heaps[account]
        return heads
