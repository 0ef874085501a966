"""PageAllocator: which pages of the cache are free, and how many owners each of the others has.

Invariant: free + owned == total, and a page is free exactly when nobody owns it (`integrity` checks both). It knows nothing of
tokens, tensors or bytes; a page is a number.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1. A page may have several owners and is free again when the last lets go."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one owner. Raises OutOfPages, and then takes none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def owners(self, page: int) -> int:
        """How many owners a page has."""
        return self._owners[page]

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of these owned pages. Raises ValueError for a page that nobody owns."""
        for page in pages:
            if self._owners[page] < 1:
                raise ValueError(f"page {page} has no owner to share it with")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Takes one owner from each of these pages; those that are free now. Raises ValueError for a page that nobody owns."""
        freed = []
        for page in pages:
            if self._owners[page] < 1:
                raise ValueError(f"page {page} is released but has no owner")
            self._owners[page] -= 1
            if self._owners[page] == 0:
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
        if unowned != set(self._free):
            problems.append(f"pages {sorted(unowned ^ set(self._free))} are free or owned, but not both ways round")
        return problems
