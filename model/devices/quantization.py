"""Weights in 8 bits with a float32 scale for each output channel: as integers, or as floating point numbers.

int8: activations are quantized token by token as they come, accumulation is exact. x = s (x_q - z) for each token and W = t W_q for each
output channel, so y = (x_q W_q^T - z * rowsums(W_q)) * s * t + b. The zero point z is there because what an MLP's activation gives is
hardly ever negative: without it half the range would lie idle. The sums are integers, so a token's result does not depend on which
others are computed with it.

fp8 (float8_e4m3fn): activations stay as they are. y = (x W_q^T) * t + b with sums in float32 (quantized_modules.float8_product).

Shape letters: T tokens, I input and O output columns.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pool import in_float8

LARGEST = 127
# What the GPU's integer product asks for: more rows than this, and sizes that are multiples of 8.
GPU_MIN_ROWS, GPU_MULTIPLE = 17, 8
EXACT_COLUMNS = 2**24 // (LARGEST * (LARGEST + 1))


def quantize_weights(weight_OI: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """W -> (W_q, t_O): symmetric around 0, a row's largest value being 127 or, in float8, 448. A row of nothing has scale 1."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(dim=-1)
    scale_O = largest_O / (LARGEST if dtype is torch.int8 else torch.finfo(dtype).max)
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))
    weight_OI = weight_OI / scale_O[:, None]
    return weight_OI.round_().to(dtype) if dtype is torch.int8 else in_float8(weight_OI), scale_O


def quantize_tokens(x_TI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x -> (x_q in -128 .. 127, s_T, z_T): from the least to the greatest value of each token, 0 always among what is represented."""
    x_TI = x_TI.float()
    least_T1, greatest_T1 = x_TI.amin(dim=-1, keepdim=True).clamp_(max=0), x_TI.amax(dim=-1, keepdim=True).clamp_(min=0)
    scale_T1 = ((greatest_T1 - least_T1) / (2 * LARGEST + 1)).clamp_(min=torch.finfo(torch.float32).tiny)
    inverse_T1 = scale_T1.reciprocal()
    zero_T1 = -1 - LARGEST - (least_T1 * inverse_T1).round_()
    x_int8_TI = (x_TI * inverse_T1).round_().add_(zero_T1).clamp_(-1 - LARGEST, LARGEST).to(torch.int8)
    return x_int8_TI, scale_T1[:, 0], zero_T1[:, 0].to(torch.int32)


def integer_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of int8 matrices, exactly, as int32."""
    if x_TI.shape[1] == 1:
        return x_TI.int() * weight_OI.int().T  # A transposed column looks like a row to torch's product, and is taken for one.
    if x_TI.device.type == "cpu":
        return torch._int_mm(x_TI, weight_OI.T) if _product_is_exact() else product_in_floats(x_TI, weight_OI)
    num_rows, num_columns = x_TI.shape
    padded_TI = _padded(x_TI, max(GPU_MIN_ROWS, num_rows), -(-num_columns // GPU_MULTIPLE) * GPU_MULTIPLE)
    padded_OI = _padded(weight_OI, -(-len(weight_OI) // GPU_MULTIPLE) * GPU_MULTIPLE, padded_TI.shape[1])
    return torch._int_mm(padded_TI, padded_OI.T)[:num_rows, : len(weight_OI)]


def _padded(x: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """x with zeros to that size; itself where it has it."""
    missing = num_columns - x.shape[1], num_rows - x.shape[0]
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


@cache
def _product_is_exact() -> bool:
    """Whether this CPU sums products of bytes in 32 bits. One without VNNI has torch sum pairs of them in 16, which overflow."""
    extreme = torch.full((1, 64), LARGEST, dtype=torch.int8)
    return int(torch._int_mm(extreme, extreme.T)) == 64 * LARGEST**2


def product_in_floats(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same through float32, whose 24 bits hold every sum of EXACT_COLUMNS products."""
    sums_TO = torch.zeros(len(x_TI), len(weight_OI), dtype=torch.int32)
    for x, weight in zip(x_TI.split(EXACT_COLUMNS, dim=1), weight_OI.split(EXACT_COLUMNS, dim=1), strict=True):
        sums_TO += (x.float() @ weight.float().T).int()
    return sums_TO
