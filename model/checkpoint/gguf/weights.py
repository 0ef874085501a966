"""The weights of a GGUF checkpoint under Hugging Face's names, as model.checkpoint.weights reads those of safetensors files.

Invariant: what `read` gives equals, bit for bit, the float32 that the `gguf` package dequantizes, with the converter's changes undone; of
the file, memory holds at most BLOCK_ELEMENTS numbers' blocks at a time. It knows nothing of decoders.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.dequantize import QUANTIZED, check_scales, dequantize
from model.checkpoint.gguf.names import Source, sources
from model.checkpoint.gguf.split import GGUF
from model.checkpoint.gguf.types import BY_NAME
from model.checkpoint.names import Entry
from model.checkpoint.safetensors_file import DTYPES, bytes_of, check_finite, named

BLOCK_ELEMENTS = 2**20


class GGUFWeights:
    """`entries`: tensors by Hugging Face's names, with the dtype that `read` gives: F32 for quantized types."""

    def __init__(self, path: Path) -> None:
        self.gguf = GGUF.open(path)
        self.path = self.gguf.path
        self.paths = [file.path for file in self.gguf.files]
        self.header_bytes = sum(file.header_bytes for file in self.gguf.files)
        self._sources = sources(self.gguf, config_of(self.gguf).get("head_dim", 0))
        self.entries = {name: self._entry(source) for name, source in self._sources.items()}

    def _stored(self, tensor: str) -> Entry:
        return self.gguf.tensors[tensor].entries[tensor]

    def _entry(self, source: Source) -> Entry:
        stored = self._stored(source.tensor)
        kind = BY_NAME[stored.dtype]
        dtype = "F32" if kind.name in QUANTIZED or source.addend or source.values else kind.name
        if source.values:
            return Entry(dtype, source.shape, stored.begin, stored.num_bytes + self._stored(source.values).num_bytes)
        return Entry(dtype, source.shape, stored.begin, kind.num_bytes(prod(source.shape)))

    def read(self, name: str, into: Tensor, first: int = 0) -> None:
        """Fills `into`, a contiguous CPU tensor of the entry's dtype, with elements from number `first` on, the first of a row. Raises
        CheckpointError, also for NaN and infinity.
        """
        source = self._sources[name]
        columns = source.shape[-1] if len(source.shape) > 1 else 1
        into_RC, first_row = into.view(-1, columns), first // columns
        if source.values:
            self._read_rejoined(source, into_RC, first_row)
        elif source.pair_rows:
            self._read_pairs(source, into_RC, first_row)
        else:
            self._read_rows(source.tensor, source.first_row + first_row, into_RC)
        if source.addend:
            into_RC.add_(source.addend)

    def raw_blocks(self, name: str) -> tuple[str, Iterator[Tensor]] | None:
        """The rows of a tensor as the file's quantization blocks, without dequantizing them: (type, uint8 [rows, bytes of a row] in blocks
        of rows, each overwritten by the next), for kernels that have blocks of their own. The type is one of dequantize.QUANTIZED, its
        layout that of the functions there. None if the tensor is not stored so: other types, or rows that were transposed. Rows are in the
        order of `read`. Raises CheckpointError, while iterating too, also for scales that are NaN or infinite.
        """
        source = self._sources[name]
        kind = self._stored(source.tensor).dtype
        if kind not in QUANTIZED or source.values or source.addend:
            return None
        return kind, self._raw(source)

    def _raw(self, source: Source) -> Iterator[Tensor]:
        num_rows, columns = prod(source.shape[:-1]), source.shape[-1]
        group = source.pair_rows or 1
        rows = max(1, BLOCK_ELEMENTS // columns // group) * group
        for first in range(0, num_rows, rows):
            data_RB = self._bytes(source.tensor, source.first_row + first, min(rows, num_rows - first), columns)
            with named(self.gguf.tensors[source.tensor].path, source.tensor):
                check_scales(self._stored(source.tensor).dtype, data_RB)
            yield _halved(data_RB, group) if source.pair_rows else data_RB

    def _bytes(self, tensor: str, first_row: int, num_rows: int, columns: int) -> Tensor:
        """Rows as they lie in the file: uint8 [rows, bytes of a row]."""
        row_bytes = BY_NAME[self._stored(tensor).dtype].num_bytes(columns)
        data_RB = torch.empty(num_rows, row_bytes, dtype=torch.uint8)
        self.gguf.tensors[tensor].read_bytes(tensor, bytes_of(data_RB), first_row * row_bytes)
        return data_RB

    def _read_rows(self, tensor: str, first_row: int, into_RC: Tensor) -> None:
        """Rows in the file's order, as float32 or in their own dtype, which `into_RC` has."""
        kind, columns = self._stored(tensor).dtype, into_RC.shape[1]
        step = max(1, BLOCK_ELEMENTS // columns)
        for first in range(0, len(into_RC), step):
            out_RC = into_RC[first : first + step]
            data_RB = self._bytes(tensor, first_row + first, len(out_RC), columns)
            with named(self.gguf.tensors[tensor].path, tensor):
                if kind in QUANTIZED:
                    dequantize(kind, data_RB, out_RC)
                else:
                    check_finite(out_RC.copy_(data_RB.view(DTYPES[kind])))

    def _read_pairs(self, source: Source, into_RC: Tensor, first_row: int) -> None:
        """Rows of heads whose rotated pairs are put into two halves."""
        size = source.pair_rows
        begin, end = first_row // size * size, -(-(first_row + len(into_RC)) // size) * size
        whole_RC = torch.empty(end - begin, into_RC.shape[1], dtype=into_RC.dtype)
        self._read_rows(source.tensor, begin, whole_RC)
        into_RC.copy_(_halved(whole_RC, size)[first_row - begin : first_row - begin + len(into_RC)])

    def _read_rejoined(self, source: Source, into_RC: Tensor, first_row: int) -> None:
        """Rows of heads, each of which has its keys' rows, stored transposed, and then its values'."""
        (_, rank, key_dim), (_, value_dim, _) = self._stored(source.tensor).shape, self._stored(source.values).shape
        size, end = key_dim + value_dim, first_row + len(into_RC)
        keys_CK, head_RC = torch.empty(rank, key_dim), torch.empty(size, rank)
        for head in range(first_row // size, -(-end // size)):
            self._read_rows(source.tensor, head * rank, keys_CK)
            head_RC[:key_dim] = keys_CK.T
            self._read_rows(source.values, head * value_dim, head_RC[key_dim:])
            low, high = max(first_row, head * size), min(end, (head + 1) * size)
            into_RC[low - first_row : high - first_row] = head_RC[low - head * size : high - head * size]


def _halved(rows_RC: Tensor, size: int) -> Tensor:
    """Rows in groups of `size`: the even ones of each group first, then the odd ones."""
    halved_RC: Tensor = rows_RC.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halved_RC
