"""Products of one row of x: y = activation(x W^T + b), where reading W is all the time. Kernel and
launch.

A program loads its whole piece of W at once instead of block by block: there is no loop whose
beginning and end would take longer than the piece. It multiplies without tensor cores, which would
compute fifteen rows more. Inputs are divided into parts (products.py) where a piece has no room for
all. It knows nothing of layers, and promises nothing about batches: several rows are multiplied
otherwise.

Shape letters: I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.devices.gpu import EXACT
from model.devices.gpu.launches import in_place, join_parts
from model.devices.gpu.products import activated

MOST_WEIGHTS = 2**25
"""Of a matrix. Larger ones, as heads, cuBLAS reads at the speed of a copy already (measured on an
H100).
"""
ELEMENTS, LONGEST = 2**15, 2**13
"""Of a piece, which the registers of a program hold, and inputs of it."""
MOST_OUTPUTS, LEAST_PROGRAMS = 8, 256


@triton.jit
def one_row(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, APART: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Program (o, i): outputs of y or, where they are APART, of the sums of part i, in float32
    [parts, O].
    """
    column_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    input_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    there_O, there_I = column_O < OUTPUTS, input_I < INPUTS
    # 64-bit offsets: W may have more than 2**31 elements.
    w_ptrs = weight_ptr + column_O.to(tl.int64)[:, None] * INPUTS + input_I[None, :]
    there_OI = there_O[:, None] & there_I[None, :]
    w_OI = tl.load(w_ptrs, mask=there_OI, other=0.0, eviction_policy="evict_first")
    x_I = tl.load(x_ptr + input_I, mask=there_I, other=0.0).to(tl.float32)
    sum_O = tl.sum(w_OI.to(tl.float32) * x_I[None, :], 1)
    if not APART:
        if bias_ptr is not None:
            sum_O += tl.load(bias_ptr + column_O, mask=there_O, other=0.0).to(tl.float32)
        sum_O = activated(sum_O, ACTIVATION)
    y_ptrs = y_ptr + tl.program_id(1) * OUTPUTS + column_O
    tl.store(y_ptrs, sum_O.to(y_ptr.dtype.element_ty), mask=there_O)


def piece_of(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Outputs and inputs of a program's piece."""
    inputs = min(LONGEST, 1 << (num_inputs - 1).bit_length())
    fits = inputs * MOST_OUTPUTS <= ELEMENTS and num_outputs > MOST_OUTPUTS * LEAST_PROGRAMS
    return MOST_OUTPUTS if fits else MOST_OUTPUTS // 2, inputs


def multiply_row(
    x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """activation(x W^T + b) of one row. -> y_1O"""
    num_outputs, num_inputs = weight_OI.shape
    x_1I, (outputs, inputs) = in_place(x_1I), piece_of(num_outputs, num_inputs)
    y_1O, parts = x_1I.new_empty(1, num_outputs), -(-num_inputs // inputs)
    sums = y_1O if parts == 1 else y_1O.new_empty(parts, 1, num_outputs, dtype=torch.float32)
    one_row[(-(-num_outputs // outputs), parts)](
        x_1I, weight_OI, bias_O, sums, num_inputs, num_outputs, parts > 1, activation,
        BLOCK_O=outputs, BLOCK_I=inputs, num_warps=4, **EXACT,
    )  # fmt: skip
    if parts > 1:
        join_parts(sums, bias_O, y_1O, activation)
    return y_1O
