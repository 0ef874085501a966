"""The kernel of long chunks: queries of several tokens over one head of paged keys.

The H queries of a token are H rows of one matrix over the same keys. A chunk's tokens make a matrix
of tokens * H rows, row r being head r % H of token r // H; a tile is BLOCK_M of these rows,
regardless of token borders, and a program computes it over all keys that its rows see.

Invariant: a row's output depends on its own sequence alone. It knows nothing of layers, steps and
requests: plan.py makes its lists.

Shape letters: M rows of a tile, N keys of a block, D first columns of a key, R its tail's, V of a
value.
"""

import triton
import triton.language as tl

from model.devices.gpu.attention.online_softmax import of_no_keys, online_softmax, queries


@triton.jit
def _bounds(first_position, last_position, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """In blocks low .. high - 1 some row attends to some key; in inner .. outer - 1 every row
    attends to every key, so these need no mask.
    """
    low, inner = 0, 0
    high = last_position // BLOCK_N + 1
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
        inner = tl.minimum(
            tl.maximum(tl.maximum(last_position - WINDOW + BLOCK_N, 0) // BLOCK_N, low), high
        )
    outer = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, high), inner)
    return low, inner, outer, high


@triton.jit(do_not_specialize=["stack", "num_stacks"])
def attend(
    q_ptr, keys_ptr, values_ptr, output_ptr, tiles_ptr, positions_ptr, offsets_ptr, pages_ptr,
    q_stride, stack, num_stacks, factor,
    HEADS: tl.constexpr, NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, NUMBERS: tl.constexpr,
    WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
    UPCAST: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program i: tile i."""
    tile_ptr = tiles_ptr + tl.program_id(0) * TILES
    first, begin, last_row = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    start = tl.load(positions_ptr + first)
    pages_ptr += tl.load(offsets_ptr + first) + stack
    # Rows after the tile's last repeat that one and are not stored.
    index_M, row_M = tl.arange(0, BLOCK_M), tl.minimum(begin + tl.arange(0, BLOCK_M), last_row)
    token_M, head_M = row_M // HEADS, row_M % HEADS
    at_M = (first + token_M).to(tl.int64)
    query_ptrs = q_ptr + at_M * q_stride + head_M * (NUM_D + NUM_R)
    q_MD = queries(query_ptrs, NUM_D, BLOCK_D, UPCAST)
    q_MR = q_MD
    if NUM_R > 0:
        q_MR = queries(query_ptrs + NUM_D, NUM_R, BLOCK_R, UPCAST)
    first_position, last_position = start + begin // HEADS, start + last_row // HEADS
    low, inner, outer, high = _bounds(first_position, last_position, BLOCK_N, WINDOW)
    peak_M, sum_M, o_MV = of_no_keys(BLOCK_M, BLOCK_V)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        part_low, part_high = (
            (low, inner) if part == 0 else (inner, outer) if part == 1 else (outer, high)
        )
        peak_M, sum_M, o_MV = online_softmax(
            part_low, part_high, (start + token_M)[:, None], last_position, tl.arange(0, BLOCK_N),
            q_MD, q_MR, peak_M, sum_M, o_MV, pages_ptr, num_stacks, keys_ptr, values_ptr, factor,
            NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_N, PAGE, NUMBERS,
            WINDOW, VALUE_IN_KEY, part != 1,
        )  # fmt: skip
    cols_V = tl.arange(0, BLOCK_V)
    output_ptrs = output_ptr + ((at_M * HEADS + head_M) * NUM_V)[:, None] + cols_V[None, :]
    tl.store(
        output_ptrs,
        (o_MV * (1.0 / sum_M)[:, None]).to(output_ptr.dtype.element_ty),
        mask=(begin + index_M <= last_row)[:, None] & (cols_V[None, :] < NUM_V),
    )
