"""Pages and tables: ownership adds up under any history, and misuse is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.pages import OutOfPages, PageAllocator
from cache.table import PageTable, pages_for


class Allocator(RuleBasedStateMachine):
    """Random allocations, shares and releases against a plain list of who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(13)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 15))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
            assert self.allocator.num_free == free
        else:
            self.owned.append(self.allocator.allocate(count))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owned))
        self.allocator.share(pages)
        self.owned.append(list(pages))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.allocator.release(self.owned.pop(index))

    @invariant()
    def adds_up(self) -> None:
        owned = {page for pages in self.owned for page in pages}
        assert self.allocator.integrity() == []
        assert self.allocator.num_owned == len(owned)
        assert self.allocator.num_free + self.allocator.num_owned == 13


TestAllocator = Allocator.TestCase


def test_misuse_is_refused() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    with pytest.raises(ValueError, match="no owner"):
        allocator.release([page])
    with pytest.raises(ValueError, match="no owner"):
        allocator.share([page])
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0)


def test_integrity_sees_what_is_broken() -> None:
    allocator = PageAllocator(4)
    (page,) = allocator.allocate(1)
    allocator._free.append(page)
    assert allocator.integrity() != []
    lost = PageAllocator(4)
    lost._free.pop()
    assert lost.integrity() != []
    twice = PageAllocator(4)
    twice._free.append(0)
    assert twice.integrity() != []
    negative = PageAllocator(1)
    negative._owners[0] = -1
    assert negative.integrity() != []


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pages_for_is_the_least_that_is_enough(num_tokens: int, page_size: int) -> None:
    pages = pages_for(num_tokens, page_size)
    assert pages * page_size >= num_tokens > (pages - 1) * page_size


def test_a_table_grows_by_what_is_missing_and_releases_once() -> None:
    allocator = PageAllocator(10)
    table = PageTable(allocator, 4)
    rng = random.Random(0)
    for num_tokens in sorted(rng.randint(1, 40) for _ in range(20)):
        table.grow(num_tokens)
        assert len(table.pages) == pages_for(num_tokens, 4) and table.missing(num_tokens) == 0
    with pytest.raises(OutOfPages):
        table.grow(41)
    table.release()
    table.release()
    assert allocator.num_free == 10 and table.pages == []
