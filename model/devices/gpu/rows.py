"""Kernels with one program for each row: norms, and the summary of logits for sampling.

Invariant: a program processes its row in an order that depends on the row's width alone.

Shape letters: D columns of a normed row, N columns of a block of logits.
"""

import triton
import triton.language as tl


@triton.jit
def normalise(x_ptr, weight_ptr, bias_ptr, y_ptr, epsilon, offset, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    """Program t: row t of LayerNorm (centred) or RMSNorm, in float32."""
    row, col_D = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there_D = col_D < COLUMNS
    x_D = tl.load(x_ptr + row * COLUMNS + col_D, mask=there_D, other=0.0).to(tl.float32)
    if CENTRED:
        x_D = tl.where(there_D, x_D - tl.sum(x_D, 0) / COLUMNS, 0.0)
    y_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / COLUMNS + epsilon)
    y_D *= tl.load(weight_ptr + col_D, mask=there_D, other=0.0).to(tl.float32) + offset
    if bias_ptr is not None:
        y_D += tl.load(bias_ptr + col_D, mask=there_D, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * COLUMNS + col_D, y_D.to(y_ptr.dtype.element_ty), mask=there_D)


@triton.jit
def summarise(logits_ptr, normalisers_ptr, largest_ptr, tokens_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Program s: the logarithm of the sum of row s's exponentials, its largest number and the first index of that.

    A NaN makes the normaliser NaN.
    """
    row, index_N = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start_ptr = logits_ptr + row * COLUMNS
    peak_N, place_N = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, COLUMNS, BLOCK):
        x_N = tl.load(start_ptr + first + index_N, mask=first + index_N < COLUMNS, other=float("-inf"))
        place_N = tl.where(x_N > peak_N, first + index_N, place_N)
        peak_N = tl.where(x_N > peak_N, x_N, peak_N)
    largest = tl.max(peak_N, 0)
    place = tl.min(tl.where(peak_N == largest, place_N, COLUMNS - 1), 0)
    sum_N = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        x_N = tl.load(start_ptr + first + index_N, mask=first + index_N < COLUMNS, other=float("-inf"))
        sum_N += tl.exp(x_N - largest)
    tl.store(normalisers_ptr + row, tl.log(tl.sum(sum_N, 0)) + largest)
    tl.store(largest_ptr + row, largest)
    tl.store(tokens_ptr + row, place.to(tl.int64))
