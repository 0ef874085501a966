"""PageAllocator: which pages of the cache are free, and how many owners each of the others has.

A page that nobody owns is free, or cached: what it holds is worth keeping until the room is needed. Both can be had; a cached one only
when none is free, and then the one that was let go of longest ago. Invariant: free + cached + owned == total, and a page is one of the
first two exactly when nobody owns it (`integrity` checks both). It knows nothing of tokens, tensors or bytes; a page is a number.
"""

from collections.abc import Callable, Iterable


class OutOfPages(Exception):
    """Fewer pages can be had than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1. A page may have several owners. `on_evict` hears of each cached page that is taken."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        self.kept: set[int] = set()
        """Pages, owned or cached, that hold what is worth keeping."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """In the order in which they were let go of."""
        self._owners = [0] * num_pages

    @property
    def num_available(self) -> int:
        """Pages that nobody owns: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody owns and that are kept until the room is needed."""
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one owner. Raises OutOfPages, and then takes none."""
        if count > self.num_available:
            raise OutOfPages(f"{count} pages asked for, {self.num_available} of {self.num_pages} can be had")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        self.kept.discard(page)
        self.on_evict(page)
        return page

    def owners(self, page: int) -> int:
        """How many owners a page has."""
        return self._owners[page]

    def keep(self, page: int) -> None:
        """When its last owner lets go of this owned page, it is cached. Raises ValueError for a page that nobody owns."""
        if self._owners[page] < 1:
            raise ValueError(f"page {page} has no owner, and may hold anything")
        self.kept.add(page)

    def forget(self, page: int) -> None:
        """What this page holds is not worth keeping any more; one that is not kept is fine."""
        self.kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of these owned or cached pages. Raises ValueError for a free one."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
            elif self._owners[page] < 1:
                raise ValueError(f"page {page} has no owner to share it with")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Takes one owner from each of these pages, those to be kept longest last; the pages that are free now. Raises ValueError for a
        page that nobody owns.
        """
        freed = []
        for page in pages:
            if self._owners[page] < 1:
                raise ValueError(f"page {page} is released but has no owner")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self.kept:
                    self._cached[page] = None
                else:
                    freed.append(page)
        self._free.extend(freed)
        return freed

    def integrity(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        problems = []
        if len(set(self._free)) != len(self._free):
            problems.append("a page is on the free list twice")
        for page, owners in enumerate(self._owners):
            if owners < 0:
                problems.append(f"page {page} has {owners} owners")
        unowned = {page for page, owners in enumerate(self._owners) if owners == 0}
        if unowned != {*self._free, *self._cached} or not self._cached.keys().isdisjoint(self._free):
            wrong = sorted(unowned ^ {*self._free, *self._cached})
            problems.append(f"pages {wrong} are owned, cached or free, but not exactly one of these")
        if self._cached.keys() != self.kept & unowned:
            problems.append("a page is cached and not worth keeping, or the other way round")
        return problems
