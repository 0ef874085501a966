"""PrefixCache: full pages of computed tokens, shared by all sequences that begin with the same
tokens.

The contents of a page depend only on its tokens and all tokens before them. A page is therefore
identified by a hash of the previous page's hash and its own tokens (as in vLLM's automatic prefix
caching); the first page's hash includes a salt, so that sequences of different salts share nothing.
Invariant: exactly the pages in it are kept by the allocator, and they hold what their hash says;
the tokens themselves are compared on a hit. It knows nothing of sequences and tensors.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.layout import CacheLayout, LayerGroup
from cache.pages import PageAllocator
from cache.table import DROPPED, PageTable


@dataclass(frozen=True, slots=True)
class Link:
    """One full page of tokens, after all before it."""

    name: bytes
    """The hash of the tokens and of all before them."""
    tokens: bytes
    before: bytes | str
    """The hash of the page before; for the first page the salt."""


class Chain:
    """The links of one sequence, in order, as many as have been requested."""

    def __init__(self, salt: str) -> None:
        self.links: list[Link] = []
        self._salt = salt

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds a link for the next page's tokens."""
        before = self.links[-1].name if self.links else self._salt
        root = hashlib.sha256(before.encode()).digest() if isinstance(before, str) else before
        data = array("I", tokens).tobytes()
        self.links.append(Link(hashlib.sha256(root + data).digest(), data, before))


@dataclass(slots=True, eq=False)
class Block:
    """The pages of a link: for each layer group, one for each of its stacks; DROPPED for a page
    that has been evicted.
    """

    link: Link
    pages: list[int]


class PrefixCache:
    """Blocks by hash. It owns no page: it marks pages to be kept, and the allocator reports each
    one that it evicts.
    """

    def __init__(self, allocator: PageAllocator, layout: CacheLayout) -> None:
        self._allocator = allocator
        self._layout = layout
        self.blocks: dict[bytes, Block] = {}
        """By the hash of their tokens and of all before them; each is findable, though pages of it
        may have been evicted."""
        self._block_of: dict[int, Block] = {}
        self.on_change: Callable[[Link | bytes], object] = lambda change: None
        """Called with the link of each block that is added, and with the hash of each that is
        removed."""
        allocator.on_evict = self._evicted

    def match(self, links: Sequence[Link]) -> list[Block]:
        """The blocks of the longest prefix of these links after which a sequence can continue."""
        found: list[Block] = []
        most, gaps = 0, [-1] * len(self._layout.groups)
        for link in links:
            block = self.blocks.get(link.name)
            if block is None or block.link.tokens != link.tokens:
                break
            found.append(block)
            # The last block with an evicted page of a group: tokens that attend to it cannot be
            # computed.
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
        """The first of these blocks to which tokens after them attend."""
        return group.first_seen(num_blocks * self._layout.page_size) // self._layout.page_size

    def prefix(self, blocks: list[Block]) -> tuple[list[int], ...]:
        """The pages of matched blocks, as PageTable.share takes them. Pages to which later tokens
        do not attend are left out.
        """
        found = []
        for group, pages in self._by_group(blocks):
            first = self._first_seen(group, len(blocks)) * group.num_stacks
            found.append([DROPPED] * first + pages[first:])
        return tuple(found)

    def publish(self, link: Link, table: PageTable, index: int) -> Block | None:
        """Adds the pages of block `index` of a table, whose tokens have all been computed. A block
        in the cache that has lost pages is replaced if this one has all. Returns None if nothing
        was added.
        """
        old = self.blocks.get(link.name)
        pages = table.block(index)
        if old is not None and DROPPED in old.pages and DROPPED not in pages:
            self.retract(old)
        elif old is not None or DROPPED in pages:
            return None
        block = self.blocks[link.name] = Block(link, pages)
        for page in pages:
            self._allocator.keep(page)
            self._block_of[page] = block
        self.on_change(link)
        return block

    def retract(self, block: Block) -> None:
        """Removes a block; does nothing if it was removed before."""
        if self.blocks.get(block.link.name) is block:
            del self.blocks[block.link.name]
            for page in block.pages:
                if page != DROPPED:
                    del self._block_of[page]
                    self._allocator.forget(page)
            self.on_change(block.link.name)

    def _evicted(self, page: int) -> None:
        block = self._block_of.pop(page)
        place = block.pages.index(page)
        block.pages[place] = DROPPED
        # A block is useless without a page to which every later token attends, and when no page is
        # left.
        if self._group_at(place).window is None or all(other == DROPPED for other in block.pages):
            self.retract(block)

    def _group_at(self, place: int) -> LayerGroup:
        return [group for group in self._layout.groups for _ in range(group.num_stacks)][place]

    def integrity(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        listed = {
            page: block for block in self.blocks.values() for page in block.pages if page != DROPPED
        }
        if listed != self._block_of or listed.keys() != {
            page for page, kept in enumerate(self._allocator.kept) if kept
        }:
            return ["the pages in the prefix cache and those that the allocator keeps differ"]
        return (
            ["a block in the prefix cache has no pages"]
            if any(set(block.pages) == {DROPPED} for block in self.blocks.values())
            else []
        )
