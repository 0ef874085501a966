"""Products of few rows of x: y = activation(x W^T + b), where reading W is all the time. Kernel and launch.

A program loads its whole piece of W at once, before it waits for the launch that computes x, instead of block by block: there is no loop
whose beginning and end would take longer than the piece. One row is multiplied without tensor cores, which would compute fifteen more.
Inputs are divided into parts (products.py) where a piece has no room for all. It knows nothing of layers, and promises nothing about
batches: another number of rows takes another tile.

Shape letters: T rows of x, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model.devices.gpu import EXACT, dependent
from model.devices.gpu.launches import in_place, join_parts
from model.devices.gpu.products import activated

MOST_ROWS = 32
MOST_WEIGHTS = 2**25
"""Of a matrix. Larger ones, as heads, cuBLAS reads at the speed of a copy already (measured on an H100)."""
LEAST_ROWS = 16
"""Of a tensor core's tile."""
TILE = 64, 512
"""Outputs and inputs of a piece for several rows."""
ELEMENTS, LONGEST = 2**15, 2**13
"""Of a piece for one row, which the registers of a program hold, and inputs of it."""
MOST_OUTPUTS, LEAST_PROGRAMS = 8, 256


@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x_ptr, weight_ptr, bias_ptr, y_ptr, num_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, APART: tl.constexpr, ACTIVATION: tl.constexpr, UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Program (o, i): a tile of y or, where they are APART, of the sums of part i, in float32 [parts, T, O]."""
    column_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    input_I, row_T = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_T)
    there_O, there_I = column_O < OUTPUTS, input_I < INPUTS
    if DEPENDENT:
        gdc_launch_dependents()
    # 64-bit offsets: W may have more than 2**31 elements.
    w_ptrs = weight_ptr + column_O.to(tl.int64)[:, None] * INPUTS + input_I[None, :]
    w_OI = tl.load(w_ptrs, mask=there_O[:, None] & there_I[None, :], other=0.0, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_wait()
    if BLOCK_T == 1:
        x_I = tl.load(x_ptr + input_I, mask=there_I, other=0.0).to(tl.float32)
        sum_OT = tl.sum(w_OI.to(tl.float32) * x_I[None, :], 1)[:, None]
    else:
        there_TI = (row_T < num_rows)[:, None] & there_I[None, :]
        x_TI = tl.load(x_ptr + row_T[:, None] * INPUTS + input_I[None, :], mask=there_TI, other=0.0)
        if UPCAST:
            w_OI, x_TI = w_OI.to(tl.float32), x_TI.to(tl.float32)
        sum_OT = tl.dot(w_OI, tl.trans(x_TI), input_precision="ieee")
    if not APART:
        if bias_ptr is not None:
            sum_OT += tl.load(bias_ptr + column_O, mask=there_O, other=0.0).to(tl.float32)[:, None]
        sum_OT = activated(sum_OT, ACTIVATION)
    y_ptrs = y_ptr + (tl.program_id(1) * num_rows + row_T)[None, :] * OUTPUTS + column_O[:, None]
    tl.store(y_ptrs, sum_OT.to(y_ptr.dtype.element_ty), mask=(row_T < num_rows)[None, :] & there_O[:, None])


def piece_of(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Rows of x, outputs and inputs of a program's tile."""
    if num_rows > 1:
        return max(LEAST_ROWS, 1 << (num_rows - 1).bit_length()), *TILE
    inputs = min(LONGEST, 1 << (num_inputs - 1).bit_length())
    fits = inputs * MOST_OUTPUTS <= ELEMENTS and num_outputs > MOST_OUTPUTS * LEAST_PROGRAMS
    return 1, MOST_OUTPUTS if fits else MOST_OUTPUTS // 2, inputs


def multiply_few(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x W^T + b) of at most MOST_ROWS rows. -> y_TO"""
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight_OI.shape
    x_TI, (rows, outputs, inputs) = in_place(x_TI), piece_of(num_rows, num_outputs, num_inputs)
    y_TO, parts = x_TI.new_empty(num_rows, num_outputs), -(-num_inputs // inputs)
    sums = y_TO if parts == 1 else y_TO.new_empty(parts, num_rows, num_outputs, dtype=torch.float32)
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
    upcast = x_TI.device.type == "cpu" and x_TI.dtype is torch.bfloat16
    few_rows[(-(-num_outputs // outputs), parts)](
        x_TI, weight_OI, bias_O, sums, num_rows, num_inputs, num_outputs, parts > 1, activation, upcast,
        BLOCK_T=rows, BLOCK_O=outputs, BLOCK_I=inputs, num_warps=4, **dependent(x_TI.device), **EXACT,
    )  # fmt: skip
    if parts > 1:
        join_parts(sums, bias_O, y_TO, activation)
    return y_TO
