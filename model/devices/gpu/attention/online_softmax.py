"""Online softmax over blocks of paged keys, and the loads of queries, keys and values: the inner
loop of the decode kernel and of the kernel of long chunks.

A block of keys is a page, or a part of a large page. Blocks lie at fixed positions of the sequence.
The number of a block's page is loaded one block ahead: a load that waits for another is not
pipelined well. A key may have a tail after its first columns, with a separate dot product; if
VALUE_IN_KEY the first columns are also the value, loaded once. Widths that are no powers of two are
padded by masks. Logits are scaled in float32: a bfloat16 query scaled before the product would be
rounded twice.

Invariant: masked keys leave a row's sums unchanged, bit for bit. It knows nothing of tiles and
splits.
"""

import triton
import triton.language as tl


@triton.jit
def queries(row_ptrs, NUM: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Columns of the queries at these pointers; 0 for padding columns."""
    cols = tl.arange(0, BLOCK)
    q = tl.load(row_ptrs[:, None] + cols[None, :], mask=cols[None, :] < NUM, other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def columns(
    start_ptr, inside, there,
    NUM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Columns of the keys or values `inside` a block, in the query dtype; 0 for those that are not
    there (they may hold NaN) and for padding columns.
    """
    cols = tl.arange(0, BLOCK)
    pointers = start_ptr + tl.expand_dims(inside * STRIDE, -1) + cols
    if MASKED:
        mask = tl.expand_dims(there, -1)
        found = tl.load(pointers, mask=mask if NUM == BLOCK else mask & (cols < NUM), other=0.0)
    elif NUM == BLOCK:
        found = tl.load(pointers)
    else:
        # As many dimensions as the pointers have.
        found = tl.load(pointers, mask=(cols < NUM)[None, :], other=0.0)
    return found.to(DTYPE)


@triton.jit
def base_of(peak):
    """The number subtracted from logits before they are exponentiated: the largest logit. Without
    keys so far, or with NaN alone, that is -inf; 0 instead makes weights 0.
    """
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def of_no_keys(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Largest logit, sum of weights and weighted values of rows that have seen no key."""
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak_M, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_V], tl.float32)


@triton.jit
def online_softmax(
    low, high, position, last, inside, q, q_tail, peak, total, o, pages_ptr, num_stacks, keys_ptr,
    values_ptr, factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    NUMBERS: tl.constexpr, WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over blocks low .. high - 1 (Milakov, Gimelshein 2018): largest logit, sum of
    weights and weighted values.

    `inside`: the SIZE keys of a block, [keys] or [groups, keys], as are all sums. `position`: the
    rows', for all or [rows, 1]; none is after `last`. Without MASKED all rows see all keys.
    """
    PARTS: tl.constexpr = PAGE // SIZE
    # Where there are no blocks: the page of any key.
    page = tl.load(pages_ptr + tl.minimum(low, last // SIZE) // PARTS * num_stacks)
    for block in range(low, high):
        next_page = tl.load(pages_ptr + tl.minimum(block + 1, high - 1) // PARTS * num_stacks)
        # 64-bit offsets: a large pool has more than 2**31 elements.
        first, slot = page.to(tl.int64) * NUMBERS, block % PARTS * SIZE
        there = block * SIZE + inside <= last
        key_ptr = keys_ptr + first + slot * (NUM_D + NUM_R)
        k = columns(key_ptr, inside, there, NUM_D, BLOCK_D, NUM_D + NUM_R, q.dtype, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NUM_R > 0:
            k_tail = columns(
                key_ptr + NUM_D, inside, there, NUM_R, BLOCK_R, NUM_D + NUM_R, q.dtype, MASKED
            )
            s = tl.dot(q_tail, tl.trans(k_tail), s, input_precision="ieee")
        if MASKED:
            at = tl.expand_dims(block * SIZE + inside, -2)
            seen = at <= position
            if WINDOW > 0:
                seen = seen & (at > position - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, -1) * factor)
        base = base_of(new_peak) if MASKED else new_peak
        weight = tl.exp2(tl.fma(s, factor, tl.expand_dims(-base, -1)))
        shrink = tl.exp2(peak - base)
        v = k
        if not VALUE_IN_KEY:
            v = columns(
                values_ptr + first + slot * NUM_V, inside, there, NUM_V, BLOCK_V, NUM_V, q.dtype,
                MASKED,
            )  # fmt: skip
        o = tl.dot(weight.to(v.dtype), v, o * tl.expand_dims(shrink, -1), input_precision="ieee")
        peak, total = new_peak, total * shrink + tl.sum(weight, -1)
        page = next_page
    return peak, total, o
