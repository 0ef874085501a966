"""The kernel of long chunks: queries of several tokens over one head of paged keys.

The H queries of a token are H rows of one matrix over the same keys. A chunk's tokens make a matrix
of tokens * H rows, row r being head r % H of token r // H; a tile is BLOCK_M of these rows,
regardless of token borders, and a program computes it over all keys that its rows see.

Invariant: a row's output depends on its own sequence alone. Blocks lie at fixed positions of the
sequence; masked keys leave a row's sums unchanged, bit for bit. It knows nothing of layers, steps
and requests: plan.py makes its lists.

A block of keys is a page, or a part of a large page: BLOCK_N divides PAGE. If VALUE_IN_KEY the
first columns of a key are also the value, loaded once. Logits are scaled in float32: a bfloat16
query scaled before the product would be rounded twice.

Shape letters: M rows of a tile, N keys of a block, D first columns of a key, R its tail's, V of a
value.
"""

import triton
import triton.language as tl

from model.devices.gpu.attention.loads import base_of, columns, queries


@triton.jit
def _through(
    low, high, q_MD, q_MR, peak_M, sum_M, o_MV, position_M, num_keys, pages_ptr, num_stacks,
    keys_ptr, values_ptr, factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over blocks low .. high - 1 (Milakov, Gimelshein 2018): largest logit, sum of
    weights and weighted values.
    """
    PARTS: tl.constexpr = PAGE // BLOCK_N
    index_N = tl.arange(0, BLOCK_N)
    # Where there are no blocks: the page of any key.
    page = tl.load(pages_ptr + tl.minimum(low, (num_keys - 1) // BLOCK_N) // PARTS * num_stacks)
    for block in range(low, high):
        next_page = tl.load(pages_ptr + tl.minimum(block + 1, high - 1) // PARTS * num_stacks)
        position_N = block * BLOCK_N + index_N
        written_N = position_N < num_keys
        # 64-bit offsets: a large pool has more than 2**31 elements.
        slot = page.to(tl.int64) * PAGE + block % PARTS * BLOCK_N
        key_ptr = keys_ptr + slot * (NUM_D + NUM_R)
        k_ND = columns(
            key_ptr, index_N, written_N, NUM_D, BLOCK_D, NUM_D + NUM_R, q_MD.dtype, MASKED
        )
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if NUM_R > 0:
            tail_ptr = key_ptr + NUM_D
            k_NR = columns(
                tail_ptr, index_N, written_N, NUM_R, BLOCK_R, NUM_D + NUM_R, q_MR.dtype, MASKED
            )
            s_MN = tl.dot(q_MR, tl.trans(k_NR), s_MN, input_precision="ieee")
        if MASKED:
            seen_MN = position_N[None, :] <= position_M[:, None]
            if WINDOW > 0:
                seen_MN = seen_MN & (position_N[None, :] > position_M[:, None] - WINDOW)
            s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1) * factor)
        base_M = base_of(new_peak_M) if MASKED else new_peak_M
        weight_MN = tl.exp2(tl.fma(s_MN, factor, -base_M[:, None]))
        shrink_M = tl.exp2(peak_M - base_M)
        v_NV = k_ND
        if not VALUE_IN_KEY:
            value_ptr = values_ptr + slot * NUM_V
            v_NV = columns(value_ptr, index_N, written_N, NUM_V, BLOCK_V, NUM_V, q_MD.dtype, MASKED)
        o_MV = tl.dot(
            weight_MN.to(v_NV.dtype), v_NV, o_MV * shrink_M[:, None], input_precision="ieee"
        )
        peak_M, sum_M = new_peak_M, sum_M * shrink_M + tl.sum(weight_MN, 1)
        page = next_page
    return peak_M, sum_M, o_MV


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
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
    UPCAST: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program i: tile i."""
    tl.static_assert(GROUPS == 1)
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
    peak_M, sum_M = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        part_low, part_high = (
            (low, inner) if part == 0 else ((inner, outer) if part == 1 else (outer, high))
        )
        peak_M, sum_M, o_MV = _through(
            part_low, part_high, q_MD, q_MR, peak_M, sum_M, o_MV, start + token_M,
            last_position + 1, pages_ptr, num_stacks, keys_ptr, values_ptr, factor,
            NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_N, PAGE, WINDOW, VALUE_IN_KEY,
            part != 1,
        )  # fmt: skip
    cols_V = tl.arange(0, BLOCK_V)
    output_ptrs = output_ptr + ((at_M * HEADS + head_M) * NUM_V)[:, None] + cols_V[None, :]
    tl.store(
        output_ptrs,
        (o_MV * (1.0 / sum_M)[:, None]).to(output_ptr.dtype.element_ty),
        mask=(begin + index_M <= last_row)[:, None] & (cols_V[None, :] < NUM_V),
    )
