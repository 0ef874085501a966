"""The weights of a GGUF checkpoint under Hugging Face's names.

Invariant: what `read` gives equals, bit for bit, the float32 that the `gguf` package dequantizes,
with the converter's changes undone; of the file, memory holds at most BLOCK_ELEMENTS numbers'
blocks at a time. It knows nothing of decoders.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.config import NAME, Config
from model.checkpoint.gguf.dequantize import QUANTIZED, dequantize
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.names import Source, sources
from model.checkpoint.gguf.types import BY_NAME
from model.checkpoint.reader import RawBlocks, Reader
from model.checkpoint.safetensors_file import DTYPES, bytes_of, check_finite, named

BLOCK_ELEMENTS = 2**20


def gguf_tensors(path: Path, folder: Path) -> dict[str, Reader]:
    """The tensors of a GGUF checkpoint under Hugging Face's names; its folder has the config.json
    that was made of it.
    """
    gguf = GGUFFile.open(path)
    found = sources(gguf, Config.read(folder / NAME))
    return {name: GGUFTensor(source) for name, source in found.items()}


class GGUFTensor:
    """The Reader of a tensor in a GGUF file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.entry = self.stored = source.stored
        self.paths = [source.stored.path]
        if source.stored.dtype in QUANTIZED or source.addend:
            self.entry = replace(source.stored, dtype="F32")

    def read(self, into: Tensor, first: int = 0) -> None:
        """Dequantizes rows; see Reader."""
        source, stored, done = self._source, self.stored, 0
        columns = stored.shape[-1] if len(stored.shape) > 1 else 1
        into_RC = into.view(-1, columns)
        for data_RB in _rows(source, columns, first // columns, len(into_RC)):
            out_RC = into_RC[done : done + len(data_RB)]
            done += len(data_RB)
            with named(stored.path, stored.name):
                if stored.dtype in QUANTIZED:
                    dequantize(stored.dtype, data_RB, out_RC)
                else:
                    out_RC.copy_(data_RB.view(DTYPES[stored.dtype]))
                check_finite(out_RC)
        if source.addend:
            into_RC.add_(source.addend)

    def raw_blocks(self) -> RawBlocks | None:
        """The blocks in the file; see Reader."""
        kind, shape = self.stored.dtype, self.stored.shape
        rows = _rows(self._source, shape[-1], 0, prod(shape[:-1]))
        return (kind, rows) if kind in QUANTIZED else None


def _rows(source: Source, columns: int, first: int, count: int) -> Iterator[Tensor]:
    """`count` rows from number `first` on as they lie in the file, uint8 [rows, bytes of a row] in
    blocks of rows, but with the rows of each head in the checkpoint's order.
    """
    size, end = source.head_rows, first + count
    row_bytes = BY_NAME[source.stored.dtype].num_bytes(columns)
    step = max(1, BLOCK_ELEMENTS // columns // size) * size
    for begin in range(first - first % size, end, step):
        num_rows = min(step, -(-(end - begin) // size) * size)
        data_RB = torch.empty(num_rows, row_bytes, dtype=torch.uint8)
        source.stored.read(bytes_of(data_RB), begin * row_bytes)
        if size > 1:  # The even rows of each head, then the odd ones.
            heads_Hk2B = data_RB.view(-1, size // 2, 2, row_bytes)
            data_RB = heads_Hk2B.transpose(1, 2).reshape(num_rows, row_bytes)
        yield data_RB[max(0, first - begin) : end - begin]
