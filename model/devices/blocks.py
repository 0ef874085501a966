"""Weights in blocks of 32 inputs, in 8 or 4 bits, each block with a scale of its own: how they are
stored, made and multiplied.

A row of a matrix is stored as bytes, block after block: a scale and in 4 bits a minimum, in
float16, then the numbers. These are GGUF's types Q8_0 and Q4_1: in int8 w = scale * q with q in
-127 .. 127; in int4 w = scale * q + minimum with q in 0 .. 15, where byte j holds the numbers of
inputs j and j + 16. On a CPU activations are rounded to 8 bits when they arrive, in the same blocks
and symmetric around 0: x = t * q.

A product is y = sum over blocks of (dot * scale + minimum * sum(q of x)) * t. Dots within a block
are integers and exact; blocks are added in order, in float32 without fused operations. So a row of
y depends on that row of x alone. The CPU's kernels (devices/cpu/native/blocks.cpp) compute this.

Shape letters: I input columns, N rows of a matrix, B blocks of a row, k inputs of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
LARGEST = 127
LEVELS = 15
CLIPPING = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.7)
"""Shares of a block's range that int4 tries to cover."""
TINY = torch.finfo(torch.float32).tiny


class BlockFormat(NamedTuple):
    """One way to store blocks."""

    name: str
    block_bytes: int
    quantize: Callable[[Tensor], Tensor]
    """float matrix [N, I] -> uint8 [N, B * block_bytes]; inputs that are missing in the last block
    are 0."""

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row of so many inputs."""
        return -(-num_inputs // BLOCK) * self.block_bytes


def in_blocks(weight_NI: Tensor) -> Tensor:
    weight_NBk: Tensor = F.pad(weight_NI.float(), (0, -weight_NI.shape[1] % BLOCK)).unflatten(
        1, (-1, BLOCK)
    )
    return weight_NBk


def _joined(numbers_NBk: Tensor, *heads_NB: Tensor) -> Tensor:
    """uint8 rows of the float16 numbers of a block and what follows them."""
    parts = [head_NB.half()[..., None].view(torch.uint8) for head_NB in heads_NB]
    return torch.cat([*parts, numbers_NBk.view(torch.uint8)], dim=-1).flatten(1)


def _quantize_int8(weight_NI: Tensor) -> Tensor:
    weight_NBk = in_blocks(weight_NI)
    scale_NB = (weight_NBk.abs().amax(dim=-1) / LARGEST).half()
    numbers_NBk = (
        (weight_NBk / scale_NB.float().clamp_(min=TINY)[..., None])
        .round_()
        .clamp_(-LARGEST, LARGEST)
    )
    return _joined(numbers_NBk.to(torch.int8), scale_NB)


def _quantize_int4(weight_NI: Tensor) -> Tensor:
    weight_NBk = in_blocks(weight_NI)
    count, num_blocks = weight_NBk.shape[:2]
    scale_n, minimum_n, numbers_kn = _round_int4(weight_NBk.reshape(-1, BLOCK).T)
    low_nj, high_nj = numbers_kn.T.chunk(2, dim=-1)
    packed_NBj = (low_nj | high_nj << 4).view(count, num_blocks, BLOCK // 2)
    return _joined(packed_NBj, scale_n.view(count, num_blocks), minimum_n.view(count, num_blocks))


def _round_int4(weight_kn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n blocks -> (scale_n, minimum_n as float16, q_kn): of several ranges for the numbers, each
    followed by the least squares of scale and minimum for them, the one with the least squared
    error.
    """
    weight_kn = weight_kn.contiguous()
    low_n, high_n = weight_kn.amin(dim=0), weight_kn.amax(dim=0)
    total_n = _total(weight_kn)
    best_gain_n, best_scale_n, best_minimum_n = (
        torch.full_like(low_n, value) for value in (-torch.inf, torch.nan, torch.nan)
    )
    for share in CLIPPING:
        scale_n = (high_n - low_n) * (share / LEVELS)
        minimum_n = low_n + (high_n - low_n) * ((1 - share) / 2)
        numbers_kn = _numbers(weight_kn, scale_n, minimum_n)
        sum_n, dot_n = numbers_kn.sum(dim=0), _total(numbers_kn * weight_kn)
        spread_n = BLOCK * numbers_kn.square_().sum(dim=0) - sum_n.square()
        scale_n = torch.where(
            spread_n > 0, (BLOCK * dot_n - sum_n * total_n) / spread_n.clamp(min=1), 0.0
        )
        minimum_n = (total_n - scale_n * sum_n) / BLOCK
        # The squared error is that of all zeros less this.
        gain_n = scale_n * dot_n + minimum_n * total_n
        better_n = gain_n > best_gain_n
        best_gain_n = torch.where(better_n, gain_n, best_gain_n)
        best_scale_n = torch.where(better_n, scale_n, best_scale_n)
        best_minimum_n = torch.where(better_n, minimum_n, best_minimum_n)
    best_scale_n, best_minimum_n = best_scale_n.half(), best_minimum_n.half()
    return (
        best_scale_n,
        best_minimum_n,
        _numbers(weight_kn, best_scale_n.float(), best_minimum_n.float()).to(torch.uint8),
    )


def _total(x_kn: Tensor) -> Tensor:
    """The sum over k: the second half is added to the first until one is left."""
    while len(x_kn) > 1:
        first_jn, second_jn = x_kn.chunk(2)
        x_kn = first_jn + second_jn
    return x_kn[0]


def _numbers(weight_kn: Tensor, scale_n: Tensor, minimum_n: Tensor) -> Tensor:
    inverse_n = torch.where(scale_n > 0, 1 / scale_n, 0.0)
    return ((weight_kn - minimum_n) * inverse_n).round_().clamp_(0, LEVELS)


INT8 = BlockFormat("int8", 2 + BLOCK, _quantize_int8)
INT4 = BlockFormat("int4", 4 + BLOCK // 2, _quantize_int4)
FORMATS = {"int8": INT8, "int4": INT4}
