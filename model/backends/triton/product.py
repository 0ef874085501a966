"""x W^T over float8 weights on a GPU: tiles are read as they are stored, converted to x's type, and scaled when all is summed.

Invariant: a row of the result depends on that row of x alone, bit for bit: one tile for each type, whatever the number of rows, and sums
in the order of the columns. It knows nothing of layers.

Shape letters: T rows, I input and O output columns, M rows of a tile, N its output columns, K input columns that are multiplied at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
# Bytes of a number of x -> the tile. 64 rows are the least that Hopper's tensor cores take at once; float32 goes without.
TILES: dict[int, dict[str, Any]] = {
    2: {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    4: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1},
}


@triton.jit(do_not_specialize=["num_rows"])
def scaled_product(
    x_ptr, weight_ptr, scale_ptr, y_ptr, num_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (n, m): tile m of the rows, tile n of the output columns."""
    output_N = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_M = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    there_M, there_N = row_M < num_rows, output_N < OUTPUTS
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        column_K = first + tl.arange(0, BLOCK_K)
        there_K = column_K < INPUTS
        x_MK = tl.load(x_ptr + row_M[:, None] * INPUTS + column_K[None, :], mask=there_M[:, None] & there_K[None, :], other=0.0)
        # The interpreter multiplies bfloat16's bit patterns as if they were integers.
        x_MK = x_MK.to(tl.float32) if UPCAST else x_MK
        w_NK = tl.load(weight_ptr + output_N[:, None] * INPUTS + column_K[None, :], mask=there_N[:, None] & there_K[None, :], other=0.0)
        sum_MN = tl.dot(x_MK, tl.trans(w_NK.to(x_MK.dtype)), sum_MN, input_precision="ieee")
    scale_N = tl.load(scale_ptr + output_N, mask=there_N, other=0.0)
    y_MN = (sum_MN * scale_N[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row_M[:, None] * OUTPUTS + output_N[None, :], y_MN, mask=there_M[:, None] & there_N[None, :])


def product(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor) -> Tensor:
    """x W^T * scale, in x's dtype."""
    x_TI = x_TI.contiguous()
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight_OI.shape
    y_TO = x_TI.new_empty(num_rows, num_outputs)
    tile = TILES[x_TI.itemsize]
    grid = triton.cdiv(num_outputs, tile["BLOCK_N"]), triton.cdiv(num_rows, tile["BLOCK_M"])
    upcast = x_TI.device.type == "cpu" and x_TI.dtype is torch.bfloat16
    scaled_product[grid](x_TI, weight_OI, scale_O, y_TO, num_rows, num_inputs, num_outputs, UPCAST=upcast, **tile, **EXACT)
    return y_TO
