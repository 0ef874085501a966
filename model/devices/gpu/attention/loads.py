"""What the two attention kernels share: loads of queries, keys and values.

A key may have a tail after its first columns, with a separate dot product. Widths that are no
powers of two are padded by masks.
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
    """What weights are relative to. Without keys so far, or with NaN alone, the largest logit is
    -inf; 0 instead makes weights 0.
    """
    return tl.where(peak == float("-inf"), 0.0, peak)
