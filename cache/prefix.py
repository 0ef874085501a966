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
from itertools import takewhile
from typing import TYPE_CHECKING

from cache.layout import CacheLayout, LayerGroup
from cache.pages import TAKEN, PageAllocator
from cache.table import DROPPED, PageTable

if TYPE_CHECKING:
    from cache.disk import DiskCache
    from cache.ledger import PageLedger


def root_of(before: bytes | str) -> bytes:
    """The hash that a block's own hash starts from: its parent block's, or that of the salt."""
    return hashlib.sha256(before.encode()).digest() if isinstance(before, str) else before


@dataclass(frozen=True, slots=True)
class Link:
    """One full page of tokens, after all before it."""

    name: bytes
    """The hash of the tokens and of all before them."""
    tokens: bytes
    before: bytes | str
    """The hash of the page before; for the first page the salt."""


def add_link(links: list[Link], salt: str, tokens: Sequence[int]) -> None:
    """Adds to the links of a sequence, in order, the one for the next page's tokens."""
    before = links[-1].name if links else salt
    data = array("I", tokens).tobytes()
    links.append(Link(hashlib.sha256(root_of(before) + data).digest(), data, before))


@dataclass(slots=True, eq=False)
class Block:
    """The pages of a link: for each layer group, one for each of its stacks; DROPPED for a page
    that has been evicted.
    """

    link: Link
    pages: list[int]
    is_whole: bool = True
    """False for an adopted block until the checksums of its pages have been verified."""


