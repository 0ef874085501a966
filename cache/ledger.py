"""PageLedger: which tokens the pages hold, written into memory that outlives an engine process.

The process that makes a ledger and a pool forks engines; each finds both as the one before it left
them. A block has a record, at its first page, from when its first token is computed; tokens are
added to it as they are. Invariant: what a record says of a page's contents has been true since
before it was written, and the page is marked otherwise before they change. A record that was torn
by its writer's death fails its check; contents are checked by `are_whole`, before they are used. It
knows nothing of sequences and tensors.
"""

import mmap
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.layout import CacheLayout
from cache.prefix import root_of
from cache.table import DROPPED

HEAD, PART = 2, 3
"""Marks of the page that has the record of a block, and of the block's other pages. Pages that were
never allocated have 0."""
_FIXED = struct.Struct("=Q?32s")
"""The block's number, in order of their beginnings; whether it begins a sequence; the hash of what
is before it."""
_STATE = struct.Struct("=II")
"""A CRC-32 of all that is fixed and of the tokens, and how many tokens there are."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A block as its record has it."""

    root: bytes
    is_first: bool
    tokens: bytes
    pages: list[int]
    """DROPPED for those that are used otherwise by now."""


class PageLedger:
    """`are_whole` says of each page whether its contents are what was written there."""

    def __init__(
        self, num_pages: int, layout: CacheLayout, are_whole: Callable[[Sequence[int]], list[bool]]
    ) -> None:
        self.are_whole = are_whole
        self._num_pages = num_pages
        places = [group.window for group in layout.stacks]
        self._head_place = places.index(None) if None in places else 0
        """Pages of layers without a window are kept longest."""
        self._state_at = _FIXED.size + 4 * len(places)
        self._tokens_at = self._state_at + _STATE.size
        self._record_size = self._tokens_at + 4 * layout.page_size
        # Anonymous shared memory: what one process writes, its parent's next fork reads.
        self._memory = mmap.mmap(-1, num_pages * (5 + self._record_size))
        memory = memoryview(self._memory)
        self._heads = memory[: 4 * num_pages].cast("I")
        """For each page of a block the page that has the record."""
        self.marks = memory[4 * num_pages : 5 * num_pages]
        self._number = 0

    def begin(self, before: bytes | str, pages: Sequence[int]) -> None:
        """Begins the record of a block without tokens. `before`: as in cache.prefix.Link."""
        self._number += 1
        fixed = _FIXED.pack(self._number, isinstance(before, str), root_of(before))
        fixed += array("I", pages).tobytes()
        head = pages[self._head_place]
        at = self._at(head)
        self._memory[at : at + self._tokens_at] = fixed + _STATE.pack(zlib.crc32(fixed), 0)
        for page in pages:
            self._heads[page] = head
            self.marks[page] = HEAD if page == head else PART

    def append(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Adds tokens that have been computed to a block of these pages, if it has a record."""
        head = pages[self._head_place]
        if self.marks[head] != HEAD:
            return
        at = self._at(head)
        check, count = _STATE.unpack_from(self._memory, at + self._state_at)
        data, begin = array("I", tokens).tobytes(), at + self._tokens_at + 4 * count
        self._memory[begin : begin + len(data)] = data
        check, count = zlib.crc32(data, check), count + len(data) // 4
        _STATE.pack_into(self._memory, at + self._state_at, check, count)

    def blocks(self) -> list[Recorded]:
        """The blocks that have tokens, in the order of their beginnings."""
        heads = (page for page in range(self._num_pages) if self.marks[page] == HEAD)
        found = [read for read in map(self._read, heads) if read is not None]
        found.sort(key=lambda numbered: numbered[0])
        self._number = max([self._number, *(number for number, _ in found)])
        return [recorded for _, recorded in found]

    def _at(self, page: int) -> int:
        return 5 * self._num_pages + page * self._record_size

    def _read(self, head: int) -> tuple[int, Recorded] | None:
        """The number of a block, and what its record says if that is whole."""
        record = self._memory[self._at(head) : self._at(head) + self._record_size]
        number, is_first, root = _FIXED.unpack_from(record)
        check, count = _STATE.unpack_from(record, self._state_at)
        tokens = record[self._tokens_at : self._tokens_at + 4 * count]
        if not tokens or zlib.crc32(tokens, zlib.crc32(record[: self._state_at])) != check:
            return None
        pages = [
            page if self.marks[page] in (HEAD, PART) and self._heads[page] == head else DROPPED
            for page in memoryview(record[_FIXED.size : self._state_at]).cast("I")
        ]
        return number, Recorded(root, is_first, tokens, pages)
