"""The lists that the kernels read: every row of every chunk's matrix once, pages where they are."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.layout import CacheLayout, pages_for
from cache.table import DROPPED
from model.decode import DecodeTable
from model.devices.gpu.attention.plan import FEW_TOKENS, StepLists, copied, plan_step
from model.draw_words import ALIGNMENT
from model.step import PENDING, Row, StepPlan

ROWS = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 40) | st.just(1)), min_size=1, max_size=12
)
TILE_ROWS = 16


class Step:
    """Rows of these (start, number of tokens), their pages any numbers; those that no token sees
    are dropped. Some of the single tokens come as columns.
    """

    def __init__(
        self, rows: list[tuple[int, int]], num_heads: int, window: int | None, page_size: int
    ) -> None:
        rng = random.Random(0)
        self.layout = (
            CacheLayout.of(3, (None, window, window), page_size)
            if window
            else CacheLayout.of(1, (), page_size)
        )
        self.num_heads = num_heads
        self.rows, self.firsts, first = list[Row](), list[int](), 0
        rows = sorted(rows, key=lambda row: row[1] > 1)
        for start, count in rows:
            tables = []
            for group in self.layout.groups:
                length = pages_for(start + count, page_size) * group.num_stacks
                pages = array("q", (rng.randrange(10_000) for _ in range(length)))
                unseen = group.first_seen(start) // page_size * group.num_stacks
                pages[:unseen] = array("q", [DROPPED]) * unseen
                tables.append(pages)
            self.rows.append(Row(0, [0] * count, start, tables, None))
            self.firsts.append(first)
            first += count
        self.num_tokens = first

    def lists(self, num_decoding: int, tile_rows: int = TILE_ROWS) -> StepLists[np.ndarray]:
        """As they come from the array that is uploaded. `num_decoding`: rows that come as columns,
        at most as many as there are single tokens.
        """
        columns = self.rows[: min(num_decoding, sum(len(row.tokens) == 1 for row in self.rows))]
        step = None
        if columns:
            step = DecodeTable.of(self.layout, columns, [PENDING] * len(columns)).advance()
        plan = StepPlan(tuple(self.rows[len(columns) :]), decode=step)
        lists = plan_step(plan, self.layout, self.num_heads, tile_rows)
        found = copied(lists, np.copy)
        words = found.positions_T.base
        assert words.dtype == np.int32 and not len(words) % ALIGNMENT
        for name in ("positions_T", "offsets_GT", "pages_P", "tokens_B", "tiles_M3"):
            part = getattr(found, name)
            # Kernels are compiled for addresses that are multiples of 16.
            assert part is None or (part.ctypes.data - words.ctypes.data) % 16 == 0
        return found


STEPS = st.builds(
    Step,
    ROWS,
    st.sampled_from([1, 3, 16, 71]),
    st.sampled_from([None, 1, 30, 64, 200]),
    st.sampled_from([16, 64, 256]),
)


@given(STEPS, st.integers(0, 3))
def test_every_token_is_single_or_in_tiles_with_all_its_heads(step: Step, columns: int) -> None:
    lists = step.lists(columns)
    chunks = {
        first: row for first, row in zip(step.firsts, step.rows, strict=True) if len(row.tokens) > 1
    }
    if sum(len(row.tokens) for row in chunks.values()) <= FEW_TOKENS:
        assert lists.tokens_B is None and lists.tiles_M3 is None
        assert lists.num_keys == max(row.start + len(row.tokens) for row in step.rows)
        return
    singles = [first for first in step.firsts if first not in chunks]
    assert lists.tokens_B.tolist() == singles
    assert lists.num_keys == max([0, *(row.start + 1 for row in step.rows if len(row.tokens) == 1)])
    tiles = lists.tiles_M3.tolist()
    # Each row once, and tiles with the most keys first.
    there = [
        (first, j) for first, row in chunks.items() for j in range(len(row.tokens) * step.num_heads)
    ]
    found = [(first, j) for first, begin, last in tiles for j in range(begin, last + 1)]
    assert sorted(found) == there
    assert all(begin <= last < begin + TILE_ROWS for _, begin, last in tiles)
    ends = [chunks[first].start + last // step.num_heads for first, _, last in tiles]
    assert ends == sorted(ends, reverse=True)


@given(STEPS, st.integers(0, 3))
def test_without_tiles_all_tokens_are_single(step: Step, columns: int) -> None:
    lists = step.lists(columns, tile_rows=0)
    assert lists.tokens_B is None and lists.tiles_M3 is None
    assert lists.num_keys == max(row.start + len(row.tokens) for row in step.rows)


@given(STEPS, st.integers(0, 3))
def test_every_token_finds_its_position_and_pages(step: Step, columns: int) -> None:
    lists, size = step.lists(columns), step.layout.page_size
    assert (lists.positions_T[step.num_tokens :] == -1).all()
    for number, group in enumerate(step.layout.groups):
        for first, row in zip(step.firsts, step.rows, strict=True):
            for place in range(len(row.tokens)):
                position = row.start + place
                assert lists.positions_T[first + place] == position
                begin = lists.offsets_GT[number, first + place]
                for seen in {group.first_seen(position), position}:
                    for stack in range(group.num_stacks):
                        page = seen // size * group.num_stacks + stack
                        assert lists.pages_P[begin + page] == row.pages[number][page] != DROPPED


@pytest.mark.parametrize("tile_rows", [0, TILE_ROWS])
def test_columns_are_listed_as_rows_are(tile_rows: int) -> None:
    """Where only the longest row needs as many pages as a line has."""
    step = Step([(5, 1), (600, 1), (0, 1)], 3, 30, 16)
    columns, rows = step.lists(3, tile_rows), step.lists(0, tile_rows)
    assert columns.positions_T.tolist() == rows.positions_T.tolist() == [5, 600, 0, -1]
    assert columns.num_keys == rows.num_keys == 601
