"""PrefixCache: whole pages of tokens that have been computed before, to be shared by whoever begins with the same tokens.

What a page holds depends on its tokens, on all before them, and on nothing else. So a page's name is a hash of the name of the page
before it and of its own tokens (as in vLLM's automatic prefix caching), and the first one's of a salt: tenants with different salts find
nothing of each other. Invariant: every page listed here is kept by the allocator and the other way round, and holds what its name says;
the tokens themselves are compared on a hit. It knows nothing of sequences and tensors.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cache.layout import CacheLayout, LayerGroup
from cache.pages import PageAllocator
from cache.table import DROPPED, PageTable


@dataclass(frozen=True, slots=True)
class Link:
    """One whole page of tokens behind all before it."""

    name: bytes
    tokens: bytes


class Chain:
    """The links of one sequence, in order, as far as anyone has asked."""

    def __init__(self, salt: str) -> None:
        self.links: list[Link] = []
        self._root = hashlib.sha256(salt.encode()).digest()

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds a link for the next page's tokens."""
        before = self.links[-1].name if self.links else self._root
        data = array("I", tokens).tobytes()
        self.links.append(Link(hashlib.sha256(before + data).digest(), data))


@dataclass(slots=True, eq=False)
class Block:
    """A link's pages: of each group of layers in turn, one for each of its stacks; DROPPED where one has been given to somebody else."""

    link: Link
    pages: list[int]


class PrefixCache:
    """Blocks by name. It owns no page: it tells the allocator which ones to keep, and hears when one is taken all the same."""

    def __init__(self, allocator: PageAllocator, layout: CacheLayout) -> None:
        self._allocator = allocator
        self._layout = layout
        self._blocks: dict[bytes, Block] = {}
        self._block_of: dict[int, Block] = {}
        allocator.on_evict = self._evicted

    def match(self, links: Sequence[Link]) -> list[Block]:
        """The blocks of the longest prefix of these links that somebody can go on behind."""
        found: list[Block] = []
        most, gaps = 0, [-1] * len(self._layout.groups)
        for link in links:
            block = self._blocks.get(link.name)
            if block is None or block.link.tokens != link.tokens:
                break
            found.append(block)
            # The last block of which a group's page is gone: tokens that see it cannot go on there.
            for number, (_, pages) in enumerate(self._by_group([block])):
                if DROPPED in pages:
                    gaps[number] = len(found) - 1
            seen = (self._first_seen(group, len(found)) for group in self._layout.groups)
            if all(gap < first for gap, first in zip(gaps, seen, strict=True)):
                most = len(found)
        return found[:most]

    def _by_group(self, blocks: list[Block]) -> list[tuple[LayerGroup, list[int]]]:
        grouped, first = [], 0
        for group in self._layout.groups:
            last = first + group.num_stacks
            grouped.append((group, [page for block in blocks for page in block.pages[first:last]]))
            first = last
        return grouped

    def _first_seen(self, group: LayerGroup, num_blocks: int) -> int:
        """The first of so many blocks that tokens behind them see."""
        return group.first_seen(num_blocks * self._layout.page_size) // self._layout.page_size

    def prefix(self, blocks: list[Block]) -> tuple[list[int], ...]:
        """The pages of matched blocks, as PageTable.share takes them: what later tokens do not see is not shared."""
        found = []
        for group, pages in self._by_group(blocks):
            first = self._first_seen(group, len(blocks)) * group.num_stacks
            found.append([DROPPED] * first + pages[first:])
        return tuple(found)

    def publish(self, link: Link, table: PageTable, index: int) -> Block | None:
        """Lists the pages of block `index` of a table, whose tokens have all been computed; None where it is listed already."""
        old = self._blocks.get(link.name)
        pages = table.block(index)
        if old is not None and DROPPED in old.pages and DROPPED not in pages:
            self.retract(old)
        elif old is not None or DROPPED in pages:
            return None
        block = self._blocks[link.name] = Block(link, pages)
        for page in pages:
            self._allocator.keep(page)
            self._block_of[page] = block
        return block

    def retract(self, block: Block) -> None:
        """Forgets a block; one that is forgotten already is fine."""
        if self._blocks.get(block.link.name) is block:
            del self._blocks[block.link.name]
            for page in block.pages:
                if page != DROPPED:
                    del self._block_of[page]
                    self._allocator.forget(page)

    def _evicted(self, page: int) -> None:
        block = self._block_of.pop(page)
        place = block.pages.index(page)
        block.pages[place] = DROPPED
        # Without a page that every later token sees, a block is of no use; nor is one of which nothing is left.
        if self._group_at(place).window is None or all(other == DROPPED for other in block.pages):
            self.retract(block)

    def _group_at(self, place: int) -> LayerGroup:
        return [group for group in self._layout.groups for _ in range(group.num_stacks)][place]

    def integrity(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        listed = {page: block for block in self._blocks.values() for page in block.pages if page != DROPPED}
        if listed != self._block_of or listed.keys() != self._allocator.kept:
            return ["pages are listed as prefixes and not kept, or the other way round"]
        return (
            ["a block is listed of which nothing is left"] if any(set(block.pages) == {DROPPED} for block in self._blocks.values()) else []
        )
