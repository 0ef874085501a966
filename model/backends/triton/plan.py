"""A step's rows -> the lists of numbers that the kernels read: one array of 32-bit integers for a group of layers. No torch, no Triton.

Invariant: every row of every sequence's matrix of queries is in exactly one tile, and every tile in exactly one wave; no two splits of a
wave's tiles share a place in the scratch. It knows nothing of devices and of what a slot stores.

Work in Python grows with the rows of the step, not with how long their sequences are; the lists' lengths are rounded up, what is added is
padding that the kernels skip, so that steps of about a size have lists of one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.layout import CacheLayout, LayerGroup, pages_for
from model.backends.triton.configurations import Configuration
from model.step import Row

Numbers = NDArray[np.int32]
SPAN_FIELDS = 4
"""Of a row of the step: index of its first token, number of tokens, position of the first, number of the first page of its table."""
TILE_FIELDS = 5
"""Of a tile: row of the step, first row of its matrix, first split, number of splits (0: padding), first place in the scratch."""
MOST_PAGES = 2**18
"""Of all rows' tables together, 1 MiB: making and copying more takes longer than launches do."""
CLASS_STEP = 4
"""Contexts of a class are at most this many times as long as those of the one before."""
TILE_BUCKET = 4
"""The number of tiles is a multiple of it."""
ALIGNMENT = 4
"""Each list begins at a multiple of it, which is 16 bytes: kernels are compiled for what addresses are multiples of."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Tiles that are launched together."""

    first_tile: int
    num_tiles: int
    most_splits: int


@dataclass(frozen=True, slots=True)
class GroupLists:
    """What the layers of a group share. A line of `spans` has SPAN_FIELDS, one of `tiles` TILE_FIELDS."""

    spans: Numbers
    tiles: Numbers
    tables: Numbers
    """Pages by row of the step: page i of stack j, counted from the first page that is listed, at i * num_stacks + j."""
    slots: Numbers
    """By stack and token; -1 is padding."""
    waves: tuple[Wave, ...]


