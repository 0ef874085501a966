"""A step's rows -> the lists that the attention kernels read: 32-bit integers for each group of
layers. No torch, no Triton.

Invariant: every row of every sequence's query matrix is in exactly one tile, and every tile in
exactly one wave; no two splits of a wave's tiles share a place in the scratch memory. It knows
nothing of devices and slot contents.

A step of single tokens needs no such lists where it is captured (singles.py).

The work in Python grows with the rows of the step, not with the lengths of their sequences. Lengths
of lists are rounded up with padding that the kernels skip, so that steps of similar size have lists
of the same size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache.layout import CacheLayout, pages_for
from model.decode import Numbers, aligned
from model.devices.gpu.attention.configurations import Configuration
from model.step import Row

Lists = TypeVar("Lists")
SPAN_FIELDS = 4
"""Fields of a row of the step: index of its first token, number of tokens, position of the first,
first page of its table."""
TILE_FIELDS = 7
"""Fields of a tile: row of the step, first row of the query matrix, first split, number of splits
(0: padding), first place in the scratch memory, last row, keys of a split."""
TILE_BUCKET = 4
"""The number of tiles is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Tiles that are launched together."""

    first_tile: int
    num_tiles: int
    most_splits: int


@dataclass(frozen=True, slots=True)
class GroupLists(Generic[Lists]):
    """What the layers of a group share, on the host or on the device. A line of `spans` has
    SPAN_FIELDS, one of `tiles` TILE_FIELDS.
    """

    spans: Lists
    tiles: Lists
    tables: Lists
    """Pages by row of the step: page i of stack j, counted from the first page that is listed, at i
    * num_stacks + j."""
    slots: Lists
    """Slots by stack and token; -1 is padding."""
    waves: tuple[Wave, ...]
    configuration: Configuration
    """What the tiles are made for."""

    @property
    def parts(self) -> tuple[Lists, ...]:
        """The lists in the order in which they are concatenated on the device."""
        return self.spans, self.tiles, self.tables, self.slots


def plan_groups(
    rows: Sequence[Row],
    firsts: ArrayLike,
    num_tokens: int,
    layout: CacheLayout,
    num_heads: int,
    configuration: Configuration,
    capacity: int,
) -> list[GroupLists[Numbers]]:
    """The lists of every group, for rows whose first tokens are at `firsts` of a step's tokens;
    `capacity`: the splits of a tile that the scratch memory holds.
    """
    first_r = np.asarray(firsts, np.int64)
    start_r = np.asarray([row.start for row in rows], np.int64)
    count_r = np.asarray([len(row.tokens) for row in rows], np.int64)
    found = []
    for number, group in enumerate(layout.groups):
        stacks = group.num_stacks
        unseen_r = _first_seen(start_r, group.window) // layout.page_size
        tables = _tables(
            rows, number, unseen_r * stacks, -(-(start_r + count_r) // layout.page_size) * stacks
        )
        tiles = _tiles(start_r, count_r, group.window, num_heads, configuration)
        waves = _waves(tiles, capacity)
        slots = _slots(
            tables, num_tokens, first_r, start_r, count_r, unseen_r, stacks, layout.page_size
        )
        spans = _columns(len(rows), (first_r, count_r, start_r, unseen_r))
        found.append(GroupLists(spans, tiles, tables, slots, waves, configuration))
    return found


def _columns(num_lines: int, columns: Sequence[NDArray[np.int64]]) -> Numbers:
    """np.stack of columns, padded with zeros; ten times as fast for small ones."""
    table = np.zeros((num_lines, len(columns)), np.int32)
    for number, column in enumerate(columns):
        table[: len(column), number] = column
    return table


def _first_seen(position: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)


def _tables(
    rows: Sequence[Row], number: int, begin_r: NDArray[np.int64], end_r: NDArray[np.int64]
) -> Numbers:
    """The pages of each row that its tokens read or write, from the row's page table."""
    tables = np.zeros((len(rows), aligned(int((end_r - begin_r).max()))), np.int32)
    # Copying each row's pages to its line in Python would take most of the time for the lists.
    pages = b"".join(
        [
            row.pages[number][begin:end]
            for row, begin, end in zip(rows, begin_r.tolist(), end_r.tolist(), strict=True)
        ]
    )
    tables[np.arange(tables.shape[1]) < (end_r - begin_r)[:, None]] = np.frombuffer(pages, np.int64)
    return tables


