"""A step's rows -> the lists that the attention kernels read, 32-bit integers in one array. No
torch, no Triton.

Every token has a position and, for each group of layers, the place in one list of pages where those
of its sequence begin: its page i of stack j lies at place + i * num_stacks + j. Pages that no token
sees any more are listed, too, and never read. Invariant: every row of every chunk's query matrix is
in exactly one tile. It knows nothing of devices and slot contents.

The work in Python grows with the rows of the step, not with the lengths of their sequences.

Shape letters: T tokens of the step, B tokens of the decode kernel, M tiles, G groups of layers, N
pages of all tokens, r listed rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.layout import CacheLayout
from model.decode import NO_LINE, Numbers, table_widths
from model.draw_words import aligned
from model.step import StepPlan

Lists = TypeVar("Lists")
TILE_FIELDS = 3
"""Fields of a tile: its chunk's first token, first and last row in the chunk's query matrix."""
FEW_TOKENS = 128
"""Tokens of all chunks of a step up to which they are single tokens, too. A tile's program reads
all keys that its rows see, however few these rows are: behind 8,000 tokens a chunk of 128 takes an
H100 99 us a layer in tiles and 83 as single tokens (16 heads of 128 columns; 349 and 158 for 4 of
256); behind 500 both take 12.
"""


@dataclass(frozen=True, slots=True)
class StepLists(Generic[Lists]):
    """The lists of a step, on the host or on the device."""

    positions_T: Lists
    """NO_LINE: padding."""
    offsets_GT: Lists
    pages_P: Lists
    num_keys: int
    """The longest context of a single token, or a bound of it."""
    tokens_B: Lists | None = None
    """The single tokens; None: all."""
    tiles_M3: Lists | None = None
    """Those with the most keys first; None: there are no chunks."""


def copied(lists: StepLists[Numbers], copy: Callable[[Numbers], Any]) -> StepLists[Any]:
    """The lists on a device, to which `copy` copies an array of all of them, each from a multiple
    of ALIGNMENT on.
    """
    names = "positions_T", "offsets_GT", "pages_P", "tokens_B", "tiles_M3"
    parts = {name: part for name in names if (part := getattr(lists, name)) is not None}
    padded = [np.pad(x.ravel(), (0, aligned(x.size) - x.size)) for x in parts.values()]
    words_N, begin = copy(np.concatenate(padded)), 0
    for name, part in parts.items():
        parts[name] = words_N[begin : begin + part.size].reshape(part.shape)
        begin += aligned(part.size)
    return replace(lists, **parts)


def plan_step(
    plan: StepPlan, layout: CacheLayout, num_heads: int, tile_rows: int
) -> StepLists[Numbers]:
    """The lists of a step. `tile_rows`: query rows of a tile; 0: all tokens are single ones."""
    decode, rows = plan.decode, plan.listed
    num_decoding = 0 if decode is None else len(decode)
    start_r = np.asarray([row.start for row in rows], np.int64)
    count_r = np.asarray([len(row.tokens) for row in rows], np.int64)
    first_r = num_decoding + np.cumsum(count_r) - count_r
    num_tokens = num_decoding + int(count_r.sum())
    listed = slice(num_decoding, num_tokens)

    positions_T = np.full(aligned(num_tokens), NO_LINE, np.int32)
    offsets_GT = np.zeros((len(layout.groups), len(positions_T)), np.int32)
    positions_T[listed] = np.repeat(start_r - first_r, count_r) + np.arange(num_tokens)[listed]
    pages = [np.zeros(0, np.int32)]
    if decode is not None:
        widths = table_widths(layout, decode.num_keys)
        pages = [np.zeros(num_decoding * sum(widths), np.int32)]
        positions_T[:num_decoding] = decode.positions_R
        decode.list_pages(widths, offsets_GT[:, :num_decoding], pages[0])
    begin = len(pages[0])
    for number, group in enumerate(layout.groups):
        width_r = -(-(start_r + count_r) // layout.page_size) * group.num_stacks
        known = [row.pages[number][:width] for row, width in zip(rows, width_r, strict=True)]
        pages.append(np.frombuffer(b"".join(known), np.int64).astype(np.int32))
        offsets_GT[number, listed] = np.repeat(begin + np.cumsum(width_r) - width_r, count_r)
        begin += len(pages[-1])

    tokens_B, tiles_M3 = None, None
    is_chunk_r = count_r > 1
    if tile_rows and count_r[is_chunk_r].sum() > FEW_TOKENS:
        tokens_B = np.concatenate([np.arange(num_decoding), first_r[~is_chunk_r]]).astype(np.int32)
        tiles_M3 = _tiles(
            first_r[is_chunk_r], start_r[is_chunk_r], count_r[is_chunk_r], num_heads, tile_rows
        )
    longest = positions_T if tokens_B is None else positions_T[tokens_B]
    num_keys = int(longest.max(initial=NO_LINE)) + 1
    return StepLists(positions_T, offsets_GT, np.concatenate(pages), num_keys, tokens_B, tiles_M3)


def _tiles(
    first_r: NDArray[np.int64],
    start_r: NDArray[np.int64],
    count_r: NDArray[np.int64],
    num_heads: int,
    tile_rows: int,
) -> Numbers:
    tiles_r = -(-count_r * num_heads // tile_rows)
    row_M = np.repeat(np.arange(len(tiles_r)), tiles_r)
    begin_M = (np.arange(len(row_M)) - (np.cumsum(tiles_r) - tiles_r)[row_M]) * tile_rows
    last_M = np.minimum(begin_M + tile_rows, count_r[row_M] * num_heads) - 1
    # A processor that began one with many keys last would finish long after the others.
    order_M = np.argsort(-(start_r[row_M] + last_M // num_heads), kind="stable")
    return np.stack([first_r[row_M], begin_M, last_M], 1)[order_M].astype(np.int32)
