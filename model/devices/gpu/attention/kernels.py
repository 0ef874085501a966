"""The two attention kernels: queries of any number of tokens over one head of paged keys, and the
reduction of splits.

The H queries of a token are H rows of one matrix over the same keys. A sequence's tokens make a
matrix of tokens * H rows, row r being head r % H of token r // H; a tile is BLOCK_M of these rows,
regardless of token borders. A program computes one tile over one split, which is a fixed number of
keys. Decode, draft verification, chunked prefill and prefill after a cached prefix are all such
tiles.

Invariant (batch-invariant): a row's output depends on its own sequence alone. Blocks, splits and
the groups of splits that are summed at once lie at fixed positions of the sequence, not of the
tile; masked keys leave a row's sums unchanged, bit for bit. The kernels know nothing of layers,
steps and requests: plan.py makes their lists. Where all rows of a step are single tokens, their
positions and whole page tables can take the place of lists; a row at a position below 0 is padding.

A block of keys is a page, or a part of a large page: BLOCK_N divides PAGE. Widths that are no
powers of two are padded by masks. A key may have a tail after its first columns, with a separate
dot product; if VALUE_IN_KEY the first columns are also the value, loaded once. Logits are scaled in
float32: a bfloat16 query scaled before the product would be rounded twice.

Shape letters: M rows of a tile, N keys of a block, D first columns of a key, R its tail's, V of a
value, C splits that are summed at once.
"""

import triton
import triton.language as tl


