"""Matrices that compressed-tensors packed to 4 bits, as model.checkpoint.weights reads those of
safetensors files.

In the place of NAME there are NAME_packed, int32 [rows, columns / 8] with the numbers of eight
columns in a word, the first in its lowest bits; NAME_scale [rows, groups of columns]; NAME_shape
[2]; and NAME_zero_point, int32 [rows / 8, groups] with those of eight rows in a word, where numbers
are not symmetric. A weight is (number - zero point) * scale, both from 0 to 15, and the zero point
8 where none is stored. Invariant: `read` gives these products rounded once, to float32. It knows
nothing of decoders.

Shape letters: R rows, C columns, G groups of a row, N blocks of 32 columns.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.config import NAME, Config
from model.checkpoint.gguf.repack import joined
from model.checkpoint.names import Entry
from model.checkpoint.quantization_config import BLOCK, KEY, packed_groups
from model.checkpoint.reader import RawBlocks, Reader
from model.checkpoint.safetensors_file import DTYPES, SafetensorsTensor, check_finite, named
from model.spec import CheckpointError

PARTS = ("packed", "scale", "shape", "zero_point")
SCALES = ("F32", "F16", "BF16")
SYMMETRIC = 8
BLOCK_ELEMENTS = 2**17
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]


def with_compressed(folder: Path, tensors: Mapping[str, SafetensorsTensor]) -> Mapping[str, Reader]:
    """The tensors of a folder with one matrix in the place of what each was packed into. Raises
    CheckpointError.
    """
    rest: dict[str, Reader] = dict(tensors)
    groups: set[tuple[int, bool]] = set()
    for name in (
        name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")
    ):
        groups = groups or packed_groups(config := Config.read(folder / NAME))
        if not groups:
            raise config.wrong(KEY, f"an object that describes {name}_packed")
        if name in tensors:
            raise CheckpointError(
                f"{tensors[name].stored.path}: tensor {name} occurs beside {name}_packed; expected "
                "one of them"
            )
        parts = {
            part: tensors[f"{name}_{part}"] for part in PARTS if rest.pop(f"{name}_{part}", None)
        }
        rest[name] = CompressedMatrix(name, parts, groups)
    return rest


class CompressedMatrix:
    """The Reader of one packed matrix, whose tensors have been checked."""

    def __init__(
        self, name: str, parts: Mapping[str, SafetensorsTensor], groups: set[tuple[int, bool]]
    ) -> None:
        self.name, self._parts = name, parts
        self.paths = [part.stored.path for part in parts.values()]
        self._size = self._group_size(groups)
        num_bytes = sum(part.stored.num_bytes for part in parts.values())
        self.entry = Entry("F32", self._shape, num_bytes)
        self.stored = None  # It is in several tensors.

    def _group_size(self, groups: set[tuple[int, bool]]) -> int:
        """The number of columns of a group, which all shapes follow from."""
        entries = {name: part.entry for name, part in self._parts.items()}
        found = {name: [entry.dtype, *entry.shape] for name, entry in entries.items()}
        if found.pop("shape", None) != ["I64", 2]:
            raise CheckpointError(
                f"{self.paths[0]}: {self.name}_shape must be two numbers of dtype I64, of rows and "
                "columns, and is not"
            )
        rows, columns = self._shape = tuple(
            self._fill("shape", torch.empty(2, dtype=torch.int64), 0).tolist()
        )
        scales = [dtype for dtype in SCALES if dtype in found.get("scale", ())] or SCALES[:1]
        for size, symmetric in sorted(groups):
            expected = {
                "packed": ["I32", rows, columns // 8],
                "scale": [*scales, rows, columns // size],
            }
            expected |= {} if symmetric else {"zero_point": ["I32", -(-rows // 8), columns // size]}
            if min(rows, columns) > 0 and columns % size == 0 and found == expected:
                return size
        described = f"{self.name} of {rows} rows and {columns} columns has tensors {found}"
        raise CheckpointError(
            f"{self.paths[0]}: {described}, expected {expected} by {KEY} of {NAME}"
        )

    def _fill(self, part: str, into: Tensor, first_row: int) -> Tensor:
        self._parts[part].read(into, first_row * into[0].numel())
        return into

    def read(self, into: Tensor, first: int = 0) -> None:
        """Multiplies numbers and scales; see Reader."""
        into_RC = into.view(-1, self._shape[1])
        numbers_RC, scale_RG1, zero_RG1 = self._rows(first // self._shape[1], len(into_RC))
        into_RC.copy_(numbers_RC).unflatten(1, (-1, self._size)).sub_(zero_RG1).mul_(scale_RG1)
        with named(self.paths[0], self.name):
            check_finite(into)

    def raw_blocks(self) -> RawBlocks:
        """The rows in GGUF's blocks, with scales in float16; see Reader."""
        return "Q4_1" if "zero_point" in self._parts else "Q4_0", self._raw()

    def _raw(self) -> Iterator[Tensor]:
        num_rows, columns = self._shape
        step = max(1, BLOCK_ELEMENTS // columns)
        for first in range(0, num_rows, step):
            numbers_RC, *heads = self._rows(first, min(step, num_rows - first))
            low_N, high_N = numbers_RC.view(-1, 2, BLOCK // 2).unbind(1)
            scale_N1, zero_N1 = (
                head.repeat_interleave(self._size // BLOCK, dim=1).view(-1, 1) for head in heads
            )
            scale_N1 = scale_N1.half().float()
            with named(self.paths[0], self.name):
                blocks_NB = joined(
                    (scale_N1, -zero_N1 * scale_N1) if "zero_point" in self._parts else (scale_N1,),
                    low_N | high_N << 4,
                )
            yield blocks_NB.view(len(numbers_RC), -1)

    def _rows(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """(numbers_RC as uint8, scale_RG1, zero_RG1 in float32) of some rows."""
        groups = self._shape[1] // self._size
        packed_RC = self._fill(
            "packed", torch.empty(count, self._shape[1] // 8, dtype=torch.int32), first
        ).view(torch.uint8)
        numbers_RC = torch.stack([packed_RC & 15, packed_RC >> 4], dim=-1).flatten(1)
        scale_RG = self._fill(
            "scale",
            torch.empty(count, groups, dtype=DTYPES[self._parts["scale"].entry.dtype]),
            first,
        ).float()
        zero_RG = torch.full_like(scale_RG, SYMMETRIC)
        if "zero_point" in self._parts:
            begin, end = first // 8, -(-(first + count) // 8)
            words_RG = self._fill(
                "zero_point", torch.empty(end - begin, groups, dtype=torch.int32), begin
            )
            zero_RG = (
                (words_RG[:, None] >> _SHIFTS & 15)
                .flatten(0, 1)[first - 8 * begin :][:count]
                .float()
            )
        return numbers_RC, scale_RG[..., None], zero_RG[..., None]
