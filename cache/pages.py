"""PageAllocator: the pages of the KV cache, each free, cached or owned by a number of sequences.

An unowned page is free, or cached: its contents are kept for reuse until the page is needed. Free
pages are allocated first, then cached ones in the order in which they were released (LRU).
Invariant: free + cached + owned == total, and a page is free or cached exactly when it has no
owner. It knows nothing of tokens, tensors or bytes; a page is a number.
"""

from collections.abc import Callable, Iterable

TAKEN = 1
"""The mark of a page whose contents are not known."""


class OutOfPages(Exception):
    """Fewer pages are available than were requested; none was allocated."""


class PageAllocator:
    """Allocates page numbers 0 .. num_pages - 1. A page may have several owners. `on_evict` is
    called for each cached page it reuses.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        self.kept = bytearray(num_pages)
        """1 for each page, owned or cached, whose contents are to be cached when it has no
        owner."""
        self._free = list(range(num_pages - 1, -1, -1))
        self.cached: dict[int, None] = {}
        """Pages without an owner whose contents are kept, ordered by when they were released."""
        self.owners = [0] * num_pages
        """How many owners each page has."""
        self.marks: bytearray | memoryview = bytearray(num_pages)
        """TAKEN for each page from when it is allocated until the ledger records what it holds."""

    @property
    def num_available(self) -> int:
        """Pages without an owner: free and cached."""
        return len(self._free) + len(self.cached)

    @property
    def num_owned(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one owner. Raises OutOfPages, and then takes none."""
        if count > self.num_available:
            raise OutOfPages(
                f"{count} pages asked for, {self.num_available} of {self.num_pages} can be had"
            )
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self.owners[page] = 1
            self.marks[page] = TAKEN
        return taken

    def adopt(self, pages: Iterable[int]) -> None:
        """Caches these free pages, which hold what an engine before has computed."""
        self.cached |= dict.fromkeys(pages)
        self._free = [page for page in self._free if page not in self.cached]
        for page in self.cached:
            self.kept[page] = 1

    def _evict(self) -> int:
        page = next(iter(self.cached))
        del self.cached[page]
        self.kept[page] = 0
        self.on_evict(page)
        return page

    def keep(self, page: int) -> None:
        """Caches this owned page once its last owner releases it. Raises ValueError for a page
        without an owner.
        """
        if self.owners[page] < 1:
            raise ValueError(f"page {page} has no owner, and may hold anything")
        self.kept[page] = 1

    def forget(self, page: int) -> None:
        """Undoes `keep`; a cached page becomes free. Does nothing for a page that is not kept."""
        self.kept[page] = 0
        if page in self.cached:
            del self.cached[page]
            self._free.append(page)

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of these owned or cached pages. Raises ValueError for a free
        one.
        """
        for page in pages:
            if page in self.cached:
                del self.cached[page]
            elif self.owners[page] < 1:
                raise ValueError(f"page {page} has no owner to share it with")
            self.owners[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Takes one owner from each of these pages and returns those that are free now. Of cached
        pages the first are reused first. Raises ValueError for a page without an owner.
        """
        freed = []
        for page in pages:
            if self.owners[page] < 1:
                raise ValueError(f"page {page} is released but has no owner")
            self.owners[page] -= 1
            if self.owners[page] == 0:
                if self.kept[page]:
                    self.cached[page] = None
                else:
                    freed.append(page)
        self._free.extend(freed)
        return freed
