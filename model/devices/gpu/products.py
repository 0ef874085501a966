"""The product kernel: activation(x W^T + b) for any number of rows, optionally gated, with one
matrix for each group (head).

Invariant (batch-invariant): an element of y is one sequence of multiplications and sums over the
inputs in float32, independent of the index of its row, the row's place in the tile, and the number
of rows and programs. Programs share out the tiles; which one computes a tile does not affect it.
Where a matrix has few tiles, its inputs are divided into parts (split-K), whose sums are added in
their order: by one program after another part, or, where that leaves a GPU idle, by `join` over the
sums of programs with one part each. Both round alike. The kernels know nothing of layers and steps.

x [T, G, I] and y [T, G, O] are contiguous; W [G, O, I] has strides, as latent queries multiply by
columns of the stored matrix. Widths that are no multiples of a block are padded by masks.

Shape letters: T rows, G groups (heads; 1 for a linear layer), I input and O output columns.
"""

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation. GELU's tanh form x / 2 * (1 + tanh(u)) is computed as x * sigmoid(2 u):
    Triton's interpreter has no tanh.
    """
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # A NaN stays one.
    else:
        tl.static_assert(ACTIVATION == "none")
    return x


@triton.jit
def _weights(
    start_ptr,
    column_O,
    input_I,
    inputs_left,
    OUTPUTS: tl.constexpr,
    STEP_O: tl.constexpr,
    STEP_I: tl.constexpr,
    like,
):
    """A block of W^T in x's dtype."""
    pointers = start_ptr + input_I[:, None] * STEP_I + column_O[None, :] * STEP_O
    return tl.load(
        pointers, mask=(input_I[:, None] < inputs_left) & (column_O[None, :] < OUTPUTS), other=0.0
    ).to(like.dtype)


@triton.jit
def _biased(sum_TO, bias_ptr, column_O, OUTPUTS: tl.constexpr):
    """A tile's sums plus the biases of its columns, if there are any."""
    if bias_ptr is not None:
        sum_TO += tl.load(bias_ptr + column_O, mask=column_O < OUTPUTS, other=0.0).to(tl.float32)[
            None, :
        ]
    return sum_TO


@triton.jit
def _sums(
    begin, end, x_ptrs, there_T1, first_ptr, column_O, index_I,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP_O: tl.constexpr, STEP_I: tl.constexpr,
    GATED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A tile's sums over inputs begin .. end - 1, and gated those of the rows that the gate
    multiplies.
    """
    sum_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    opened_TO = sum_TO
    for first in range(begin, end, BLOCK_I):
        x_TI = tl.load(
            x_ptrs + first, mask=there_T1 & (index_I[None, :] < INPUTS - first), other=0.0
        )
        x_TI = x_TI.to(tl.float32) if UPCAST else x_TI
        block_ptr = first_ptr + first * STEP_I
        w_IO = _weights(block_ptr, column_O, index_I, INPUTS - first, OUTPUTS, STEP_O, STEP_I, x_TI)
        sum_TO = tl.dot(x_TI, w_IO, sum_TO, input_precision="ieee")
        if GATED:
            block_ptr += OUTPUTS * STEP_O
            w_IO = _weights(
                block_ptr, column_O, index_I, INPUTS - first, OUTPUTS, STEP_O, STEP_I, x_TI
            )
            opened_TO = tl.dot(x_TI, w_IO, opened_TO, input_precision="ieee")
    return sum_TO, opened_TO


# Triton would otherwise compile other kernels for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def product(
    x_ptr, weight_ptr, bias_ptr, y_ptr, num_rows,
    GROUPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP_G: tl.constexpr,
    STEP_O: tl.constexpr, STEP_I: tl.constexpr,
    PART: tl.constexpr, APART: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Program (p, g): of group g's y tiles p, p + programs, ... Gated, W has OUTPUTS rows for the
    gate, then as many that it multiplies.

    Inputs are summed in parts of PART. Program (p, 0, i), where they are APART: of part i's sums,
    in float32 [parts, T, O].
    """
    group = tl.program_id(1).to(tl.int64)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_T)
    index_I = tl.arange(0, BLOCK_I)
    for tile in range(
        tl.program_id(0), num_row_tiles * tl.cdiv(OUTPUTS, BLOCK_O), tl.num_programs(0)
    ):
        # Tiles with the same weights are adjacent, so that these are read from memory once.
        row_T = tile % num_row_tiles * BLOCK_T + tl.arange(0, BLOCK_T)
        column_O = (tile // num_row_tiles * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
        there_T1 = (row_T < num_rows)[:, None]
        # 64-bit offsets: x and W may have more than 2**31 elements.
        rows_T = row_T.to(tl.int64)
        x_ptrs = x_ptr + (rows_T * GROUPS + group)[:, None] * INPUTS + index_I[None, :]
        first_ptr = weight_ptr + group * STEP_G
        if APART:
            begin = tl.program_id(2) * PART
            sum_TO, _ = _sums(
                begin, min(begin + PART, INPUTS), x_ptrs, there_T1, first_ptr, column_O, index_I,
                INPUTS, OUTPUTS, STEP_O, STEP_I, False, UPCAST, BLOCK_T, BLOCK_O, BLOCK_I,
            )  # fmt: skip
            rows_T += tl.program_id(2).to(tl.int64) * num_rows
        elif PART < INPUTS:
            sum_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
            for begin in range(0, INPUTS, PART):
                part_TO, _ = _sums(
                    begin, min(begin + PART, INPUTS), x_ptrs, there_T1, first_ptr, column_O,
                    index_I,
                    INPUTS, OUTPUTS, STEP_O, STEP_I, False, UPCAST, BLOCK_T, BLOCK_O, BLOCK_I,
                )  # fmt: skip
                sum_TO += part_TO
        else:
            sum_TO, opened_TO = _sums(
                0, INPUTS, x_ptrs, there_T1, first_ptr, column_O, index_I,
                INPUTS, OUTPUTS, STEP_O, STEP_I, GATED, UPCAST, BLOCK_T, BLOCK_O, BLOCK_I,
            )  # fmt: skip
        if not APART:
            sum_TO = activated(_biased(sum_TO, bias_ptr, column_O, OUTPUTS), ACTIVATION)
        if GATED:
            sum_TO *= _biased(opened_TO, bias_ptr, column_O + OUTPUTS, 2 * OUTPUTS)
        y_ptrs = y_ptr + (rows_T * GROUPS + group)[:, None] * OUTPUTS + column_O[None, :]
        tl.store(
            y_ptrs, sum_TO.to(y_ptr.dtype.element_ty), mask=there_T1 & (column_O[None, :] < OUTPUTS)
        )


@triton.jit(do_not_specialize=["num_sums"])
def join(
    sums_ptr, bias_ptr, y_ptr, num_sums,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Program i: elements of y [T, O], each of the sum of its parts in their order."""
    index_Y = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    there_Y, column_Y = index_Y < num_sums, index_Y % OUTPUTS
    sum_Y = tl.zeros([BLOCK_Y], tl.float32)
    for part in tl.static_range(PARTS):
        sum_Y += tl.load(sums_ptr + part * num_sums.to(tl.int64) + index_Y, mask=there_Y, other=0.0)
    if bias_ptr is not None:
        sum_Y += tl.load(bias_ptr + column_Y).to(tl.float32)
    tl.store(y_ptr + index_Y, activated(sum_Y, ACTIVATION).to(y_ptr.dtype.element_ty), mask=there_Y)
