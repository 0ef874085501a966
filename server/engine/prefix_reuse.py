"""Prefix reuse: computed blocks, and blocks claimed by a running sequence.

A block is `cache.page_size` consecutive tokens after a given prefix, and their pages in every page
group (cache.prefix.Block). A sequence claims the blocks that it is about to compute; a new sequence
with the same prefix waits for them instead of computing them again. Invariant: a claimed block
belongs to one running sequence, which has all its tokens and has not computed it. This module
allocates no pages and does not decide which sequence runs.
"""

from cache.disk import DiskCache
from cache.layout import CacheLayout
from cache.ledger import PageLedger
from cache.pages import PageAllocator
from cache.prefix import Block, PrefixCache
from cache.table import DROPPED
from server.engine.sequence import Sequence


class PrefixReuse:
    """The prefix cache of a scheduler, and the claims of its sequences; unless `is_used`, every
    sequence is computed from its first token."""

    def __init__(
        self,
        allocator: PageAllocator,
        layout: CacheLayout,
        ledger: PageLedger | None,
        disk: DiskCache | None,
        is_used: bool,
    ) -> None:
        self.prefixes = PrefixCache(allocator, layout, ledger, disk)
        self._ledger = ledger
        self._allocator = allocator
        self._page_size = layout.page_size
        self._is_used = is_used
        self._claims: dict[bytes, int] = {}
        """Hash of a block -> id of the running sequence that is about to compute it."""

    def find(self, sequence: Sequence) -> list[Block] | None:
        """The cached blocks that a new sequence begins with; None while a running sequence computes
        the next one.
        """
        most = sequence.num_skippable // self._page_size if self._is_used else 0
        links = sequence.links(most, self._page_size)
        # Once: what is read may be evicted while the sequence waits for more pages.
        if not sequence.has_loaded:
            sequence.has_loaded = True
            self.prefixes.load(links)
        blocks = self.prefixes.match(links)
        return None if len(blocks) < most and links[len(blocks)].name in self._claims else blocks

    def pages_needed(self, sequence: Sequence, blocks: list[Block], most: int) -> int:
        """Pages that a new sequence with these cached blocks takes from the pool to compute up to
        `most` of its tokens.
        """
        shared = [page for pages in self.prefixes.prefix(blocks) for page in pages]
        needed = sequence.table.missing(
            sequence.num_tokens, min(sequence.num_tokens, len(blocks) * self._page_size + most)
        ) - len(shared)
        # Cached pages without an owner stop being available.
        return needed + sum(page != DROPPED and not self._allocator.owners[page] for page in shared)

    def begin(self, sequence: Sequence, blocks: list[Block]) -> None:
        """Gives a sequence the pages of cached blocks, and claims the blocks of its tokens that no
        other sequence has claimed: those that it can compute without waiting for a mask, as others
        wait for them.
        """
        if blocks:
            sequence.table.share(self.prefixes.prefix(blocks))
            sequence.num_computed = len(blocks) * self._page_size
        sequence.found, sequence.num_recorded = blocks, sequence.num_computed
        if self.prefixes.tails:
            self._take_tail(sequence)
        if not self._is_used:
            return
        end = sequence.num_computed + sequence.num_plannable
        for link in sequence.links(end // self._page_size, self._page_size)[len(blocks) :]:
            if link.name not in self._claims:
                self._claims[link.name] = sequence.id
                sequence.claims.append(link.name)

    def _take_tail(self, sequence: Sequence) -> None:
        """Goes on within a block that an engine before has begun for this sequence."""
        start = sequence.num_computed
        end = min(start + self._page_size, sequence.num_skippable)
        pages, count = self.prefixes.take_tail(self._before(sequence), sequence.tokens(start, end))
        if count:
            sequence.table.append(pages)
            sequence.num_computed += count
            self.record(sequence, sequence.num_computed)
            # It may take as many pages for what it computes next as it would without the tail.
            sequence.table.drop(sequence.num_computed)

    def _before(self, sequence: Sequence) -> bytes | str:
        """The parent of the block that is recorded next: its hash, or the salt for the first."""
        links = sequence.links(sequence.num_recorded // self._page_size, self._page_size)
        return links[-1].name if links else sequence.salt

    def record(self, sequence: Sequence, end: int) -> None:
        """Writes into the ledger that the tokens before `end` are computed."""
        size = self._page_size
        while self._ledger is not None and sequence.num_recorded < end:
            start = sequence.num_recorded
            pages = sequence.table.block(start // size)
            stop = min(end, (start // size + 1) * size)
            if DROPPED not in pages:
                if start % size == 0:
                    self._ledger.begin(self._before(sequence), pages)
                self._ledger.append(pages, sequence.tokens(start, stop))
            sequence.num_recorded = stop

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Adds to the prefix cache the blocks that are complete now that tokens `start` .. `end` -
        1 are computed.
        """
        if not self._is_used:
            return
        first, last = start // self._page_size, end // self._page_size
        for index, link in enumerate(sequence.links(last, self._page_size)[first:], start=first):
            block = self.prefixes.publish(link, sequence.table, index)
            if block is not None:
                sequence.published.append(block)
            if self._claims.get(link.name) == sequence.id:
                del self._claims[link.name]
                sequence.claims.remove(link.name)

    def release_claims(self, sequence: Sequence) -> None:
        """Releases the claims of a sequence that stops running."""
        for name in sequence.claims:
            del self._claims[name]
        sequence.claims.clear()

    def retract(self, sequence: Sequence, found: bool) -> None:
        """Removes from the prefix cache and from the disk the blocks that a corrupt sequence added
        and, with `found`, those that it reused.
        """
        for block in sequence.published + (sequence.found if found else []):
            self.prefixes.discard(block)
