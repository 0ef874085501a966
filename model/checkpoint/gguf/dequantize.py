"""Rows of quantization blocks -> float32, bit for bit as the `gguf` package's `quants.dequantize`.

Blocks are as llama.cpp documents them in ggml-common.h: scales are float16 d (and minima m), the quantized numbers q lie in halves of
bytes, their fifth and sixth bits apart. Invariant: a result is d * q, d * q + m or d * q - m, where d * q is exact in float32; scales that
are NaN or infinite are an error. It knows nothing of files.

Shape letters: N blocks, B bytes or elements of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.checkpoint.gguf.types import BY_NAME
from model.spec import CheckpointError

CHUNK_ELEMENTS = 2**17
"""Elements at a time, so that what is computed on the way stays in a processor's cache."""
_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8) << 4
"""The bits of a byte, lowest first, each as the fifth bit of a number."""


def dequantize(kind: str, data: Tensor, out: Tensor) -> None:
    """Fills `out`, contiguous float32, with the numbers that `data` holds, uint8 of whole blocks of the type called `kind`. Raises
    CheckpointError for a scale that is NaN or infinite.
    """
    found = BY_NAME[kind]
    blocks_NB, out_NB = data.view(-1, found.block_bytes), out.view(-1, found.block_elements)
    step, dequantize_blocks = max(1, CHUNK_ELEMENTS // found.block_elements), _BLOCKS[kind]
    for first in range(0, len(blocks_NB), step):
        dequantize_blocks(blocks_NB[first : first + step], out_NB[first : first + step])


def check_scales(kind: str, data: Tensor) -> None:
    """Raises CheckpointError if a scale of these blocks is NaN or infinite."""
    blocks_NB = data.view(-1, BY_NAME[kind].block_bytes)
    for begin in _SCALES[kind]:
        scale_of(blocks_NB, begin)


def scale_of(blocks_NB: Tensor, begin: int) -> Tensor:
    """The float16 that begins at a byte of each block, as float32 [N, 1]."""
    scale_N1 = blocks_NB[:, begin : begin + 2].contiguous().view(torch.float16).float()
    if not scale_N1.isfinite().all():
        raise CheckpointError("has a block whose scale is NaN or infinity; the file is damaged")
    return scale_N1


def halves(bytes_NB: Tensor, width: int) -> Tensor:
    """The lower halves of `width` bytes, then the upper halves, and so on for the next bytes: [N, 2 * B] of 0 to 15."""
    bytes_Nkw = bytes_NB.unflatten(1, (-1, width))
    return torch.stack([bytes_Nkw & 15, bytes_Nkw >> 4], dim=2).flatten(1)


def _q8_0(blocks_NB: Tensor, out_NB: Tensor) -> None:
    out_NB.copy_(blocks_NB[:, 2:].view(torch.int8)).mul_(scale_of(blocks_NB, 0))


def _q4_0(blocks_NB: Tensor, out_NB: Tensor) -> None:
    out_NB.copy_(halves(blocks_NB[:, 2:], 16)).sub_(8).mul_(scale_of(blocks_NB, 0))


def _q4_1(blocks_NB: Tensor, out_NB: Tensor) -> None:
    out_NB.copy_(halves(blocks_NB[:, 4:], 16)).mul_(scale_of(blocks_NB, 0)).add_(scale_of(blocks_NB, 2))


def fifth_bits(bytes_NB: Tensor) -> Tensor:
    """16 or 0 for each bit of four bytes: [N, 32]."""
    return _BITS[bytes_NB.int()].flatten(1)


def _q5_0(blocks_NB: Tensor, out_NB: Tensor) -> None:
    q_NB = halves(blocks_NB[:, 6:], 16).bitwise_or_(fifth_bits(blocks_NB[:, 2:6]))
    out_NB.copy_(q_NB).sub_(16).mul_(scale_of(blocks_NB, 0))


def _q5_1(blocks_NB: Tensor, out_NB: Tensor) -> None:
    q_NB = halves(blocks_NB[:, 8:], 16).bitwise_or_(fifth_bits(blocks_NB[:, 4:8]))
    out_NB.copy_(q_NB).mul_(scale_of(blocks_NB, 0)).add_(scale_of(blocks_NB, 2))


def scales_and_minima(blocks_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K, for each of a block's eight groups of 32: d * scale and m * minimum, [N, 8, 1]. They are packed into 12 bytes: the
    lower six bits of the first four bytes are scales, of the next four minima; the others' lower four bits are the halves of the last
    four bytes, and their upper two the upper bits of the first eight.
    """
    low_N4, middle_N4, high_N4 = blocks_NB[:, 4:16].split(4, dim=1)
    scale_N8 = torch.cat([low_N4 & 63, (high_N4 & 15) | ((low_N4 >> 2) & 48)], dim=1)
    minimum_N8 = torch.cat([middle_N4 & 63, (high_N4 >> 4) | ((middle_N4 >> 2) & 48)], dim=1)
    return (scale_N8 * scale_of(blocks_NB, 0))[..., None], (minimum_N8 * scale_of(blocks_NB, 2))[..., None]


def _q4_k(blocks_NB: Tensor, out_NB: Tensor) -> None:
    scale_N81, minimum_N81 = scales_and_minima(blocks_NB)
    out_NB.copy_(halves(blocks_NB[:, 16:], 32)).unflatten(1, (8, 32)).mul_(scale_N81).sub_(minimum_N81)


def _q5_k(blocks_NB: Tensor, out_NB: Tensor) -> None:
    scale_N81, minimum_N81 = scales_and_minima(blocks_NB)
    bits_NB = torch.stack([blocks_NB[:, 16:48] >> bit & 1 for bit in range(8)], dim=1).flatten(1)
    out_NB.copy_(halves(blocks_NB[:, 48:], 32).bitwise_or_(bits_NB << 4)).unflatten(1, (8, 32)).mul_(scale_N81).sub_(minimum_N81)


def _q6_k(blocks_NB: Tensor, out_NB: Tensor) -> None:
    scale_NB1 = (blocks_NB[:, 192:208].view(torch.int8) * scale_of(blocks_NB, 208))[..., None]
    high_N2w = blocks_NB[:, 128:192].unflatten(1, (2, 32))
    high_NB = torch.stack([high_N2w >> bit & 3 for bit in (0, 2, 4, 6)], dim=2).flatten(1)
    q_NB = halves(blocks_NB[:, :128], 64).bitwise_or_(high_NB << 4)
    out_NB.copy_(q_NB).sub_(32).unflatten(1, (16, 16)).mul_(scale_NB1)


_BLOCKS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where each type's float16 scales begin in a block."""
QUANTIZED = frozenset(_BLOCKS)
"""The types that are dequantized to float32; the others are torch's own."""