def _tiles(
    start_r: NDArray[np.int64],
    count_r: NDArray[np.int64],
    window: int | None,
    num_heads: int,
    configuration: Configuration,
) -> Numbers:
    """Tiles of BLOCK_M rows of every sequence's query matrix. The first positions, whose splits are
    short, share no tile with the others. `_waves` fills in the place in the scratch memory.
    """
    # Two segments of each row of the step, one of which is usually empty.
    borders_r3 = np.zeros((len(start_r), 3), np.int64)
    borders_r3[:, 2] = count_r * num_heads
    borders_r3[:, 1] = np.minimum(
        np.maximum(configuration.num_short - start_r, 0) * num_heads, borders_r3[:, 2]
    )
    first_s, end_s = borders_r3[:, :2].ravel(), borders_r3[:, 1:].ravel()
    tiles_s = -(-(end_s - first_s) // configuration.rows)
    segment_t = np.repeat(np.arange(len(tiles_s)), tiles_s)
    row_t = segment_t // 2
    number_t = np.arange(len(segment_t)) - np.repeat(np.cumsum(tiles_s) - tiles_s, tiles_s)
    begin_t = first_s[segment_t] + number_t * configuration.rows
    last_t = np.minimum(begin_t + configuration.rows, end_s[segment_t]) - 1
    split_t = np.where(segment_t % 2, configuration.split, configuration.short_split)
    first_split_t = _first_seen(start_r[row_t] + begin_t // num_heads, window) // split_t
    num_splits_t = (start_r[row_t] + last_t // num_heads) // split_t - first_split_t + 1
    columns = row_t, begin_t, first_split_t, num_splits_t, np.zeros(0, np.int64), last_t, split_t
    tiles = _columns(-(-len(row_t) // TILE_BUCKET) * TILE_BUCKET, columns)
    tiles[len(row_t) :, 0] = -1
    # Those with the most keys first: a processor that began one of them last would finish long
    # after the others.
    tiles[: len(row_t)] = tiles[np.argsort(-(start_r[row_t] + last_t // num_heads), kind="stable")]
    return tiles


def most_splits(num_keys: int, window: int | None, configuration: Configuration) -> int:
    """The largest number of splits of a token with at most `num_keys` keys."""
    seen = num_keys if window is None else min(num_keys, window)
    # A window may begin within a split.
    extra = 0 if window is None else 1
    short = pages_for(min(seen, configuration.num_short), configuration.short_split)
    return max(short, pages_for(seen, configuration.split)) + extra


def _waves(tiles: Numbers, capacity: int) -> tuple[Wave, ...]:
    """Groups the tiles into waves whose partial outputs fit into the scratch memory, and gives each
    tile its place there.
    """
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
    tables: Numbers,
    num_tokens: int,
    first_r: NDArray[np.int64],
    start_r: NDArray[np.int64],
    count_r: NDArray[np.int64],
    unseen_r: NDArray[np.int64],
    stacks: int,
    page_size: int,
) -> Numbers:
    """The slot of every token in every stack; of the step's tokens those of no row are padding."""
    row_T = np.repeat(np.arange(len(count_r)), count_r)
    index_T = np.arange(len(row_T)) - np.repeat(np.cumsum(count_r) - count_r, count_r)
    token_T, position_T = first_r[row_T] + index_T, start_r[row_T] + index_T
    column_T = (position_T // page_size - unseen_r[row_T]) * stacks
    slots = np.full((stacks, aligned(num_tokens)), -1, np.int32)
    for stack in range(stacks):
        slots[stack, token_T] = tables[row_T, column_T + stack] * page_size + position_T % page_size
    return slots


def joined(lists: Sequence[GroupLists[Numbers]]) -> Numbers:
    """The numbers of all lists, concatenated."""
    return np.concatenate([part.ravel() for group in lists for part in group.parts])
