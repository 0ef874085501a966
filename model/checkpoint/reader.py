"""The protocol of what reads a checkpoint's tensor: one of a safetensors file or of a GGUF
checkpoint, or a matrix that compressed-tensors packed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from model.checkpoint.files import Stored
from model.checkpoint.names import Entry

RawBlocks: TypeAlias = tuple[str, Iterator[Tensor]]
"""Rows in GGUF's quantization blocks: (type, uint8 [rows, bytes of a row] in blocks of rows, each
overwritten by the next). The type is one of gguf.dequantize.QUANTIZED, its layout that of the
functions there.
"""


class Reader(Protocol):
    """Reads one tensor, from files whose headers have been checked."""

    @property
    def paths(self) -> Sequence[Path]:
        """Every file that is read; messages name the first."""

    @property
    def entry(self) -> Entry:
        """The tensor, with the dtype that `read` gives: F32 for quantized types."""

    @property
    def stored(self) -> Stored | None:
        """Where the tensor lies as it is in one file, in its own dtype or quantized type; None if
        it does not.
        """

    def read(self, into: Tensor, first: int = 0) -> None:
        """Fills `into`, a contiguous CPU tensor of the entry's dtype, with elements from number
        `first` on, the first of a row. Raises CheckpointError, also for NaN and infinity.
        """

    def raw_blocks(self) -> RawBlocks | None:
        """All rows in the order of `read`, not dequantized, for kernels that have blocks of their
        own; None if they are not stored so. Scales are as the file has them, NaN and infinity too.
        Raises CheckpointError, while iterating too.
        """
