"""The lists that the kernels read: every row of every matrix once, every page and slot where it is,
no two parts in one place.
"""

import random
from array import array

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cache.layout import CacheLayout, pages_for
from cache.table import DROPPED
from model.decode import DecodeTable
from model.devices.gpu.attention.configurations import Configuration
from model.devices.gpu.attention.plan import TILE_BUCKET, GroupLists, most_splits, plan_groups
from model.devices.gpu.attention.singles import Shape, packed, shape_of, unpacked
from model.draw_words import ALIGNMENT
from model.step import PENDING, Row

ROWS = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 40) | st.just(1)), min_size=1, max_size=12
)


class Step:
    """Rows of these (start, number of tokens), their pages any numbers; those that no token sees
    are dropped.
    """

    def __init__(
        self,
        rows: list[tuple[int, int]],
        num_heads: int,
        window: int | None,
        page_size: int,
        capacity: int,
    ) -> None:
        rng = random.Random(0)
        self.layout = (
            CacheLayout.of(3, (None, window, window), page_size)
            if window
            else CacheLayout.of(1, (), page_size)
        )
        self.num_heads, self.configuration, self.capacity = (
            num_heads,
            Configuration(16, 16, 64, 4, 1, 32, 100),
            capacity,
        )
        self.rows, self.firsts, first = [], [], 0
        for start, count in rows:
            tables = []
            for group in self.layout.groups:
                pages = array(
                    "q",
                    (
                        rng.randrange(10_000)
                        for _ in range(pages_for(start + count, page_size) * group.num_stacks)
                    ),
                )
                unseen = group.first_seen(start) // page_size * group.num_stacks
                pages[:unseen] = array("q", [DROPPED]) * unseen
                tables.append(pages)
            self.rows.append(Row(0, [0] * count, start, tables, None))
            self.firsts.append(first)
            first += count
        self.num_tokens = first

    def lists(self, number: int) -> GroupLists:
        return plan_groups(
            self.rows,
            self.firsts,
            self.num_tokens,
            self.layout,
            self.num_heads,
            self.configuration,
            self.capacity,
        )[number]


STEPS = st.builds(
    Step,
    ROWS,
    st.sampled_from([1, 3, 16, 71]),
    st.sampled_from([None, 1, 30, 64, 200]),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([12, 40, 10_000]),
)