class PrefixCache:
    """Blocks by hash. It owns no page: it marks pages to be kept, and the allocator reports each
    one that it evicts. With a ledger, its blocks outlive this process; with a disk, the server.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        layout: CacheLayout,
        ledger: "PageLedger | None" = None,
        disk: "DiskCache | None" = None,
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._ledger = ledger
        self._disk = disk
        self.num_loaded = 0
        """Blocks of which pages were read from the disk."""
        if ledger is not None:
            allocator.marks = ledger.marks
        self.unknown: list[int] = []
        """Pages with what an engine before left in them, which the next step has to clear."""
        self.tails: dict[bytes, list[Block]] = {}
        """Adopted blocks that are not full, by the hash of the tokens before them. They are cached,
        and become the own pages of the sequence that goes on with them."""
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
        known = takewhile(lambda link: link.name in self.blocks, links)
        self._verify([self.blocks[link.name] for link in known])
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

    def adopt(self) -> None:
        """Takes over the blocks in the ledger, from an engine before; to be called before anything
        is allocated. Their contents are checked when they are first found.
        """
        if self._ledger is None:
            return
        for found in self._ledger.blocks():
            name = hashlib.sha256(found.root + found.tokens).digest()
            is_full = len(found.tokens) == 4 * self._layout.page_size
            before = "" if is_full and found.is_first else found.root
            block = Block(Link(name, found.tokens, before), found.pages, is_whole=False)
            if is_full:
                if name not in self.blocks:
                    self._add(block)
            elif DROPPED not in block.pages:
                self.tails.setdefault(found.root, []).append(block)
                self._block_of |= dict.fromkeys(block.pages, block)
        # As at the end of a sequence, its last pages first: these are reused first.
        self._allocator.adopt(reversed(self._block_of))
        for page, mark in enumerate(self._ledger.marks):
            if mark and page not in self._block_of:
                self._allocator.marks[page] = TAKEN
                self.unknown.append(page)

    def load(self, links: Sequence[Link]) -> None:
        """Reads from the disk what a sequence needs to continue after the longest prefix of these
        links that is there or in memory.
        """
        if self._disk is None:
            return
        count = 0
        while count < len(links) and (
            links[count].name in self.blocks or self._disk.has(links[count])
        ):
            count += 1
        links = links[:count]
        self._disk.touch(links)
        first_needed = [self._first_seen(group, count) for group in self._layout.stacks]
        # A block is found by a page of it, though none may be seen.
        first_needed[first_needed.index(min(first_needed))] = 0
        blocks = [
            self.blocks.get(link.name) or Block(link, [DROPPED] * len(first_needed))
            for link in links
        ]
        lacking = [
            (block, place)
            for index, block in enumerate(blocks)
            for place, first in enumerate(first_needed)
            if index >= first and block.pages[place] == DROPPED
        ]
        # Owned, so that they are not evicted for those that are read.
        owned = [page for block in blocks for page in block.pages if page != DROPPED]
        self._allocator.share(owned)
        if len(lacking) <= self._allocator.num_available:
            taken = self._allocator.allocate(len(lacking))
            owned += taken
            # In place, as the scheduler has the same list: what is read must not be cleared.
            self.unknown[:] = set(self.unknown).difference(taken)
            wanted: dict[Block, list[int]] = {}
            for (block, place), page in zip(lacking, taken, strict=True):
                wanted.setdefault(block, [DROPPED] * len(first_needed))[place] = page
            found = self._disk.read((block.link, pages) for block, pages in wanted.items())
            for (block, pages), is_found in zip(wanted.items(), found, strict=True):
                if is_found:
                    self._fill(block, pages)
                else:
                    self.unknown += [page for page in pages if page != DROPPED]
        self._allocator.release(reversed(owned))

    def _fill(self, block: Block, pages: list[int]) -> None:
        """Adds to a block pages that were read; adds the block if it is not in the cache."""
        self.num_loaded += 1
        block.pages = [max(*both) for both in zip(block.pages, pages, strict=True)]
        for page in pages:
            if page != DROPPED:
                self._allocator.keep(page)
                self._block_of[page] = block
        if block.link.name not in self.blocks:
            self._add(block)

    def _verify(self, blocks: Sequence[Block]) -> None:
        """Checks the pages of adopted blocks, once, all together; retracts those with a page that
        does not hold what was written there.
        """
        adopted = [block for block in blocks if not block.is_whole]
        held = [(page, block) for block in adopted for page in block.pages if page != DROPPED]
        if self._ledger is None or not held:
            return
        whole = self._ledger.are_whole([page for page, _ in held])
        for (_, block), is_whole in zip(held, whole, strict=True):
            if not is_whole:
                self.retract(block)
        for block in adopted:
            block.is_whole = True

    def take_tail(self, before: bytes | str, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Gives away the pages of an adopted block that holds these tokens or the first of them,
        which follow what `before` names as in Link: the pages, which have one owner now, and how
        many of the tokens they hold. Of no block, they are none.
        """
        wanted, root = array("I", tokens).tobytes(), root_of(before)
        for block in self.tails.get(root, [])[:]:
            num_bytes = min(len(block.link.tokens), len(wanted))
            same = block.link.tokens[:num_bytes] == wanted[:num_bytes]
            if not (num_bytes and same):
                continue
            self._verify([block])
            if DROPPED not in block.pages:  # Else it was retracted.
                self._forget_tail(root, block)
                self._allocator.share(block.pages)
                for page in block.pages:
                    del self._block_of[page]
                    self._allocator.forget(page)
                return block.pages, num_bytes // 4
        return [], 0

    def _forget_tail(self, root: bytes, block: Block) -> None:
        self.tails[root].remove(block)
        if not self.tails[root]:
            del self.tails[root]

    def _add(self, block: Block) -> None:
        self.blocks[block.link.name] = block
        self._block_of |= {page: block for page in block.pages if page != DROPPED}
        self.on_change(block.link)

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
        for page in pages:
            self._allocator.keep(page)
        block = Block(link, pages)
        self._add(block)
        if self._disk is not None:
            self._disk.write(block)
        return block

    def discard(self, block: Block) -> None:
        """Removes a block whose numbers are wrong, from the disk too."""
        self.retract(block)
        if self._disk is not None:
            self._disk.remove(block.link.name)

    def retract(self, block: Block) -> None:
        """Removes a block; does nothing if it was removed before."""
        if self.blocks.get(block.link.name) is block:
            del self.blocks[block.link.name]
            self.on_change(block.link.name)
        elif block in self.tails.get(root := root_of(block.link.before), []):
            self._forget_tail(root, block)
        else:
            return
        for page in block.pages:
            if page != DROPPED:
                del self._block_of[page]
                self._allocator.marks[page] = TAKEN
                self._allocator.forget(page)
                if not block.is_whole:
                    self.unknown.append(page)
        block.pages = [DROPPED] * len(block.pages)

    def _evicted(self, page: int) -> None:
        block = self._block_of.pop(page)
        place = block.pages.index(page)
        block.pages[place] = DROPPED
        # A block is useless without a page to which every later token attends, and when no page is
        # left. A tail is, without any of its pages.
        if (
            self._layout.stacks[place].window is None
            or all(other == DROPPED for other in block.pages)
            or self.blocks.get(block.link.name) is not block
        ):
            self.retract(block)

    def close(self) -> None:
        """Waits until the disk has what was published."""
        if self._disk is not None:
            self._disk.close()
