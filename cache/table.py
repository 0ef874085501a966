"""PageTable: the pages of one sequence, in order of position, and the slot of each position.

Invariant: it owns exactly the pages it lists, once each, until it drops or releases them. It knows
nothing of slot contents.
"""

from array import array
from itertools import chain, islice

from cache.layout import CacheLayout, LayerGroup, pages_for
from cache.pages import PageAllocator

DROPPED = -1
"""Replaces the number of a page that has been given back because no later token attends to it."""


class PageTable:
    """The pages of one sequence, for each group of layers.

    Position p of stack j lies in slot `page * page_size + p % page_size` of the page at (p //
    page_size) * num_stacks + j.
    """

    def __init__(self, allocator: PageAllocator, layout: CacheLayout) -> None:
        self.pages: tuple[array[int], ...] = tuple(array("q") for _ in layout.groups)
        """Page numbers of each layer group, as in model.step.Row.pages."""
        self._allocator = allocator
        self._layout = layout
        self.room = 0
        """Tokens that have slots in every group."""

    @property
    def owned(self) -> list[int]:
        """Every page it owns."""
        return [page for page in chain(*self.pages) if page != DROPPED]

    def missing(self, num_tokens: int, end: int | None = None) -> int:
        """Pages to allocate so that `num_tokens` tokens have slots; in layers with a window only
        the tokens before `end`, the position after the last token that the next step computes,
        where these are not all.
        """
        if num_tokens <= self.room:
            return 0
        counts = (self._goal(group, num_tokens, end) for group in self._layout.groups)
        return sum(
            max(0, count - len(pages)) for count, pages in zip(counts, self.pages, strict=True)
        )

    def _goal(self, group: LayerGroup, num_tokens: int, end: int | None) -> int:
        count = num_tokens if group.window is None or end is None else end
        return pages_for(count, self._layout.page_size) * group.num_stacks

    def grow(self, num_tokens: int, end: int | None = None) -> None:
        """Allocates the pages that `missing` counts. Raises OutOfPages, and then changes
        nothing.
        """
        taken = iter(self._allocator.allocate(self.missing(num_tokens, end)))
        for group, pages in zip(self._layout.groups, self.pages, strict=True):
            pages.extend(
                next(taken) for _ in range(self._goal(group, num_tokens, end) - len(pages))
            )
        self._measure()

    def _measure(self) -> None:
        counts = (
            len(pages) // group.num_stacks
            for group, pages in zip(self._layout.groups, self.pages, strict=True)
        )
        self.room = min(counts) * self._layout.page_size

    def drop(self, position: int) -> None:
        """Releases the pages to which no token from `position` on attends."""
        for group, pages in zip(self._layout.groups, self.pages, strict=True):
            end = group.first_seen(position) // self._layout.page_size * group.num_stacks
            last = end
            while last and pages[last - 1] != DROPPED:
                last -= 1
            self._allocator.release(pages[last:end])
            pages[last:end] = array("q", [DROPPED]) * (end - last)

    def trim(self, num_tokens: int) -> None:
        """Releases the pages after the first `num_tokens` tokens."""
        for group, pages in zip(self._layout.groups, self.pages, strict=True):
            end = pages_for(num_tokens, self._layout.page_size) * group.num_stacks
            self._allocator.release(pages[end:])
            del pages[end:]
        self._measure()

    def block(self, index: int) -> list[int]:
        """The pages of block `index`: for each group, one for each stack; DROPPED for pages that
        were released.
        """
        pages: list[int] = []
        for group, all_pages in zip(self._layout.groups, self.pages, strict=True):
            pages += all_pages[index * group.num_stacks : (index + 1) * group.num_stacks]
        return pages

    def share(self, prefix: tuple[list[int], ...]) -> None:
        """Starts an empty table with shared pages, which are never written to. Raises ValueError if
        the table has pages.
        """
        if any(self.pages):
            raise ValueError(f"a table of {len(self.owned)} pages cannot begin with others")
        self._allocator.share(page for page in chain(*prefix) if page != DROPPED)
        for pages, shared in zip(self.pages, prefix, strict=True):
            pages.extend(shared)
        self._measure()

    def append(self, block: list[int]) -> None:
        """Adds the pages of one more block, which are its own."""
        places = iter(block)
        for group, pages in zip(self._layout.groups, self.pages, strict=True):
            pages.extend(islice(places, group.num_stacks))
        self._measure()

    def release(self) -> list[int]:
        """Releases every page and returns those that are free now. Calling it again does
        nothing.
        """
        owned = self.owned
        for pages in self.pages:
            del pages[:]
        self.room = 0
        # In reverse: the first pages are shared by the most sequences and should be evicted last.
        return self._allocator.release(reversed(owned))
