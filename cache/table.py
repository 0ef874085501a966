"""PageTable: the pages of one sequence, in order of position, and the slot that each position has.

Invariant: it owns exactly the pages it lists, once each, until `release`. It knows nothing of what a slot stores.
"""

from cache.pages import PageAllocator


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need: the ceiling of tokens over page size."""
    return -(-num_tokens // page_size)


class PageTable:
    """Positions 0 .. capacity - 1 of one sequence. Position p lies in slot `pages[p // page_size] * page_size + p % page_size`."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.pages: list[int] = []
        self._allocator = allocator
        self._page_size = page_size

    def missing(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens have slots."""
        return max(0, pages_for(num_tokens, self._page_size) - len(self.pages))

    def grow(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all. Raises OutOfPages, and then changes nothing."""
        self.pages.extend(self._allocator.allocate(self.missing(num_tokens)))

    def share(self, pages: list[int]) -> None:
        """Begins an empty table with pages that another one has, and that neither will write to. Raises ValueError if it has any."""
        if self.pages:
            raise ValueError(f"a table of {len(self.pages)} pages cannot begin with others")
        self._allocator.share(pages)
        self.pages.extend(pages)

    def release(self) -> list[int]:
        """Gives every page back; those that nobody owns now. Calling it again does nothing."""
        pages, self.pages = self.pages, []
        return self._allocator.release(pages)
