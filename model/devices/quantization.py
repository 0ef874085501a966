"""Weights in 8 bits with a float32 scale for each output channel: as integers, or as floating point numbers.

int8: activations are quantized per token on the fly, and sums are exact integers. x = s (x_q - z) for each token and W = t W_q for each
output channel, so y = (x_q W_q^T - z * rowsums(W_q)) * s * t + b. The zero point z is there because an MLP's activations are hardly ever
negative: without it half of the range would be unused. Sums of integers do not depend on their order, so a token's result does not
depend on which other tokens are computed with it.

fp8 (float8_e4m3fn): activations stay as they are. y = (x W_q^T) * t + b with sums in float32.

Shape letters: T tokens, I input and O output columns.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pool import in_float8

LARGEST = 127
EXACT_COLUMNS = 2**24 // (LARGEST * (LARGEST + 1))
CONVERTED_AT_ONCE = 2**24
"""Elements that torch converts from float8 at a time."""


def quantize_weights(weight_OI: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """W -> (W_q, t_O): symmetric around 0, a row's largest value being 127 or, in float8, 448. A row of zeros has scale 1."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(dim=-1)
    scale_O = largest_O / (LARGEST if dtype is torch.int8 else torch.finfo(dtype).max)
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))
    weight_OI = weight_OI / scale_O[:, None]
    return weight_OI.round_().to(dtype) if dtype is torch.int8 else in_float8(weight_OI), scale_O


def quantize_tokens(x_TI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x -> (x_q in -128 .. 127, s_T, z_T): from the least to the greatest value of each token; 0 is always representable."""
    x_TI = x_TI.float()
    least_T1, greatest_T1 = x_TI.amin(dim=-1, keepdim=True).clamp_(max=0), x_TI.amax(dim=-1, keepdim=True).clamp_(min=0)
    scale_T1 = ((greatest_T1 - least_T1) / (2 * LARGEST + 1)).clamp_(min=torch.finfo(torch.float32).tiny)
    inverse_T1 = scale_T1.reciprocal()
    zero_T1 = -1 - LARGEST - (least_T1 * inverse_T1).round_()
    x_int8_TI = (x_TI * inverse_T1).round_().add_(zero_T1).clamp_(-1 - LARGEST, LARGEST).to(torch.int8)
    return x_int8_TI, scale_T1[:, 0], zero_T1[:, 0].to(torch.int32)


def integer_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of int8 matrices on a CPU, exactly, as int32."""
    if x_TI.shape[1] == 1:
        return column_product(x_TI, weight_OI)
    return torch._int_mm(x_TI, weight_OI.T) if _product_is_exact() else product_in_floats(x_TI, weight_OI)


def column_product(x_T1: Tensor, weight_O1: Tensor) -> Tensor:
    """`integer_product` of single columns, which torch._int_mm mistakes for rows when they are transposed."""
    return x_T1.int() * weight_O1.int().T


@cache
def _product_is_exact() -> bool:
    """Whether this CPU sums products of bytes in 32 bits. Without VNNI torch sums pairs of them in 16, which overflow."""
    extreme = torch.full((1, 64), LARGEST, dtype=torch.int8)
    return int(torch._int_mm(extreme, extreme.T)) == 64 * LARGEST**2


def product_in_floats(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same through float32, whose 24 bits hold every sum of EXACT_COLUMNS products."""
    sums_TO = torch.zeros(len(x_TI), len(weight_OI), dtype=torch.int32)
    for x, weight in zip(x_TI.split(EXACT_COLUMNS, dim=1), weight_OI.split(EXACT_COLUMNS, dim=1), strict=True):
        sums_TO += (x.float() @ weight.float().T).int()
    return sums_TO


def float8_product(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T * t + b in x's dtype, summed in float32 by torch, which converts some rows of W at a time."""
    rows = max(1, CONVERTED_AT_ONCE // weight_OI.shape[1])
    wide_TI = x_TI.float()
    y_TO = torch.cat([F.linear(wide_TI, weight.float()) for weight in weight_OI.split(rows)], dim=-1).mul_(scale_O)
    return (y_TO if bias_O is None else y_TO.add_(bias_O)).to(x_TI.dtype)


class Arithmetic(NamedTuple):
    """Products of quantized matrices, as a device computes them; the signatures are those of HOST's."""

    integer_product: Callable[[Tensor, Tensor], Tensor]
    float8_product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


HOST = Arithmetic(integer_product, float8_product)
