"""Kernels with one program for each row, or block of a row: norms with the sums before them, and
gates.

Invariant (batch-invariant): a program processes its row in an order that depends on the row's width
alone. Sums and norms are computed in float32, and rounded where torch's operations round: a branch
that has been normalised, each sum, and the norm of the last one.

Shape letters: T tokens, D columns of a normed row, F columns of a block of an MLP's intermediate
size.
"""

import triton
import triton.language as tl

from model.devices.gpu.products import activated


@triton.jit
def _row(ptr, col_D, there_D):
    """A row in float32; 0 where there is no column."""
    return tl.load(ptr + col_D, mask=there_D, other=0.0).to(tl.float32)


@triton.jit
def _parameters(weight_ptr, bias_ptr, offset, col_D, there_D):
    """A norm's weights, to which `offset` is added, and biases. Loaded before a row is summed,
    after which threads wait for each other.
    """
    weight_D = _row(weight_ptr, col_D, there_D) + offset
    bias_D = tl.zeros_like(weight_D)
    if bias_ptr is not None:
        bias_D = _row(bias_ptr, col_D, there_D)
    return weight_D, bias_D


@triton.jit
def _normed(x_D, weight_D, bias_D, there_D, epsilon, COLUMNS: tl.constexpr, CENTRED: tl.constexpr):
    """LayerNorm (centred) or RMSNorm of a row."""
    if CENTRED:
        x_D = tl.where(there_D, x_D - tl.sum(x_D, 0) / COLUMNS, 0.0)
    return x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / COLUMNS + epsilon) * weight_D + bias_D


@triton.jit
def add_norm(
    x_ptr, branch_ptr, branch_weight_ptr, branch_bias_ptr, other_ptr, sum_ptr, y_ptr, weight_ptr,
    bias_ptr, scale, epsilon, offset,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Program t: row t of the sum of x, a scaled branch that may have to be normalised, and another
    scaled branch; and its norm. Without a branch, the norm of x alone.
    """
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    first, col_D = tl.program_id(0).to(tl.int64) * COLUMNS, tl.arange(0, BLOCK)
    there_D = col_D < COLUMNS
    weight_D, bias_D = _parameters(weight_ptr, bias_ptr, offset, col_D, there_D)
    x_D = _row(x_ptr + first, col_D, there_D)
    if branch_ptr is not None:
        branch_D = _row(branch_ptr + first, col_D, there_D)
        if branch_weight_ptr is not None:
            branch_weight_D, branch_bias_D = _parameters(
                branch_weight_ptr, branch_bias_ptr, offset, col_D, there_D
            )
            branch_D = (
                _normed(
                    branch_D, branch_weight_D, branch_bias_D, there_D, epsilon, COLUMNS, CENTRED
                )
                .to(DTYPE)
                .to(tl.float32)
            )
        # As torch.add does on a GPU: the product is not rounded.
        x_D = tl.fma(branch_D, scale, x_D).to(DTYPE).to(tl.float32)
        if other_ptr is not None:
            x_D = (
                tl.fma(_row(other_ptr + first, col_D, there_D), scale, x_D).to(DTYPE).to(tl.float32)
            )
        tl.store(sum_ptr + first + col_D, x_D.to(DTYPE), mask=there_D)
    y_D = _normed(x_D, weight_D, bias_D, there_D, epsilon, COLUMNS, CENTRED)
    tl.store(y_ptr + first + col_D, y_D.to(DTYPE), mask=there_D)


@triton.jit
def norm_heads(
    q_ptr, k_ptr, query_weight_ptr, query_bias_ptr, key_weight_ptr, key_bias_ptr, y_ptr, stride,
    epsilon, offset,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Program (t, h): the norm of token t's query head h or, for the last h, of its key; side by
    side in y.
    """
    token, head, col_D = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    there_D = col_D < COLUMNS
    if head == tl.num_programs(1) - 1:
        weight_D, bias_D = _parameters(key_weight_ptr, key_bias_ptr, offset, col_D, there_D)
        x_D = _row(k_ptr + token * stride, col_D, there_D)
    else:
        weight_D, bias_D = _parameters(query_weight_ptr, query_bias_ptr, offset, col_D, there_D)
        x_D = _row(q_ptr + token * stride + head * COLUMNS, col_D, there_D)
    y_D = _normed(x_D, weight_D, bias_D, there_D, epsilon, COLUMNS, CENTRED)
    tl.store(
        y_ptr + (token * tl.num_programs(1) + head) * COLUMNS + col_D,
        y_D.to(y_ptr.dtype.element_ty),
        mask=there_D,
    )


@triton.jit
def gate(x_ptr, y_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Program (t, i): block i of row t of activation(first half of the columns) * second half."""
    row, col_F = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_F, x_ptr = col_F < COLUMNS, x_ptr + row * (2 * COLUMNS)
    y_F = activated(_row(x_ptr, col_F, there_F), ACTIVATION) * _row(x_ptr + COLUMNS, col_F, there_F)
    tl.store(y_ptr + row * COLUMNS + col_F, y_F.to(y_ptr.dtype.element_ty), mask=there_F)
