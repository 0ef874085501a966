"""Rows of GGUF's quantization blocks -> rows of those of our kernels (devices/blocks.py), without passing through float32.

Q8_0 and Q4_1 are ours already. Q5_0 and Q4_0 hold whole numbers that fit. Q4_K's scales and minima, six bits times one float16 for eight
blocks, are rounded to float16. Other types have blocks of other sizes or numbers that do not fit, and are read as floats. It knows nothing
of files.

Shape letters: N blocks, B bytes of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.checkpoint.gguf.dequantize import fifth_bits, halves, scale_of, scales_and_minima
from model.checkpoint.gguf.types import BY_NAME
from model.spec import CheckpointError


def repacks(kind: str, form: str) -> bool:
    """Whether `repack` knows the type called `kind` and the block format `form`."""
    return (kind, form) in REPACKED


def kept_in(kind: str) -> str:
    """The block format in which a quantized type is held where weights are held as in the file."""
    return "int4" if repacks(kind, "int4") else "int8"


def repack(kind: str, form: str, data: Tensor) -> Tensor:
    """uint8 [rows, bytes of a row] of the type called `kind`, whose scales are finite -> the same rows in the block format `form`. Raises
    CheckpointError for a scale or minimum that float16 cannot hold.
    """
    return REPACKED[kind, form](data.reshape(-1, BY_NAME[kind].block_bytes)).view(len(data), -1)


def joined(heads: "tuple[Tensor, ...]", numbers_NB: Tensor) -> Tensor:
    """Blocks of these scales and minima, [N, 1] each, and packed numbers. Raises CheckpointError for a head that float16 cannot hold."""
    heads_NB = torch.cat(heads, dim=1).half()
    if not heads_NB.isfinite().all():
        raise CheckpointError("has a block whose scale or minimum is beyond float16; expected engine.quantization none for this file")
    return torch.cat([heads_NB.view(torch.uint8), numbers_NB.view(torch.uint8)], dim=1)


def _as_it_is(blocks_NB: Tensor) -> Tensor:
    return blocks_NB


def _q5_0(blocks_NB: Tensor) -> Tensor:
    numbers_NB = halves(blocks_NB[:, 6:], 16) | fifth_bits(blocks_NB[:, 2:6])
    return joined((scale_of(blocks_NB, 0),), numbers_NB.to(torch.int8) - 16)


def _q4_0_in_int8(blocks_NB: Tensor) -> Tensor:
    return joined((scale_of(blocks_NB, 0),), halves(blocks_NB[:, 2:], 16).to(torch.int8) - 8)


def _q4_0(blocks_NB: Tensor) -> Tensor:
    scale_N1 = scale_of(blocks_NB, 0)
    return joined((scale_N1, -8 * scale_N1), blocks_NB[:, 2:])


def _q4_k(blocks_NB: Tensor) -> Tensor:
    scale_N81, minimum_N81 = scales_and_minima(blocks_NB)
    # Of each pair of groups the first is in the lower halves of 32 bytes, the second in the upper ones.
    numbers_NB = halves(blocks_NB[:, 16:], 32).view(-1, 2, 16)
    packed_NB = numbers_NB[:, 0] | numbers_NB[:, 1] << 4
    return joined((scale_N81.reshape(-1, 1), -minimum_N81.reshape(-1, 1)), packed_NB)


REPACKED: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("Q8_0", "int8"): _as_it_is,
    ("Q5_0", "int8"): _q5_0,
    ("Q4_0", "int8"): _q4_0_in_int8,
    ("Q4_1", "int4"): _as_it_is,
    ("Q4_0", "int4"): _q4_0,
    ("Q4_K", "int4"): _q4_k,
}
"""By type and block format."""
