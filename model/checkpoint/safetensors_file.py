"""One safetensors file: its header is checked in full before any weights are read, its tensors are
read directly into place.

The format forbids duplicate names and gaps, and loaders disagree about files that have them; here
such a file is refused. Invariant: a file that passes `SafetensorsFile.open` holds every byte that
its header describes. It knows nothing of models.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import torch
from torch import Tensor

from model.checkpoint.files import SAFETENSORS, Stored, first_bytes, other_kind, read_exactly
from model.checkpoint.names import Entry
from model.spec import CheckpointError

MAX_HEADER_BYTES = 2**24
"""The format allows 100 MB, which would take half a minute and 1.5 GB to check."""
MAX_TENSORS = 2**17
"""Of a checkpoint; the largest published ones have some 90,000."""
MAX_DIMENSIONS = 8
LENGTH = struct.Struct("<Q")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights can have."""
_SIZES = {
    1: "BOOL U8 I8 F8_E5M2 F8_E4M3",
    2: "I16 U16 F16 BF16",
    4: "I32 U32 F32",
    8: "F64 I64 U64",
}
ITEM_BYTES = {name: size for size, names in _SIZES.items() for name in names.split()}


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor's entry in the header."""

    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Count, Count]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise CheckpointError(f"{name[:80]!r} occurs twice in the header")
        values[name] = value
    return values


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The Reader of one file. `header_bytes`: where the data of its tensors begin."""

    path: Path
    entries: dict[str, Entry]
    header_bytes: int

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        """Reads and checks the header. Raises CheckpointError naming the file and what is wrong
        with it.
        """
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                entries = _entries(file.read(LENGTH.size), file, size)
                return cls(path, entries, file.tell())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except CheckpointError as error:
            found = other_kind(first_bytes(path))
            raise CheckpointError(
                f"{path}: {error if found in (None, SAFETENSORS) else f'is {found}'}"
            ) from None

    @property
    def paths(self) -> list[Path]:
        """The files of which this is one."""
        return [self.path]

    def read(self, name: str, into: Tensor, first: int = 0) -> None:
        """Reads elements into place; see Reader."""
        read_exactly(
            self.path, self.entries[name].begin + first * into.itemsize, bytes_of(into), name
        )
        with named(self.path, name):
            check_finite(into)

    def stored(self, name: str) -> Stored:
        """Its place in this file; see Reader."""
        entry = self.entries[name]
        return Stored(entry.dtype, entry.shape, entry.begin, entry.num_bytes, self.path, name)

    def raw_blocks(self, name: str) -> None:
        """None: nothing is stored in GGUF's blocks."""


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Puts the names of the file and the tensor before an error about its values."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {name} {error}") from None


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))


def check_finite(tensor: Tensor) -> None:
    """Raises CheckpointError for NaN and infinity."""
    # aminmax makes no copy, and returns NaN for both if there is one.
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise CheckpointError("holds NaN or infinity; the file is damaged")


def _entries(prefix: bytes, file: Any, size: int) -> dict[str, Entry]:
    if len(prefix) < LENGTH.size:
        raise CheckpointError(
            f"{size} bytes long; a safetensors file begins with 8 bytes for the length of its "
            "header"
        )
    (length,) = LENGTH.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its header says it is {length} bytes long; at most {MAX_HEADER_BYTES} are read. Is "
            "this a safetensors file?"
        )
    if LENGTH.size + length > size:
        raise CheckpointError(
            f"its header is {length} bytes long, the file {size}: truncated, or not a safetensors "
            "file"
        )
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise CheckpointError(
            "its header is not JSON; the file is damaged, or not a safetensors file"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"its header must be a JSON object, found {type(header).__name__}")
    if len(header) > MAX_TENSORS:
        raise CheckpointError(
            f"its header describes {len(header)} tensors; at most {MAX_TENSORS} are read"
        )
    header.pop("__metadata__", None)
    return _placed(
        {name: _entry(name, value) for name, value in header.items()}, LENGTH.size + length, size
    )


def _entry(name: str, value: Any) -> Entry:
    try:
        found = msgspec.convert(value, Described)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"tensor {name}: {error}") from None
    if found.dtype not in ITEM_BYTES:
        raise CheckpointError(f"tensor {name}: dtype {found.dtype!r} is not known")
    begin, end = found.data_offsets
    wanted = prod(found.shape) * ITEM_BYTES[found.dtype]
    if wanted != end - begin:
        raise CheckpointError(
            f"tensor {name}: {found.dtype} of shape {found.shape} takes {wanted} bytes, its "
            f"offsets {end - begin}"
        )
    return Entry(found.dtype, tuple(found.shape), begin, wanted)


def _placed(entries: dict[str, Entry], data: int, size: int) -> dict[str, Entry]:
    """Entries with their place in the file. Raises CheckpointError if there are gaps or
    overlaps.
    """
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if data + entry.begin != end:
            raise CheckpointError(f"tensor {name}: at byte {data + entry.begin}, expected {end}")
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(f"ends at byte {size}, its tensors at {end}: truncated or damaged")
    return {
        name: Entry(e.dtype, e.shape, data + e.begin, e.num_bytes) for name, e in entries.items()
    }
