"""Rows of GGUF's quantization blocks -> rows of those of our kernels (devices/blocks.py), without
passing through float32.

Q8_0 and Q4_1 are ours already. Q5_0 and Q4_0 hold whole numbers that fit. Q4_K's scales and minima,
six bits times one float16 for eight blocks, are rounded to float16. Other types have blocks of
other sizes or numbers that do not fit, and are read as floats. It knows nothing of files.

Shape letters: N blocks, B bytes of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.checkpoint.gguf.dequantize import PARTS, scale_of
from model.checkpoint.gguf.types import BY_NAME
from model.spec import CheckpointError


def repacks(kind: str, form: str) -> bool:
    """Whether `repack` knows the type called `kind` and the block format `form`."""
    return (kind, form) in REPACKED


def kept_in(kind: str) -> str:
    """The block format in which a quantized type is held where weights are held as in the file."""
    return "int4" if repacks(kind, "int4") else "int8"


def repack(kind: str, form: str, data: Tensor) -> Tensor:
    """uint8 [rows, bytes of a row] of the type called `kind` -> the same rows in the block format
    `form`. Raises CheckpointError for a scale or minimum that float16 cannot hold, or that is NaN
    or infinite.
    """
    blocks_NB = data.reshape(-1, BY_NAME[kind].block_bytes)
    return REPACKED[kind, form](kind, blocks_NB).view(len(data), -1)


def joined(heads: "tuple[Tensor, ...]", numbers_NB: Tensor) -> Tensor:
    """Blocks of these scales and minima, [N, 1] each, and packed numbers. Raises CheckpointError
    for a head that float16 cannot hold.
    """
    heads_NB = _held(heads)
    return torch.cat([heads_NB.view(torch.uint8), numbers_NB.view(torch.uint8)], dim=1)


def _held(heads: "tuple[Tensor, ...]") -> Tensor:
    """Scales and minima as float16. Raises CheckpointError for one that it cannot hold."""
    heads_NB = torch.cat(heads, dim=1).half()
    if not heads_NB.isfinite().all():
        raise CheckpointError(
            "has a block whose scale or minimum is NaN, infinity or beyond float16: the file is "
            "damaged, or expected engine.quantization none"
        )
    return heads_NB


def _as_it_is(kind: str, blocks_NB: Tensor) -> Tensor:
    _held(tuple(head for head in PARTS[kind](blocks_NB)[1:] if head is not None))
    return blocks_NB


def _int8(kind: str, blocks_NB: Tensor) -> Tensor:
    q_NB, scale_N1, _ = PARTS[kind](blocks_NB)
    return joined((scale_N1,), q_NB)


def _q4_0(_: str, blocks_NB: Tensor) -> Tensor:
    scale_N1 = scale_of(blocks_NB, 0)
    return joined((scale_N1, -8 * scale_N1), blocks_NB[:, 2:])


def _q4_k(kind: str, blocks_NB: Tensor) -> Tensor:
    q_NB, *heads = PARTS[kind](blocks_NB)
    low_NB, high_NB = q_NB.view(-1, 2, 16).unbind(1)
    heads_N1 = tuple(head.view(-1, 1) for head in heads if head is not None)
    return joined(heads_N1, low_NB | high_NB << 4)


REPACKED: dict[tuple[str, str], Callable[[str, Tensor], Tensor]] = {
    ("Q8_0", "int8"): _as_it_is,
    ("Q5_0", "int8"): _int8,
    ("Q4_0", "int8"): _int8,
    ("Q4_1", "int4"): _as_it_is,
    ("Q4_0", "int4"): _q4_0,
    ("Q4_K", "int4"): _q4_k,
}
"""By type and block format."""