def plan_group(
    rows: Sequence[Row],
    firsts: Sequence[int],
    layout: CacheLayout,
    number: int,
    num_heads: int,
    configuration: Configuration,
    capacity: int,
) -> GroupLists:
    """The lists of group `number`; `capacity` is how many splits of a tile the scratch holds."""
    group, page_size = layout.groups[number], layout.page_size
    window, stacks = group.window, group.num_stacks
    first_r = np.asarray(firsts, np.int64)
    start_r = np.asarray([row.start for row in rows], np.int64)
    count_r = np.asarray([len(row.tokens) for row in rows], np.int64)
    unseen_r = _first_seen(start_r, window) // page_size
    tables = _tables(rows, number, unseen_r * stacks, -(-(start_r + count_r) // page_size) * stacks)
    spans = np.stack([first_r, count_r, start_r, unseen_r], axis=1).astype(np.int32)
    tiles = _tiles(start_r, count_r, window, num_heads, configuration)
    waves = _waves(tiles, capacity)
    slots = _slots(tables, start_r, count_r, unseen_r, stacks, page_size)
    return GroupLists(spans, tiles, tables, slots, waves)


def _first_seen(position: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)


def _tables(rows: Sequence[Row], number: int, begin_r: NDArray[np.int64], end_r: NDArray[np.int64]) -> Numbers:
    """The pages of each row that its tokens see or write, copied from where the row's table has them."""
    width = int((end_r - begin_r).max())
    tables = np.zeros((len(rows), -(-width // ALIGNMENT) * ALIGNMENT), np.int32)
    for line, row, begin, end in zip(tables, rows, begin_r.tolist(), end_r.tolist(), strict=True):
        line[: end - begin] = np.asarray(row.pages[number])[begin:end]
    return tables


def _tiles(
    start_r: NDArray[np.int64], count_r: NDArray[np.int64], window: int | None, num_heads: int, configuration: Configuration
) -> Numbers:
    """Of every sequence's matrix of queries BLOCK_M rows after the other. The last column is filled in by `_waves`."""
    matrix_r = count_r * num_heads
    tiles_r = -(-matrix_r // configuration.rows)
    row_t = np.repeat(np.arange(len(count_r)), tiles_r)
    begin_t = (np.arange(len(row_t)) - np.repeat(np.cumsum(tiles_r) - tiles_r, tiles_r)) * configuration.rows
    end_t = np.minimum(begin_t + configuration.rows, matrix_r[row_t])
    first_split_t = _first_seen(start_r[row_t] + begin_t // num_heads, window) // configuration.split
    last_split_t = (start_r[row_t] + (end_t - 1) // num_heads) // configuration.split
    tiles = np.zeros((-(-len(row_t) // TILE_BUCKET) * TILE_BUCKET, TILE_FIELDS), np.int32)
    tiles[:, 0] = -1
    tiles[: len(row_t), :4] = np.stack([row_t, begin_t, first_split_t, last_split_t - first_split_t + 1], axis=1)
    return tiles


def _waves(tiles: Numbers, capacity: int) -> tuple[Wave, ...]:
    """Cuts the tiles so that no wave has more parts than the scratch holds, and gives each tile its place there."""
    splits_t = tiles[:, 3]
    parts_t = np.where(splits_t > 1, splits_t, 0)
    ends_t = np.cumsum(parts_t, dtype=np.int64)
    waves: list[Wave] = []
    first, used = 0, 0
    while first < len(tiles):
        end = int(np.searchsorted(ends_t, used + capacity, side="right"))
        assert end > first, "a tile has more splits than the scratch has places"
        tiles[first:end, 4] = ends_t[first:end] - parts_t[first:end] - used
        waves.append(Wave(first, end - first, int(splits_t[first:end].max())))
        first, used = end, int(ends_t[end - 1])
    return tuple(waves)


def _slots(
    tables: Numbers, start_r: NDArray[np.int64], count_r: NDArray[np.int64], unseen_r: NDArray[np.int64], stacks: int, page_size: int
) -> Numbers:
    """The slot of every token in every stack."""
    num_tokens = int(count_r.sum())
    row_T = np.repeat(np.arange(len(count_r)), count_r)
    position_T = np.arange(num_tokens) - np.repeat(np.cumsum(count_r) - count_r - start_r, count_r)
    column_T = (position_T // page_size - unseen_r[row_T]) * stacks
    slots = np.full((stacks, -(-num_tokens // ALIGNMENT) * ALIGNMENT), -1, np.int32)
    for stack in range(stacks):
        slots[stack, :num_tokens] = tables[row_T, column_T + stack] * page_size + position_T % page_size
    return slots


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the lists of a step of single tokens, which are those of all such steps of so many rows and contexts within a class."""

    num_rows: int
    num_keys: int
    """The longest context of the class."""

    def of(self, group: LayerGroup, page_size: int, num_heads: int, configuration: Configuration) -> GroupLists:
        """Lists of padding, with the wave that takes them."""
        pages, splits = pages_for(self.num_keys, page_size), pages_for(self.num_keys, configuration.split)
        if group.window is not None:
            # As many as a window can begin and end in.
            pages = min(pages, pages_for(group.window, page_size) + 1)
            splits = min(splits, pages_for(group.window, configuration.split) + 1)
        num_tiles = pages_for(self.num_rows * pages_for(num_heads, configuration.rows), TILE_BUCKET) * TILE_BUCKET
        tiles = np.zeros((num_tiles, TILE_FIELDS), np.int32)
        tiles[:, 0] = -1
        return GroupLists(
            np.zeros((self.num_rows, SPAN_FIELDS), np.int32),
            tiles,
            np.zeros((self.num_rows, pages_for(pages * group.num_stacks, ALIGNMENT) * ALIGNMENT), np.int32),
            np.full((group.num_stacks, pages_for(self.num_rows, ALIGNMENT) * ALIGNMENT), -1, np.int32),
            (Wave(0, num_tiles, splits),),
        )


def shape_of(rows: Sequence[Row], num_rows: int, page_size: int) -> Shape | None:
    """The smallest class that these rows of one token are in; None where one long row would make all tables too long."""
    longest, num_keys = max(row.start for row in rows) + 1, page_size
    while num_keys < longest:
        num_keys *= CLASS_STEP
    return Shape(num_rows, num_keys) if num_rows * num_keys // page_size <= MOST_PAGES else None


def filled(lists: GroupLists, into: GroupLists) -> GroupLists:
    """The larger lists, with what the others hold in them."""
    for part, larger in ((lists.spans, into.spans), (lists.tables, into.tables), (lists.slots, into.slots)):
        larger[: part.shape[0], : min(part.shape[1], larger.shape[1])] = part[:, : larger.shape[1]]
    num_tiles = min(len(lists.tiles), len(into.tiles))
    into.tiles[:num_tiles] = lists.tiles[:num_tiles]
    return into
