"""Pages and tables: ownership adds up under any history, and misuse is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.layout import CacheLayout, pages_for
from cache.pages import OutOfPages, PageAllocator
from cache.table import DROPPED, PageTable
from tests.support.integrity import allocator_problems


class Allocator(RuleBasedStateMachine):
    """Random allocations, shares and releases against a plain list of who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(13)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 15))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_available
        if count > free:
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
            assert self.allocator.num_available == free
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
        assert allocator_problems(self.allocator) == []
        assert self.allocator.num_owned == len(owned)
        assert self.allocator.num_available + self.allocator.num_owned == 13


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
    assert allocator_problems(allocator) != []
    lost = PageAllocator(4)
    lost._free.pop()
    assert allocator_problems(lost) != []
    twice = PageAllocator(4)
    twice._free.append(0)
    assert allocator_problems(twice) != []
    negative = PageAllocator(1)
    negative.owners[0] = -1
    assert allocator_problems(negative) != []


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pages_for_is_the_least_that_is_enough(num_tokens: int, page_size: int) -> None:
    pages = pages_for(num_tokens, page_size)
    assert pages * page_size >= num_tokens > (pages - 1) * page_size


def test_a_table_grows_by_what_is_missing_and_releases_once() -> None:
    allocator = PageAllocator(10)
    table = PageTable(allocator, CacheLayout.of(1, (), 4))
    rng = random.Random(0)
    for num_tokens in sorted(rng.randint(1, 40) for _ in range(20)):
        table.grow(num_tokens, 0)
        assert len(table.owned) == pages_for(num_tokens, 4) and table.missing(num_tokens, 0) == 0
    with pytest.raises(OutOfPages):
        table.grow(41, 0)
    table.release()
    table.release()
    assert allocator.num_available == 10 and table.owned == []


def test_layers_with_a_window_share_pages_of_equal_size_with_the_others() -> None:
    """Gemma-3-1b: 22 layers with a window of 512, 4 without; -270m: 15 and 3."""
    layout = CacheLayout.of(26, [None if (layer + 1) % 6 == 0 else 512 for layer in range(26)], 64)
    assert [(group.window, group.layers_per_page, group.num_stacks) for group in layout.groups] == [
        (512, 2, 11),
        (None, 2, 2),
    ]
    small = CacheLayout.of(18, [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)], 64)
    assert [group.layers_per_page for group in small.groups] == [3, 3]
    assert len({(place.group, place.stack, place.layer) for place in layout.places}) == 26
    assert CacheLayout.of(32, [4096] * 32, 64).groups[0].num_stacks == 1


@given(
    st.integers(1, 500),
    st.integers(1, 70),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 5, 40, 600]),
)
def test_a_table_holds_what_is_seen_and_never_more_than_most_pages(
    num_tokens: int, step: int, page_size: int, window: int
) -> None:
    layout = CacheLayout.of(6, [None if layer == 5 else window for layer in range(6)], page_size)
    allocator = PageAllocator(10_000)
    table = PageTable(allocator, layout)
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        table.grow(num_tokens, end)
        assert len(table.owned) == allocator.num_owned <= layout.most_pages(num_tokens, step)
        for group, pages in zip(layout.groups, table.pages, strict=True):
            seen = pages[
                group.first_seen(start) // page_size * group.num_stacks : pages_for(end, page_size)
                * group.num_stacks
            ]
            assert DROPPED not in seen and len(seen) % group.num_stacks == 0
        table.drop(end)
    table.release()
    assert allocator.num_owned == 0 and allocator_problems(allocator) == []


@given(
    st.integers(0, 300),
    st.integers(1, 70),
    st.sampled_from([1, 16]),
    st.sampled_from([None, 1, 40]),
)
def test_most_tokens_is_the_inverse_of_most_pages(
    num_pages: int, step: int, page_size: int, window: int | None
) -> None:
    layout = CacheLayout.of(3, [window, None, window], page_size)
    most = layout.most_tokens(num_pages, step, 10**6)
    assert layout.most_pages(most, step) <= num_pages < layout.most_pages(most + 1, step)
    assert layout.most_tokens(num_pages, step, 7) == min(7, most)


def test_where_every_layer_has_a_window_a_few_pages_hold_any_length() -> None:
    layout = CacheLayout.of(3, [40] * 3, 16)
    assert layout.most_pages(10**6, 64) == 8
    assert layout.most_tokens(8, 64, 10**6) == 10**6 and layout.most_tokens(7, 64, 10**6) < 200


def test_a_page_without_an_owner_is_not_kept() -> None:
    with pytest.raises(ValueError, match="page 1 has no owner"):
        PageAllocator(3).keep(1)


def test_a_table_with_pages_cannot_begin_with_others() -> None:
    layout = CacheLayout.of(1, (None,), 16)
    allocator = PageAllocator(3)
    table = PageTable(allocator, layout)
    table.grow(1, 0)
    with pytest.raises(ValueError, match="cannot begin with others"):
        table.share(([2],))


def test_sequences_that_fit_together() -> None:
    layout = CacheLayout.of(1, (None,), 16)
    assert layout.sequences(10, 32, 16) == 5
    assert layout.sequences(1, 32, 16) == 0


def test_integrity_names_what_is_inconsistent() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.keep(page)
    allocator.release([page])
    assert allocator_problems(allocator) == []
    allocator.kept[page] = 0
    assert allocator_problems(allocator) == [
        "a page is cached and not worth keeping, or the other way round"
    ]
