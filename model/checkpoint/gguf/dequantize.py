"""Rows of quantization blocks -> float32, bit for bit as the `gguf` package's `quants.dequantize`.

Blocks are as llama.cpp documents them in ggml-common.h: scales are float16 d (and minima m), the
quantized numbers q lie in halves of bytes, their fifth and sixth bits apart. Invariant: a result is
d * q, d * q + m or d * q - m, where d * q is exact in float32, and no number where a scale is none.
It knows nothing of files.

Shape letters: N blocks, B bytes or elements of a block, G groups of a block.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from model.checkpoint.gguf.types import BY_NAME

CHUNK_ELEMENTS = 2**17
"""Elements at a time, so that what is computed on the way stays in a processor's cache."""
_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8) << 4
"""The bits of a byte, lowest first, each as the fifth bit of a number."""


def dequantize(kind: str, data: Tensor, out: Tensor) -> None:
    """Fills `out`, contiguous float32, with the numbers that `data` holds, uint8 of whole blocks of
    the type called `kind`.
    """
    found = BY_NAME[kind]
    blocks_NB, out_NB = data.view(-1, found.block_bytes), out.view(-1, found.block_elements)
    step = max(1, CHUNK_ELEMENTS // found.block_elements)
    for first in range(0, len(blocks_NB), step):
        q_NB, scale_NG, minimum_NG = PARTS[kind](blocks_NB[first : first + step])
        out_NB[first : first + step] = q_NB
        out_NGB = out_NB[first : first + step].unflatten(1, (scale_NG.shape[1], -1))
        out_NGB.mul_(scale_NG[..., None])
        if minimum_NG is not None:
            out_NGB.add_(minimum_NG[..., None])


def scale_of(blocks_NB: Tensor, begin: int) -> Tensor:
    """The float16 that begins at a byte of each block, as float32 [N, 1]."""
    return blocks_NB[:, begin : begin + 2].contiguous().view(torch.float16).float()


def halves(bytes_NB: Tensor, width: int) -> Tensor:
    """The lower halves of `width` bytes, then the upper halves, and so on for the next bytes:
    [N, 2 * B] of 0 to 15.
    """
    bytes_Nkw = bytes_NB.unflatten(1, (-1, width))
    return torch.stack([bytes_Nkw & 15, bytes_Nkw >> 4], dim=2).flatten(1)


def _fives(blocks_NB: Tensor, begin: int) -> Tensor:
    """Numbers of 5 bits: the fifth ones from byte `begin` on, then the others in halves."""
    fifths_NB = _BITS[blocks_NB[:, begin : begin + 4].int()].flatten(1)
    return halves(blocks_NB[:, begin + 4 :], 16).bitwise_or_(fifths_NB)


Parts: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


def _q8_0(blocks_NB: Tensor) -> Parts:
    return blocks_NB[:, 2:].view(torch.int8), scale_of(blocks_NB, 0), None


def _q4_0(blocks_NB: Tensor) -> Parts:
    return halves(blocks_NB[:, 2:], 16).view(torch.int8).sub_(8), scale_of(blocks_NB, 0), None


def _q5_0(blocks_NB: Tensor) -> Parts:
    return _fives(blocks_NB, 2).view(torch.int8).sub_(16), scale_of(blocks_NB, 0), None


def _q4_1(blocks_NB: Tensor) -> Parts:
    return halves(blocks_NB[:, 4:], 16), scale_of(blocks_NB, 0), scale_of(blocks_NB, 2)


def _q5_1(blocks_NB: Tensor) -> Parts:
    return _fives(blocks_NB, 4), scale_of(blocks_NB, 0), scale_of(blocks_NB, 2)


def _q4_k(blocks_NB: Tensor) -> Parts:
    return halves(blocks_NB[:, 16:], 32), *_scales_and_minima(blocks_NB)


def _q5_k(blocks_NB: Tensor) -> Parts:
    bits_NB = torch.stack([blocks_NB[:, 16:48] >> bit & 1 for bit in range(8)], dim=1).flatten(1)
    q_NB = halves(blocks_NB[:, 48:], 32).bitwise_or_(bits_NB << 4)
    return q_NB, *_scales_and_minima(blocks_NB)


def _scales_and_minima(blocks_NB: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the eight groups of 32 of a Q4_K or Q5_K block: d * scale and -m * minimum, [N,
    8]. They are packed into 12 bytes: the lower six bits of the first four bytes are scales, of the
    next four minima; the others' lower four bits are the halves of the last four bytes, and their
    upper two the upper bits of the first eight.
    """
    low_N4, middle_N4, high_N4 = blocks_NB[:, 4:16].split(4, dim=1)
    scale_N8 = torch.cat([low_N4 & 63, (high_N4 & 15) | ((low_N4 >> 2) & 48)], dim=1)
    minimum_N8 = torch.cat([middle_N4 & 63, (high_N4 >> 4) | ((middle_N4 >> 2) & 48)], dim=1)
    return scale_N8 * scale_of(blocks_NB, 0), minimum_N8 * -scale_of(blocks_NB, 2)


def _q6_k(blocks_NB: Tensor) -> Parts:
    high_N2w = blocks_NB[:, 128:192].unflatten(1, (2, 32))
    high_NB = torch.stack([high_N2w >> bit & 3 for bit in (0, 2, 4, 6)], dim=2).flatten(1)
    q_NB = halves(blocks_NB[:, :128], 64).bitwise_or_(high_NB << 4).view(torch.int8).sub_(32)
    return q_NB, blocks_NB[:, 192:208].view(torch.int8) * scale_of(blocks_NB, 208), None


PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Functions of blocks that give the numbers q, int8 or uint8 [N, B], and in float32 [N, G] a scale
for each group of them and, of some types, what is added to their product.
"""
QUANTIZED = frozenset(PARTS)
"""The types that are dequantized to float32; the others are torch's own."""
