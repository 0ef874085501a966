"""CacheViews: what the pages of the KV cache hold and which sequences are open, for viewers.

Invariant: two views with the same number are equal. It decides nothing, and keeps nothing that a
step needs. Sans-I/O: no clock, randomness, torch or pipe.

Shape letters: P pages of the pool, N pages listed by sequences, R runs of pages.
"""

from array import array
from bisect import bisect_left
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.layout import pages_for
from server.engine.kv_event_log import KvEventLog, block_hash
from server.engine.open_sequences import OpenSequences
from server.engine.sequence import Sequence
from server.protocol import OWNED, SHARED, CacheView, Look, SequenceRow

MOST_WAITING = 1000
"""Waiting sequences in a view, so that a long queue does not hold up steps."""
KIND_BITS, OWNER_SHIFT = 2, 28
"""A cell is what a page holds in one number: its kind in the lowest bits, then the position of its
first token, then its owner's id."""
POSITIONS = (1 << OWNER_SHIFT) - 1


class CacheViews:
    """The views of one engine."""

    def __init__(self, scheduler: OpenSequences, events: KvEventLog | None = None) -> None:
        self._scheduler, self._events = scheduler, events
        layout = scheduler.limits.layout
        self._number = 0
        self._last: tuple[bytes, list[SequenceRow]] | None = None
        blocks = (
            np.arange(pages_for(scheduler.limits.max_context, layout.page_size)) * layout.page_size
            << KIND_BITS
            | OWNED
        )
        self._blocks = [np.repeat(blocks, group.num_stacks) for group in layout.groups]
        """For each group of layers the cells of a sequence's pages, without its id."""

    def answer(self, look: Look) -> CacheView:
        """The view that is asked for."""
        before, self._last = self._last, self._read()
        self._number += before != self._last
        return CacheView(
            self._number,
            self._scheduler.num_steps,
            *self._last,
            self._dump() if look.dump else None,
        )

    def _read(self) -> tuple[bytes, list[SequenceRow]]:
        """The runs of pages that are not free, and a row for each open sequence."""
        scheduler, rows = self._scheduler, list[SequenceRow]()
        pages_N, positions, ids, counts = array("q"), [np.zeros(0, np.int64)], [0], [0]
        # The smallest id is assigned last, and so stays where a page is shared.
        for sequence in sorted(
            [*scheduler.ended_in_flight, *scheduler.running.values()],
            key=lambda sequence: -sequence.id,
        ):
            before = len(pages_N)
            for pages, blocks in zip(sequence.table.pages, self._blocks, strict=True):
                first = bisect_left(pages, 0)  # Those before are DROPPED, which is -1.
                pages_N += pages[first:]
                positions.append(blocks[first : len(pages)])
            ids.append(sequence.id)
            counts.append(len(pages_N) - before)
            rows.append(_row(sequence, "running", counts[-1]))
        # Without an owner, CACHED where it is kept, else FREE.
        cells_P = np.array(scheduler.allocator.kept, np.int64)
        cells_P[pages_N] = np.concatenate(positions) | np.repeat(
            np.array(ids) << OWNER_SHIFT, counts
        )
        cells_P[np.bincount(pages_N, minlength=len(cells_P)) > 1] |= SHARED
        for sequence in islice(scheduler.waiting.values(), MOST_WAITING):
            rows.append(_row(sequence, "preempted" if sequence.num_preemptions else "waiting", 0))
        return _runs(cells_P), rows

    def _dump(self) -> dict[str, Any]:
        """The state as the allocator and the sequences have it, by none of the arrays above."""
        scheduler, allocator = self._scheduler, self._scheduler.allocator
        return {
            "owners": list(allocator.owners),
            "cached": list(allocator.cached),
            "blocks": [*map(block_hash, scheduler.prefixes.blocks)],
            "kv_event": self._events and self._events.number,
            "sequences": {
                str(sequence.id): {
                    "running": sequence.id in scheduler.running,
                    "pages": [list(pages) for pages in sequence.table.pages],
                    "num_computed": sequence.num_computed,
                    "num_output": len(sequence.output),
                }
                for sequence in [
                    *scheduler.ended_in_flight,
                    *scheduler.running.values(),
                    *scheduler.waiting.values(),
                ]
            },
        }


def _row(sequence: Sequence, state: str, num_pages: int) -> SequenceRow:
    return (
        sequence.id,
        sequence.request,
        state,
        len(sequence.prompt),
        sequence.num_cached,
        sequence.num_computed,
        len(sequence.output),
        num_pages,
        sequence.num_preemptions,
    )


def _runs(cells_P: NDArray[np.int64]) -> bytes:
    """The runs of the pages that are not free, as in CacheView."""
    pages = cells_P.nonzero()[0]
    cells = cells_P[pages]
    starts_R = ((np.diff(pages, prepend=-2) != 1) | (np.diff(cells, prepend=-1) != 0)).nonzero()[0]
    counts_R, cells_R = np.diff(starts_R, append=len(pages)), cells[starts_R]
    owners_R = (cells_R >> OWNER_SHIFT) - (cells_R < OWNED)
    columns = (
        pages[starts_R],
        counts_R,
        cells_R & SHARED,
        owners_R,
        (cells_R & POSITIONS) >> KIND_BITS,
    )
    return np.stack(columns, axis=1).tobytes()