@given(STEPS)
def test_every_row_is_in_one_tile_with_the_splits_it_sees(step: Step) -> None:
    for number, group in enumerate(step.layout.groups):
        lists, rows, configuration = step.lists(number), step.configuration.rows, step.configuration
        assert len(lists.tiles) % TILE_BUCKET == 0
        tiles = [tile for tile in lists.tiles.tolist() if tile[0] >= 0]
        assert all(
            tile == [-1, 0, 0, 0, tile[4], 0, 0] for tile in lists.tiles.tolist()[len(tiles) :]
        )
        # Each once, and tiles with the most keys first.
        there = [
            (i, j)
            for i, row in enumerate(step.rows)
            for j in range(len(row.tokens) * step.num_heads)
        ]
        assert (
            sorted((i, j) for i, begin, _, _, _, last, _ in tiles for j in range(begin, last + 1))
            == there
        )
        ends = [step.rows[i].start + last // step.num_heads for i, _, _, _, _, last, _ in tiles]
        assert ends == sorted(ends, reverse=True)
        for i, begin, first_split, num_splits, _, last, split in tiles:
            assert begin <= last < begin + rows
            first, end = (step.rows[i].start + j // step.num_heads for j in (begin, last))
            assert {position < 100 for position in (first, end)} == {split == 32} and split in (
                32,
                64,
            )
            assert (first_split, first_split + num_splits - 1) == (
                group.first_seen(first) // split,
                end // split,
            )
            assert num_splits <= most_splits(
                end + 1, None if group.window is None else group.window + end - first, configuration
            )


@given(STEPS)
def test_tables_and_slots_are_the_pages(step: Step) -> None:
    size = step.layout.page_size
    for number, group in enumerate(step.layout.groups):
        lists, stacks = step.lists(number), group.num_stacks
        assert lists.spans[:, :3].tolist() == [
            [a, len(row.tokens), row.start] for a, row in zip(step.firsts, step.rows, strict=True)
        ]
        assert (
            lists.slots.shape[1] % ALIGNMENT == 0
            and (lists.slots[:, step.num_tokens :] == -1).all()
        )
        for line, span, row in zip(lists.tables, lists.spans.tolist(), step.rows, strict=True):
            first, count, start, first_page = span
            for stack in range(stacks):
                for position in {group.first_seen(start), start, start + count - 1}:
                    place = position // size * stacks + stack
                    assert line[place - first_page * stacks] == row.pages[number][place] != DROPPED
                slots = [
                    row.pages[number][p // size * stacks + stack] * size + p % size
                    for p in range(start, start + count)
                ]
                assert lists.slots[stack, first : first + count].tolist() == slots


@given(STEPS)
def test_no_two_parts_of_a_wave_share_a_place(step: Step) -> None:
    for number in range(len(step.layout.groups)):
        lists, end = step.lists(number), 0
        for wave in lists.waves:
            assert wave.first_tile == end and wave.num_tiles > 0
            end += wave.num_tiles
            tiles = lists.tiles[wave.first_tile : end]
            assert wave.most_splits == tiles[:, 3].max()
            parts = tiles[tiles[:, 3] > 1].tolist()
            places = [
                place
                for _, _, _, num_splits, first, *_ in parts
                for place in range(first, first + num_splits)
            ]
            assert len(places) == len(set(places)) and all(
                0 <= place < step.capacity for place in places
            )
        assert end == len(lists.tiles)


@given(STEPS, st.integers(0, 3))
def test_some_rows_of_a_step_leave_the_other_tokens_alone(step: Step, place: int) -> None:
    chosen = list(range(place % len(step.rows), len(step.rows), 2))
    rows, firsts = [step.rows[i] for i in chosen], [step.firsts[i] for i in chosen]
    lists = plan_groups(
        rows,
        firsts,
        step.num_tokens,
        step.layout,
        step.num_heads,
        step.configuration,
        step.capacity,
    )
    for number, of_group in enumerate(lists):
        theirs = np.zeros(step.num_tokens, bool)
        for row, first in zip(rows, firsts, strict=True):
            theirs[first : first + len(row.tokens)] = True
        whole = step.lists(number).slots[:, : step.num_tokens]
        assert (of_group.slots[:, : step.num_tokens] == np.where(theirs, whole, -1)).all()
        assert of_group.spans[:, 0].tolist() == firsts


@given(STEPS, st.integers(0, 5), st.booleans())
def test_single_tokens_are_positions_and_whole_tables(
    step: Step, padding: int, indexed: bool
) -> None:
    rows = [structs.replace(row, tokens=[0]) for row in step.rows]
    tokens = [7 * i for i in range(len(rows))]
    decode = DecodeTable.of(step.layout, rows, [PENDING] * len(rows)).advance()
    shape = shape_of(decode.num_keys, len(rows) + padding, step.layout.page_size)
    assert shape is not None and shape.num_rows == len(rows) + padding
    words = packed(decode, shape, step.layout, tokens if indexed else None)
    assert words.dtype == np.int32
    singles = unpacked(torch.from_numpy(words), shape, step.layout, indexed)
    assert singles.positions_B.tolist() == [row.start for row in rows] + [-1] * padding
    assert (None if singles.tokens_B is None else singles.tokens_B[: len(rows)].tolist()) == (
        tokens if indexed else None
    )
    assert singles.num_keys > max(row.start for row in rows)
    for number, (group, table_BW) in enumerate(
        zip(step.layout.groups, singles.tables_BW, strict=True)
    ):
        assert (
            len(table_BW) == shape.num_rows
            and table_BW.stride(0) % ALIGNMENT == 0
            and table_BW.data_ptr() % 16 == words.ctypes.data % 16
        )
        assert (
            table_BW.shape[1] >= pages_for(shape.num_keys, step.layout.page_size) * group.num_stacks
        )
        for row, line in zip(rows, table_BW.tolist(), strict=False):
            end = (row.start // step.layout.page_size + 1) * group.num_stacks
            assert line[:end] == row.pages[number][:end].tolist()


def test_one_long_row_beside_many_is_not_packed() -> None:
    assert shape_of(2**24 + 1, 2, 64) is None and shape_of(1, 2, 64) == Shape(2, 64)


def test_lists_are_of_32_bits_and_padded_to_whole_words() -> None:
    lists = Step([(5, 1), (0, 3)], 3, None, 16, 100).lists(0)
    for part in (lists.spans, lists.tiles, lists.tables, lists.slots):
        assert part.dtype == np.int32 and part.size % ALIGNMENT == 0
