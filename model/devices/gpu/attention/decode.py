"""The decode kernel: one launch for single tokens that rotates, stores the new key and value,
attends, and joins splits.

A program computes one tile of a token's heads over one split of its keys. Each of GROUPS warps has
BLOCK_N keys of every block to itself, with sums of its own that are joined after the loop, so that
the loop needs few barriers; with one group all warps share the keys. The number of a block's page
is loaded one block ahead: a load that waits for another is not pipelined well.

The new key lies in the last split, whose program stores it before it reads it, unless all keys of
the step are stored already. Every tile of heads stores it, the same bytes. The last program of a
tile to finish, which an atomic counter tells, adds up the splits in their order and sets the
counter back to 0.

Invariant: a token's output depends on its own sequence, and on the tile sizes, `split` and
`most_splits`, which all rows of a step share. Its inputs of a step are each row's position and page
table, so that captured steps need no other lists. A row at a position below 0 is padding: nothing
is read or written for it.

Shape letters: G groups, H heads of a tile, N keys of a group's block, D first columns of a key, R
its tail's, V of a value. Tensors of the loop begin with G only where there are several groups.
"""

import triton
import triton.language as tl

from model.devices.gpu.attention.write import slot_of, store


@triton.jit
def _queries(
    q_ptr, cosine_ptr, sine_ptr, head_H,
    COLUMNS: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    UPCAST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads' queries, rotated and rounded as keys are (write.py), once for each group."""
    cols = tl.arange(0, BLOCK)
    there_1D = (cols < NUM)[None, :]
    head_ptrs = q_ptr + head_H[:, None] * COLUMNS
    if cosine_ptr is None:
        q_HD = tl.load(head_ptrs + cols[None, :], mask=there_1D, other=0.0)
    else:
        PAIRS: tl.constexpr = COLUMNS // 2
        pair, second = cols % PAIRS, cols // PAIRS
        if INTERLEAVED:
            own, other = 2 * pair + second, 2 * pair + 1 - second
        else:
            own, other = cols, pair + (1 - second) * PAIRS
        cosine_1D = tl.load(cosine_ptr + pair, mask=cols < NUM, other=0.0).to(tl.float32)[None, :]
        sine_1D = tl.load(sine_ptr + pair, mask=cols < NUM, other=0.0).to(tl.float32)[None, :]
        own_HD = tl.load(head_ptrs + own[None, :], mask=there_1D, other=0.0).to(tl.float32)
        other_HD = tl.load(head_ptrs + other[None, :], mask=there_1D, other=0.0).to(tl.float32)
        turned_HD = (
            own_HD * cosine_1D + tl.where(second[None, :] == 0, -other_HD, other_HD) * sine_1D
        )
        q_HD = turned_HD.to(q_ptr.dtype.element_ty)
    if UPCAST:
        q_HD = q_HD.to(tl.float32)
    return (
        q_HD if GROUPS == 1 else tl.broadcast_to(q_HD[None, :, :], [GROUPS, head_H.shape[0], BLOCK])
    )


@triton.jit
def _block(
    start_ptr,
    inside,
    there,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Columns of the keys or values `inside` a block; 0 for those that are not there (they may hold
    NaN) and for padding columns.
    """
    cols = tl.arange(0, BLOCK)
    pointers = start_ptr + tl.expand_dims(inside * STRIDE, -1) + cols
    mask = tl.expand_dims(there, -1)
    return tl.load(pointers, mask=mask if NUM == BLOCK else mask & (cols < NUM), other=0.0).to(
        DTYPE
    )


@triton.jit
def _share(position, number, split, most_splits, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """The blocks low .. high - 1 of split `number` of a token at this position, and how many splits
    it has.

    Splits are counted from the first block that the window touches. They have `split` keys, and
    more where there would be more than `most_splits`.
    """
    first = tl.maximum(position - WINDOW + 1, 0) // SIZE if WINDOW > 0 else 0
    end = position // SIZE + 1
    blocks = tl.maximum(split // SIZE, tl.cdiv(end - first, most_splits))
    low = first + number * blocks
    return low, tl.minimum(low + blocks, end), tl.cdiv(end - first, blocks)


@triton.jit
def _base(peak):
    """What weights are relative to. Without keys so far, or with NaN alone, the largest logit is
    -inf; 0 instead makes weights 0.
    """
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _through(
    low, high, position, q, q_tail, peak, total, o, table_ptr, num_stacks, keys_ptr, values_ptr,
    factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
):  # fmt: skip
    """Online softmax over blocks low .. high - 1: largest logit, sum of weights and weighted values
    of every group.
    """
    SIZE: tl.constexpr = GROUPS * BLOCK_N
    PARTS: tl.constexpr = PAGE // SIZE
    inside = tl.arange(0, BLOCK_N)
    if GROUPS > 1:
        inside = tl.arange(0, GROUPS)[:, None] * BLOCK_N + inside[None, :]
    page = tl.load(table_ptr + low // PARTS * num_stacks)
    for block in range(low, high):
        next_page = tl.load(table_ptr + tl.minimum(block + 1, high - 1) // PARTS * num_stacks)
        # 64-bit offsets: a large pool has more than 2**31 elements.
        slot = page.to(tl.int64) * PAGE + block % PARTS * SIZE
        there = block * SIZE + inside <= position
        if WINDOW > 0:
            there = there & (block * SIZE + inside > position - WINDOW)
        key_ptr = keys_ptr + slot * (NUM_D + NUM_R)
        k = _block(key_ptr, inside, there, NUM_D, BLOCK_D, NUM_D + NUM_R, q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NUM_R > 0:
            k_tail = _block(key_ptr + NUM_D, inside, there, NUM_R, BLOCK_R, NUM_D + NUM_R, q.dtype)
            s = tl.dot(q_tail, tl.trans(k_tail), s, input_precision="ieee")
        s = tl.where(tl.expand_dims(there, -2), s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, -1) * factor)
        base = _base(new_peak)
        weight = tl.exp2(tl.fma(s, factor, tl.expand_dims(-base, -1)))
        shrink = tl.exp2(peak - base)
        v = k
        if not VALUE_IN_KEY:
            v = _block(values_ptr + slot * NUM_V, inside, there, NUM_V, BLOCK_V, NUM_V, q.dtype)
        o = tl.dot(weight.to(v.dtype), v, o * tl.expand_dims(shrink, -1), input_precision="ieee")
        peak, total = new_peak, total * shrink + tl.sum(weight, -1)
        page = next_page
    return peak, total, o


@triton.jit
def _attended(
    low, high, position, q, q_tail, table_ptr, num_stacks, keys_ptr, values_ptr, factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
):  # fmt: skip
    """A tile over blocks low .. high - 1: largest logit, sum of weights and weighted values."""
    if GROUPS == 1:
        peak, total = tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32)
        o = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    else:
        peak = tl.full([GROUPS, BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS, BLOCK_H], tl.float32)
        o = tl.zeros([GROUPS, BLOCK_H, BLOCK_V], tl.float32)
    peak, total, o = _through(
        low, high, position, q, q_tail, peak, total, o, table_ptr, num_stacks, keys_ptr,
        values_ptr, factor,
        NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, GROUPS, BLOCK_N, PAGE, WINDOW, VALUE_IN_KEY,
    )  # fmt: skip
    if GROUPS > 1:
        top_H = tl.max(peak, 0)
        weight_GH = tl.exp2(peak - _base(top_H)[None, :])
        peak, total, o = top_H, tl.sum(total * weight_GH, 0), tl.sum(o * weight_GH[:, :, None], 0)
    return peak, total, o


@triton.jit
def _counted(
    place, counter_ptr, num_splits, peak_H, sum_H, o_HV, stored_HV, partial_ptr, peaks_ptr,
    sums_ptr,
    NUM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of a split. -> Whether all splits of the tile have been stored now."""
    place_H, cols_V = place * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    tl.store(peaks_ptr + place_H, peak_H)
    tl.store(sums_ptr + place_H, sum_H)
    tl.store(partial_ptr + place_H[:, None] * NUM_V + cols_V[None, :], o_HV, mask=stored_HV)
    # What all threads have stored comes before the count of one of them.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _joined(
    place, num_splits, partial_ptr, peaks_ptr, sums_ptr, NUM_V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """The outputs of a tile from those of its splits. They were stored by other processors: read
    past the cache of this one.
    """
    place_H, cols_V = place * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    peak_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in tl.range(0, num_splits, num_stages=1):
        peak_H = tl.maximum(
            peak_H, tl.load(peaks_ptr + place_H + split * BLOCK_H, cache_modifier=".cg")
        )
    base_H = _base(peak_H)
    sum_H, o_HV = tl.zeros([BLOCK_H], tl.float32), tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for split in tl.range(0, num_splits, num_stages=1, loop_unroll_factor=4):
        at_H = place_H + split * BLOCK_H
        weight_H = tl.exp2(tl.load(peaks_ptr + at_H, cache_modifier=".cg") - base_H)
        sum_H += weight_H * tl.load(sums_ptr + at_H, cache_modifier=".cg")
        part_ptrs = partial_ptr + at_H[:, None] * NUM_V + cols_V[None, :]
        o_HV += weight_H[:, None] * tl.load(
            part_ptrs, mask=(cols_V < NUM_V)[None, :], other=0.0, cache_modifier=".cg"
        )
    return sum_H, o_HV


@triton.jit(do_not_specialize=["table_stride", "stack", "num_stacks", "split", "most_splits"])
def decode(
    q_ptr, k_ptr, v_ptr, cosine_ptr, sine_ptr, keys_ptr, values_ptr, output_ptr, tokens_ptr,
    positions_ptr, tables_ptr,
    partial_ptr, peaks_ptr, sums_ptr, counters_ptr, q_stride, k_stride, v_stride, table_stride,
    stack, num_stacks, split, most_splits,
    factor, HEADS: tl.constexpr, NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_H: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, i): tile % TILES of the heads of row tile // TILES, over split i of the row's
    keys.
    """
    TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    tile, number, row = tl.program_id(0), tl.program_id(1), (tl.program_id(0) // TILES).to(tl.int64)
    position = tl.load(positions_ptr + row)
    low, high, num_splits = _share(position, number, split, most_splits, GROUPS * BLOCK_N, WINDOW)
    if position < 0 or number >= num_splits:
        return
    token = row if tokens_ptr is None else tl.load(tokens_ptr + row).to(tl.int64)
    if cosine_ptr is not None:
        cosine_ptr = cosine_ptr + token * ((NUM_D + NUM_R) // 2)
        sine_ptr = sine_ptr + token * ((NUM_D + NUM_R) // 2)
    table_ptr = tables_ptr + row * table_stride + stack
    if k_ptr is not None:  # noqa: SIM102  # The compiler's condition, around the program's.
        if number == num_splits - 1:
            store(
                token, slot_of(position, table_ptr, num_stacks, PAGE), k_ptr, v_ptr, cosine_ptr,
                sine_ptr, keys_ptr, values_ptr,
                k_stride, v_stride, NUM_D + NUM_R, BLOCK_KEY, NUM_V, BLOCK_V, VALUE_IN_KEY,
                INTERLEAVED,
            )  # fmt: skip
            tl.debug_barrier()
    head_H, cols_V = tile % TILES * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    # Rows after the last head repeat that one and are not stored.
    read_H = tl.minimum(head_H, HEADS - 1)
    stored_HV = (head_H < HEADS)[:, None] & (cols_V < NUM_V)[None, :]
    q = _queries(
        q_ptr + token * q_stride,
        cosine_ptr,
        sine_ptr,
        read_H,
        NUM_D + NUM_R,
        NUM_D,
        BLOCK_D,
        GROUPS,
        UPCAST,
        INTERLEAVED,
    )
    q_tail = q
    if NUM_R > 0:
        q_tail = _queries(
            q_ptr + token * q_stride + NUM_D,
            None,
            None,
            read_H,
            NUM_D + NUM_R,
            NUM_R,
            BLOCK_R,
            GROUPS,
            UPCAST,
            False,
        )
    peak_H, sum_H, o_HV = _attended(
        low, high, position, q, q_tail, table_ptr, num_stacks, keys_ptr, values_ptr, factor,
        NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_H, GROUPS, BLOCK_N, PAGE, WINDOW,
        VALUE_IN_KEY,
    )  # fmt: skip
    last = num_splits == 1
    if not last:
        scratch = tile.to(tl.int64) * most_splits
        last = _counted(
            scratch + number, counters_ptr + tile, num_splits, peak_H, sum_H, o_HV, stored_HV,
            partial_ptr, peaks_ptr, sums_ptr,
            NUM_V, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        if last:
            sum_H, o_HV = _joined(
                scratch, num_splits, partial_ptr, peaks_ptr, sums_ptr, NUM_V, BLOCK_V, BLOCK_H
            )
    if last:
        output_ptrs = output_ptr + ((token * HEADS + head_H) * NUM_V)[:, None] + cols_V[None, :]
        tl.store(
            output_ptrs,
            (o_HV * (1.0 / sum_H)[:, None]).to(output_ptr.dtype.element_ty),
            mask=stored_HV,
        )
