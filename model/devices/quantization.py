"""Weights as float8 (float8_e4m3fn) with a float32 scale for each output channel. Activations stay as they are, and sums are in float32:
y = (x W_q^T) * t + b. Int8 and int4 are in blocks (devices/blocks.py).

Shape letters: T tokens, I input and O output columns.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pool import FLOAT8, in_float8

CONVERTED_AT_ONCE = 2**24
"""Elements that torch converts from float8 at a time."""

Float8Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A function like `float8_product`, as a device computes it."""


def quantize_weights(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """W -> (W_q, t_O): a row's largest value being 448. A row of zeros has scale 1."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(dim=-1)
    scale_O = largest_O / torch.finfo(FLOAT8).max
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))
    return in_float8(weight_OI / scale_O[:, None]), scale_O


def float8_product(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T * t + b in x's dtype, summed in float32 by torch, which converts some rows of W at a time."""
    rows = max(1, CONVERTED_AT_ONCE // weight_OI.shape[1])
    wide_TI = x_TI.float()
    y_TO = torch.cat([F.linear(wide_TI, weight.float()) for weight in weight_OI.split(rows)], dim=-1).mul_(scale_O)
    return (y_TO if bias_O is None else y_TO.add_(bias_O)).to(x_TI.dtype)