@triton.jit
def _columns(
    start_ptr, rows, visible, cols,
    NUM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Some columns of some rows of a matrix in the query dtype; 0 for rows that are not visible
    (they may hold NaN) and for padding columns.
    """
    pointers = start_ptr + rows[:, None] * STRIDE + cols[None, :]
    if MASKED:
        found = tl.load(pointers, mask=visible[:, None] & (cols[None, :] < NUM), other=0.0)
    elif NUM == BLOCK:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=cols[None, :] < NUM, other=0.0)
    return found.to(DTYPE)


@triton.jit
def _queries(
    q_ptr,
    stride,
    token_M,
    head_M,
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    pointers = q_ptr + (token_M.to(tl.int64) * stride + head_M * WIDTH)[:, None] + cols[None, :]
    q = tl.load(pointers, mask=cols[None, :] < NUM, other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def _through(
    low, high, q_MD, q_MR, peak_M, sum_M, o_MV, position_M, num_keys, table_ptr, num_stacks,
    keys_ptr, values_ptr, factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
    AHEAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over blocks low .. high - 1: largest logit, sum of weights and weighted values
    (Milakov, Gimelshein 2018).
    """
    index_N, cols_D, cols_V = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    next_page = tl.full([], 0, tl.int32)
    if AHEAD:
        # Where there are no blocks: the page of any key.
        next_page = tl.load(
            table_ptr + tl.minimum(low, (num_keys - 1) // BLOCK_N) // (PAGE // BLOCK_N) * num_stacks
        )
    for block in range(low, high):
        position_N = block * BLOCK_N + index_N
        written_N = position_N < num_keys
        page = next_page
        if AHEAD:
            next_page = tl.load(
                table_ptr + tl.minimum(block + 1, high - 1) // (PAGE // BLOCK_N) * num_stacks
            )
        else:
            page = tl.load(table_ptr + block // (PAGE // BLOCK_N) * num_stacks)
        # 64-bit offsets: a large pool has more than 2**31 elements.
        slot = page.to(tl.int64) * PAGE + block % (PAGE // BLOCK_N) * BLOCK_N
        key_ptr = keys_ptr + slot * (NUM_D + NUM_R)
        k_ND = _columns(
            key_ptr, index_N, written_N, cols_D, NUM_D, BLOCK_D, NUM_D + NUM_R, q_MD.dtype, MASKED
        )
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if NUM_R > 0:
            cols_R = tl.arange(0, BLOCK_R)
            k_NR = _columns(
                key_ptr + NUM_D,
                index_N,
                written_N,
                cols_R,
                NUM_R,
                BLOCK_R,
                NUM_D + NUM_R,
                q_MD.dtype,
                MASKED,
            )
            s_MN = tl.dot(q_MR, tl.trans(k_NR), s_MN, input_precision="ieee")
        if MASKED:
            seen_MN = position_N[None, :] <= position_M[:, None]
            if WINDOW > 0:
                seen_MN = seen_MN & (position_N[None, :] > position_M[:, None] - WINDOW)
            s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1) * factor)
        # A row without keys so far has the largest logit -inf; 0 instead makes its weights 0.
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M) if MASKED else new_peak_M
        weight_MN = tl.exp2(tl.fma(s_MN, factor, -base_M[:, None]))
        shrink_M = tl.exp2(peak_M - base_M)
        v_NV = k_ND
        if not VALUE_IN_KEY:
            v_NV = _columns(
                values_ptr + slot * NUM_V,
                index_N,
                written_N,
                cols_V,
                NUM_V,
                BLOCK_V,
                NUM_V,
                q_MD.dtype,
                MASKED,
            )
        o_MV = tl.dot(
            weight_MN.to(v_NV.dtype), v_NV, o_MV * shrink_M[:, None], input_precision="ieee"
        )
        peak_M, sum_M = new_peak_M, sum_M * shrink_M + tl.sum(weight_MN, 1)
    return peak_M, sum_M, o_MV


@triton.jit
def _bounds(
    number, split, first_position, last_position, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """In blocks low .. high - 1 of this split some row attends to some key; in inner .. outer - 1
    every row attends to every key, so these need no mask.
    """
    low = number * (split // BLOCK_N)
    high = tl.minimum((number + 1) * split, last_position + BLOCK_N) // BLOCK_N
    inner = low
    if WINDOW > 0:
        low = tl.maximum(low, tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N)
        inner = tl.minimum(
            tl.maximum(tl.maximum(last_position - WINDOW + BLOCK_N, 0) // BLOCK_N, low), high
        )
    outer = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, high), inner)
    return low, inner, outer, high


@triton.jit
def _tile(
    tile, tiles_ptr, positions_ptr, split, short_split, num_short, most_splits,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """-> Row of the step, the tile's first and last row in that row's matrix, its first split,
    number of splits (0: padding), keys of a split, first place in the scratch memory.
    """
    if positions_ptr is None:
        tile_ptr = tiles_ptr + tile * TILES
        row = tl.load(tile_ptr)
        begin = tl.load(tile_ptr + 1)
        first_split = tl.load(tile_ptr + 2)
        num_splits = tl.load(tile_ptr + 3)
        place, last_row, split = tl.load(tile_ptr + 4), tl.load(tile_ptr + 5), tl.load(tile_ptr + 6)
    else:
        tiles_of_row: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        row, begin, place = tile // tiles_of_row, tile % tiles_of_row * BLOCK_M, tile * most_splits
        position, last_row = tl.load(positions_ptr + row), tl.minimum(begin + BLOCK_M, HEADS) - 1
        split = tl.where(position < num_short, short_split, split)
        first_split = tl.maximum(position - WINDOW + 1, 0) // split if WINDOW > 0 else 0
        num_splits = tl.where(position < 0, 0, position // split - first_split + 1)
    return row, begin, last_row, first_split, num_splits, split, place.to(tl.int64)


@triton.jit
def _span(row, spans_ptr, positions_ptr, SPANS: tl.constexpr):
    """-> A row's first token in the step, number of tokens, position of the first, and the page
    with which its table begins.
    """
    if positions_ptr is None:
        span_ptr = spans_ptr + row * SPANS
        first = tl.load(span_ptr)
        num_tokens = tl.load(span_ptr + 1)
        start = tl.load(span_ptr + 2)
        first_page = tl.load(span_ptr + 3)
    else:
        first, num_tokens, start, first_page = row, 1, tl.load(positions_ptr + row), 0
    return first, num_tokens, start, first_page


@triton.jit(
    do_not_specialize=[
        "first_tile",
        "table_stride",
        "stack",
        "num_stacks",
        "split",
        "short_split",
        "num_short",
        "most_splits",
    ]
)
def attend(
    q_ptr, keys_ptr, values_ptr, output_ptr, spans_ptr, tiles_ptr, positions_ptr, tables_ptr,
    partial_ptr, peaks_ptr, sums_ptr,
    first_tile, q_stride, table_stride, stack, num_stacks, split, short_split, num_short,
    most_splits, factor,
    HEADS: tl.constexpr, NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, UPCAST: tl.constexpr, AHEAD: tl.constexpr, SPANS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Program (tile, i): the tile's rows over split i of their splits. Stores the output if that is
    the only split, else a partial one.
    """
    row, begin, last_row, first_split, num_splits, split, place = _tile(
        first_tile + tl.program_id(0),
        tiles_ptr,
        positions_ptr,
        split,
        short_split,
        num_short,
        most_splits,
        HEADS,
        BLOCK_M,
        WINDOW,
        TILES,
    )
    number = tl.program_id(1)
    if number >= num_splits:
        return
    first, num_tokens, start, first_page = _span(row, spans_ptr, positions_ptr, SPANS)
    # Rows after the tile's last repeat that one and are not stored.
    index_M, row_M = tl.arange(0, BLOCK_M), tl.minimum(begin + tl.arange(0, BLOCK_M), last_row)
    token_M, head_M = row_M // HEADS, row_M % HEADS
    q_MD = _queries(q_ptr, q_stride, first + token_M, head_M, NUM_D + NUM_R, NUM_D, BLOCK_D, UPCAST)
    q_MR = q_MD
    if NUM_R > 0:
        q_MR = _queries(
            q_ptr + NUM_D, q_stride, first + token_M, head_M, NUM_D + NUM_R, NUM_R, BLOCK_R, UPCAST
        )
    first_position, last_position = start + begin // HEADS, start + last_row // HEADS
    low, inner, outer, high = _bounds(
        first_split + number, split, first_position, last_position, BLOCK_N, WINDOW
    )
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride + stack - first_page * num_stacks
    peak_M, sum_M = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        part_low, part_high = (
            (low, inner) if part == 0 else ((inner, outer) if part == 1 else (outer, high))
        )
        peak_M, sum_M, o_MV = _through(
            part_low, part_high, q_MD, q_MR, peak_M, sum_M, o_MV, start + token_M,
            start + num_tokens, table_ptr, num_stacks, keys_ptr,
            values_ptr, factor, NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_N, PAGE,
            WINDOW, VALUE_IN_KEY, AHEAD, part != 1,
        )  # fmt: skip
    cols_V = tl.arange(0, BLOCK_V)
    stored_MV = (begin + index_M <= last_row)[:, None] & (cols_V[None, :] < NUM_V)
    if num_splits == 1:
        output_ptrs = (
            output_ptr
            + (((first + token_M).to(tl.int64) * HEADS + head_M) * NUM_V)[:, None]
            + cols_V[None, :]
        )
        tl.store(
            output_ptrs,
            (o_MV * (1.0 / sum_M)[:, None]).to(output_ptr.dtype.element_ty),
            mask=stored_MV,
        )
    else:
        place_M = (place + number) * BLOCK_M + index_M
        tl.store(peaks_ptr + place_M, peak_M)
        tl.store(sums_ptr + place_M, sum_M)
        tl.store(partial_ptr + place_M[:, None] * NUM_V + cols_V[None, :], o_MV, mask=stored_MV)


@triton.jit(do_not_specialize=["first_tile", "split", "short_split", "num_short", "most_splits"])
def join(
    output_ptr, spans_ptr, tiles_ptr, positions_ptr, partial_ptr, peaks_ptr, sums_ptr,
    first_tile, split, short_split, num_short, most_splits,
    HEADS: tl.constexpr, NUM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr, SPANS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program (tile, m): row m of the tile from its partial outputs. Does nothing for a tile with
    one split, which is stored already.
    """
    row, begin, last_row, first_split, num_splits, _, scratch = _tile(
        first_tile + tl.program_id(0),
        tiles_ptr,
        positions_ptr,
        split,
        short_split,
        num_short,
        most_splits,
        HEADS,
        BLOCK_M,
        WINDOW,
        TILES,
    )
    if num_splits <= 1:
        return
    first, _, _, _ = _span(row, spans_ptr, positions_ptr, SPANS)
    sequence_row = begin + tl.program_id(1)
    if sequence_row > last_row:
        return
    end_split = first_split + num_splits
    index_C, cols_V = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_V)
    peak = float("-inf")
    for group in range(first_split // BLOCK_C, (end_split + BLOCK_C - 1) // BLOCK_C):
        split_C = group * BLOCK_C + index_C
        there_C = (split_C >= first_split) & (split_C < end_split)
        place_C = (scratch + split_C - first_split) * BLOCK_M + tl.program_id(1)
        peak = tl.maximum(
            peak, tl.max(tl.load(peaks_ptr + place_C, mask=there_C, other=float("-inf")), 0)
        )
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total, o_V = 0.0, tl.zeros([BLOCK_V], tl.float32)
    for group in range(first_split // BLOCK_C, (end_split + BLOCK_C - 1) // BLOCK_C):
        split_C = group * BLOCK_C + index_C
        there_C = (split_C >= first_split) & (split_C < end_split)
        place_C = (scratch + split_C - first_split) * BLOCK_M + tl.program_id(1)
        weight_C = tl.exp2(tl.load(peaks_ptr + place_C, mask=there_C, other=float("-inf")) - base)
        total += tl.sum(weight_C * tl.load(sums_ptr + place_C, mask=there_C, other=0.0), 0)
        places_CV = partial_ptr + place_C[:, None] * NUM_V + cols_V[None, :]
        o_CV = tl.load(places_CV, mask=there_C[:, None] & (cols_V[None, :] < NUM_V), other=0.0)
        o_V += tl.sum(weight_C[:, None] * o_CV, 0)
    output_row = (first + sequence_row // HEADS).to(tl.int64) * HEADS + sequence_row % HEADS
    o_V = o_V * (1.0 / total)
    tl.store(
        output_ptr + output_row * NUM_V + cols_V,
        o_V.to(output_ptr.dtype.element_ty),
        mask=cols_V < NUM_V,
    )
