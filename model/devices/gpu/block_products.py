"""Products of weights in the block formats of devices/blocks.py, read as bytes and dequantized in
registers: kernels and launches.

A weight is the number that its block stands for, rounded to x's dtype; activations stay as they
are, and sums are in float32. So y = x W^T + b is torch's product of the dequantized matrix. (A CPU
rounds activations to 8 bits, because there only integers are fast.)

The inputs are shared out to as many parts as give a GPU enough programs, and `join` adds the parts
in their order. Invariant: the number of parts and a tile's outputs and inputs depend on the matrix
alone. Where the caller fixes a tile's rows, too, a row of y depends on that row of x alone, bit for
bit (batch-invariant).

Storage: numbers [N, B * bytes of a block's numbers] as the format has them, but int8 as number +
128; scales and minima [B, N] in float16. N and B are rounded up to whole tiles and filled with
zeros, so that no load of weights has a mask.

Shape letters: T rows of x, I input and O output columns, N rows of the matrix, B blocks of a row, j
bytes of a row, k inputs of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.devices.blocks import BLOCK
from model.devices.gpu import EXACT
from model.devices.gpu.launches import in_place, join_parts

OUTPUTS, INPUTS = 64, 128
"""Of a tile, at most. Storage is rounded up to them."""
PROGRAMS = 384
"""As many are wanted at least: three for each of the 58 to 132 processors of most GPUs."""
LEAST_PART = 512
"""Inputs of a part, below which a program's beginning and end would be most of it."""
MOST_ROWS = 512
"""Up to so many rows are multiplied by the kernel, whose time grows with each tile of rows; for
more the matrix is dequantized once."""
ROWS_AT_ONCE = 512
"""Of a launch: bounds the memory of partial sums where tiles are fixed."""
DEQUANTIZED_AT_ONCE = 2**24
"""Weights: 32 MiB in 16 bits, which the caches of large GPUs hold."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's tile, and compiler options."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = (
    Tile(16, OUTPUTS, INPUTS, 4, 5),
    Tile(32, OUTPUTS, INPUTS, 4, 5),
    Tile(64, OUTPUTS, INPUTS, 4, 4),
)
"""For x in 16 bits: the first with room for all rows, or the last. 99 KiB of shared memory hold any
(compute capability 8.6 and 8.9)."""
FLOAT32_TILE = Tile(16, 32, BLOCK, 4, 2)
"""Exact products. For 64 outputs Triton would take the tensor cores of sm_100, which round
float32."""


class BlockWeights(NamedTuple):
    """A matrix as the kernels read it."""

    numbers_Nj: Tensor
    scales_BN: Tensor
    minima_BN: Tensor | None
    num_outputs: int
    num_inputs: int


@triton.jit
def _of_blocks(heads_ptr, block_B, row_N, ROWS: tl.constexpr):
    """Scales or minima of these blocks and rows of the matrix, [N, B, 1] in float32."""
    heads_BN = tl.load(heads_ptr + block_B[:, None] * ROWS + row_N[None, :])
    return tl.trans(heads_BN).to(tl.float32)[:, :, None]


@triton.jit
def _weights(bits_Nj, scale_NB1, minimum_NB1, ZERO: tl.constexpr):
    """scale * (bits - ZERO) + minimum, or without the minimum, in float32."""
    NUMBERS: tl.constexpr = bits_Nj.shape[1] // scale_NB1.shape[1]
    # 2^23 + n has the bits of n in its last places. Conversions of integers are slow on a GPU.
    floats_Nj = (bits_Nj | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    weight_NBk = tl.reshape(floats_Nj, [bits_Nj.shape[0], scale_NB1.shape[1], NUMBERS])
    # scale * q is exact, so that a fused sum rounds as two operations do.
    weight_NBk = (
        weight_NBk * scale_NB1
        if minimum_NB1 is None
        else tl.fma(weight_NBk, scale_NB1, minimum_NB1)
    )
    return tl.reshape(weight_NBk, [bits_Nj.shape[0], bits_Nj.shape[1]])


@triton.jit
def _rows_of_x(x_ptr, row_T, num_rows, input_j, INPUTS: tl.constexpr, UPCAST: tl.constexpr):
    """x^T at these inputs, [j, T]; zeros where there are none."""
    there_jT = (row_T < num_rows)[None, :] & (input_j < INPUTS)[:, None]
    x_jT = tl.load(
        x_ptr + row_T.to(tl.int64)[None, :] * INPUTS + input_j[:, None], mask=there_jT, other=0.0
    )
    return x_jT.to(tl.float32) if UPCAST else x_jT


# Triton would otherwise compile other kernels for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def block_product(
    x_ptr, numbers_ptr, scales_ptr, minima_ptr, bias_ptr, y_ptr, num_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Program (i, p): tile i of y or, where there are several parts, of the sums of part p, in
    float32 [PARTS, T, O].

    Weights are the left operand: Hopper's tensor cores take that one, and only that one, from
    registers.
    """
    num_row_tiles, part = tl.cdiv(num_rows, BLOCK_T), tl.program_id(1)
    # Tiles with the same weights are adjacent, so that these are read from memory once.
    row_T = tl.program_id(0) % num_row_tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    column_O = tl.program_id(0) // num_row_tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    BYTES: tl.constexpr = 32 if minima_ptr is None else 16
    byte_j, block_B = tl.arange(0, BLOCK_I // 32 * BYTES), tl.arange(0, BLOCK_I // 32)
    input_j = byte_j // BYTES * 32 + byte_j % BYTES
    # 64-bit offsets: W may have more than 2**31 bytes.
    numbers_ptrs = numbers_ptr + column_O.to(tl.int64)[:, None] * (BLOCKS * BYTES) + byte_j[None, :]
    sum_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for first in range(part * PART, min(part * PART + PART, BLOCKS * 32), BLOCK_I):
        bits_Oj = tl.load(numbers_ptrs + first // 32 * BYTES).to(tl.int32)
        scale_OB1 = _of_blocks(scales_ptr, first // 32 + block_B, column_O, ROWS)
        x_jT = _rows_of_x(x_ptr, row_T, num_rows, first + input_j, INPUTS, UPCAST)
        if minima_ptr is None:
            w_Oj = _weights(bits_Oj, scale_OB1, None, 128).to(x_jT.dtype)
        else:
            # A byte holds the numbers of inputs k and k + 16 of a block. The latter's bits are 16
            # times the number.
            minimum_OB1 = _of_blocks(minima_ptr, first // 32 + block_B, column_O, ROWS)
            w_Oj = _weights(bits_Oj & 15, scale_OB1, minimum_OB1, 0).to(x_jT.dtype)
            sum_OT = tl.dot(w_Oj, x_jT, sum_OT, input_precision="ieee")
            x_jT = _rows_of_x(x_ptr, row_T, num_rows, first + 16 + input_j, INPUTS, UPCAST)
            w_Oj = _weights(bits_Oj & 240, scale_OB1 * 0.0625, minimum_OB1, 0).to(x_jT.dtype)
        sum_OT = tl.dot(w_Oj, x_jT, sum_OT, input_precision="ieee")
    if PARTS == 1 and bias_ptr is not None:
        sum_OT += tl.load(bias_ptr + column_O, mask=column_O < OUTPUTS, other=0.0).to(tl.float32)[
            :, None
        ]
    y_ptrs = y_ptr + (part.to(tl.int64) * num_rows + row_T)[None, :] * OUTPUTS + column_O[:, None]
    tl.store(
        y_ptrs,
        sum_OT.to(y_ptr.dtype.element_ty),
        mask=(row_T < num_rows)[None, :] & (column_O < OUTPUTS)[:, None],
    )


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def dequantize(
    numbers_ptr, scales_ptr, minima_ptr, ids_ptr, y_ptr, first_row, num_rows,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Program (n, i): a tile of y [N, I], the rows of these ids or, where there are none, the rows
    from first_row on.
    """
    index_N, first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_I
    there_N = index_N < num_rows
    row_N = (
        (first_row + index_N).to(tl.int64)
        if ids_ptr is None
        else tl.load(ids_ptr + index_N, mask=there_N, other=0)
    )
    BYTES: tl.constexpr = 32 if minima_ptr is None else 16
    byte_j, block_B = tl.arange(0, BLOCK_I // 32 * BYTES), first // 32 + tl.arange(0, BLOCK_I // 32)
    bits_Nj = tl.load(
        numbers_ptr + row_N[:, None] * (BLOCKS * BYTES) + first // 32 * BYTES + byte_j[None, :]
    ).to(tl.int32)
    scale_NB1 = _of_blocks(scales_ptr, block_B, row_N, ROWS)
    input_j = first + byte_j // BYTES * 32 + byte_j % BYTES
    y_ptrs = y_ptr + index_N.to(tl.int64)[:, None] * INPUTS + input_j[None, :]
    number_type = y_ptr.dtype.element_ty
    if minima_ptr is None:
        w_Nj = _weights(bits_Nj, scale_NB1, None, 128)
    else:
        minimum_NB1 = _of_blocks(minima_ptr, block_B, row_N, ROWS)
        w_Nj = _weights(bits_Nj & 240, scale_NB1 * 0.0625, minimum_NB1, 0).to(number_type)
        tl.store(y_ptrs + 16, w_Nj, mask=there_N[:, None] & (input_j + 16 < INPUTS)[None, :])
        w_Nj = _weights(bits_Nj & 15, scale_NB1, minimum_NB1, 0)
    tl.store(y_ptrs, w_Nj.to(number_type), mask=there_N[:, None] & (input_j < INPUTS)[None, :])


def choose(num_rows: int, itemsize: int, fixed_tile: bool) -> Tile:
    """The tile of a product of x with so many rows of numbers of this size."""
    if itemsize == 4:
        return FLOAT32_TILE
    if fixed_tile:
        return TILES[-1]
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def multiply_blocks(
    x_TI: Tensor, weights: BlockWeights, bias_O: Tensor | None = None, *, fixed_tile: bool = False
) -> Tensor:
    """x W^T + b in x's dtype. With a fixed tile a row's bits do not depend on the other rows."""
    x_TI, num_rows = in_place(x_TI), len(x_TI)
    y_TO = x_TI.new_empty(num_rows, weights.num_outputs)
    if num_rows > MOST_ROWS and not fixed_tile:
        _multiply_dequantized(x_TI, weights, bias_O, y_TO)
        return y_TO
    for x, y in zip(x_TI.split(ROWS_AT_ONCE), y_TO.split(ROWS_AT_ONCE), strict=True):
        if len(x):
            _multiply(x, weights, bias_O, y, choose(num_rows, x.element_size(), fixed_tile))
    return y_TO


def _multiply(
    x_TI: Tensor, weights: BlockWeights, bias_O: Tensor | None, y_TO: Tensor, tile: Tile
) -> None:
    numbers_Nj, scales_BN, minima_BN, num_outputs, num_inputs = weights
    num_rows, (num_blocks, stored_rows) = len(x_TI), scales_BN.shape
    part = part_of(num_inputs, num_outputs)
    parts = -(-num_inputs // part)
    sums = y_TO if parts == 1 else y_TO.new_empty(parts, num_rows, num_outputs, dtype=torch.float32)
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
    upcast = x_TI.device.type == "cpu" and x_TI.dtype is torch.bfloat16
    block_product[(-(-num_rows // tile.rows) * (stored_rows // tile.outputs), parts)](
        x_TI, numbers_Nj, scales_BN, minima_BN, bias_O, sums, num_rows,
        num_inputs, num_outputs, stored_rows, num_blocks, part, parts, upcast,
        tile.rows, tile.outputs, tile.inputs, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    if parts > 1:
        join_parts(sums, bias_O, y_TO)


def part_of(num_inputs: int, num_outputs: int) -> int:
    """Inputs of each of a matrix's parts, a multiple of INPUTS: so many parts that there are
    PROGRAMS. All inputs, where there are as many without.
    """
    num_tiles = -(-num_outputs // OUTPUTS)
    parts = max(1, min(-(-PROGRAMS // num_tiles), num_inputs // LEAST_PART))
    return -(-num_inputs // (parts * INPUTS)) * INPUTS


def _multiply_dequantized(
    x_TI: Tensor, weights: BlockWeights, bias_O: Tensor | None, y_TO: Tensor
) -> None:
    """By torch, of some rows of W at a time."""
    step = max(1, DEQUANTIZED_AT_ONCE // weights.num_inputs // OUTPUTS) * OUTPUTS
    for first in range(0, weights.num_outputs, step):
        some = slice(first, min(first + step, weights.num_outputs))
        weight_NI = dequantized(weights, first, some.stop - first, x_TI.dtype)
        if bias_O is None:
            torch.mm(x_TI, weight_NI.T, out=y_TO[:, some])
        else:
            torch.addmm(bias_O[some], x_TI, weight_NI.T, out=y_TO[:, some])


def dequantized(
    weights: BlockWeights, first: int, count: int, dtype: torch.dtype, ids_N: Tensor | None = None
) -> Tensor:
    """`count` rows of W, by number or, without ids, from `first` on, which is a multiple of
    OUTPUTS. -> weight_NI
    """
    numbers_Nj, scales_BN, minima_BN, _, num_inputs = weights
    num_blocks, stored_rows = scales_BN.shape
    y_NI = scales_BN.new_empty(count, num_inputs, dtype=dtype)
    if count:
        dequantize[(-(-count // OUTPUTS), num_blocks * BLOCK // INPUTS)](
            numbers_Nj, scales_BN, minima_BN, None if ids_N is None else in_place(ids_N), y_NI,
            first, count,
            num_inputs, stored_rows, num_blocks, OUTPUTS, INPUTS, num_warps=4, **EXACT,
        )  # fmt: skip
    return y_NI
