"""PrefixReuse: blocks of tokens that sequences have computed, and those that one of them is about to compute, so that nobody else does.

Invariant: a block is claimed by a running sequence that has all its tokens and has not computed it, or by nobody. It allocates nothing
and decides nothing about who runs.
"""

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.prefix import Block, PrefixCache
from server.engine.sequence import Sequence


class PrefixReuse:
    """The blocks of a scheduler's sequences."""

    def __init__(self, allocator: PageAllocator, layout: CacheLayout) -> None:
        self.prefixes = PrefixCache(allocator, layout)
        self._page_size = layout.page_size
        self._claims: dict[bytes, int] = {}
        """Name of a block -> the running sequence that is about to compute it, for which others that begin with it wait."""

    def find(self, sequence: Sequence) -> list[Block] | None:
        """The blocks behind which a newcomer can begin; None while somebody computes the next one."""
        most = sequence.num_skippable // self._page_size
        links = sequence.links(most, self._page_size)
        blocks = self.prefixes.match(links)
        return None if len(blocks) < most and links[len(blocks)].name in self._claims else blocks

    def begin(self, sequence: Sequence, blocks: list[Block]) -> None:
        """Starts a sequence behind blocks that were computed before, and claims those that it will compute of what it has."""
        if blocks:
            sequence.table.share(self.prefixes.prefix(blocks))
            sequence.num_computed = len(blocks) * self._page_size
        sequence.found = blocks
        for link in sequence.links(sequence.num_tokens // self._page_size, self._page_size)[len(blocks) :]:
            if link.name not in self._claims:
                self._claims[link.name] = sequence.id
                sequence.claims.append(link.name)

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Lists the blocks that the computation of tokens `start` .. `end` - 1 has completed."""
        first, last = start // self._page_size, end // self._page_size
        for index, link in enumerate(sequence.links(last, self._page_size)[first:], start=first):
            block = self.prefixes.publish(link, sequence.table, index)
            if block is not None:
                sequence.published.append(block)
            if self._claims.get(link.name) == sequence.id:
                del self._claims[link.name]
                sequence.claims.remove(link.name)

    def release_claims(self, sequence: Sequence) -> None:
        """Gives up what a sequence has claimed: it will not compute it now."""
        for name in sequence.claims:
            del self._claims[name]
        sequence.claims.clear()

    def retract(self, sequence: Sequence, found: bool) -> None:
        """Forgets what a failed sequence has listed, and what it found, if that may have been wrong, too."""
        for block in sequence.published + (sequence.found if found else []):
            self.prefixes.retract(block)

    def integrity(self, running: list[Sequence]) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        claims = {name: sequence.id for sequence in running for name in sequence.claims}
        return self.prefixes.integrity() + ([] if claims == self._claims else ["blocks are claimed by nobody who runs"])
