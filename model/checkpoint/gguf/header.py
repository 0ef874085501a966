"""One GGUF file, version 2 or 3: its header is checked in full before any weights are read.

Invariant: a file that passes `GGUFFile.open` holds every byte that its header describes; its tensors have distinct names and lie one after
the other, each aligned, as llama.cpp requires too. At most MAX_HEADER_BYTES of the file are read for that, in time and memory that they
bound. It imports no torch, and knows nothing of models and of the meaning of keys.
"""

import os
import stat
from array import array
from dataclasses import dataclass
from math import prod
from pathlib import Path

from model.checkpoint.config import short
from model.checkpoint.files import open_without_waiting, other_kind, read_exactly
from model.checkpoint.gguf.metadata import Cursor, Value, read_metadata
from model.checkpoint.gguf.types import BLOCK_TYPES, BY_NAME, OTHERS
from model.checkpoint.names import Entry
from model.spec import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**25
"""Twice the tokens and merges of the largest published vocabularies."""
MAX_TENSORS = 2**17
MAX_KEYS = 2**16
MAX_NAME_BYTES = 127
MAX_DIMENSIONS = 4
ALIGNMENT, MAX_ALIGNMENT = "general.alignment", 2**16
LEAST_KEY_BYTES, LEAST_TENSOR_BYTES = 14, 33
"""The fewest bytes that a pair of the metadata and the description of a tensor can have."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file whose header has been checked.

    `metadata`: keys to values (see metadata.Value), in the file's order. A float32 is the shortest decimal number that rounds to it.
    `entries`: tensors by their name in the file; `dtype` is the name of its type (types.BY_NAME), `shape` has the outermost axis first, as
    in torch (the file has it last), `begin` is its first byte in the file. `header_bytes`: where the data begin.
    """

    path: Path
    metadata: dict[str, Value]
    entries: dict[str, Entry]
    header_bytes: int

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Reads and checks the header. Raises CheckpointError naming the file and what is wrong with it."""
        try:
            with open(path, "rb", opener=open_without_waiting) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise CheckpointError("not a regular file")
                cursor = Cursor(file.read(min(found.st_size, MAX_HEADER_BYTES)), found.st_size)
            return cls(path, *_header(cursor))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def read_bytes(self, name: str, into: memoryview, first: int = 0) -> None:
        """Fills a buffer with a tensor's bytes from number `first` on. Raises CheckpointError."""
        read_exactly(self.path, self.entries[name].begin + first, into, name)

    def floats(self, name: str) -> list[float]:
        """The numbers of a short tensor of type F32. Raises CheckpointError for another."""
        entry = self.entries[name]
        if entry.dtype != "F32" or len(entry.shape) != 1:
            raise CheckpointError(f"{self.path}: {name} is {entry.dtype} of shape {list(entry.shape)}, expected F32 on one axis")
        values = array("f", bytes(entry.num_bytes))
        self.read_bytes(name, memoryview(values).cast("B"))
        return values.tolist()


def _header(cursor: Cursor) -> tuple[dict[str, Value], dict[str, Entry], int]:
    """(metadata, tensors with their place in the file, where the data begin)."""
    if cursor.data[:4] != MAGIC:
        found = other_kind(cursor.data)
        raise CheckpointError(f"is {found}" if found else f"begins with {cursor.data[:4]!r}, expected {MAGIC!r}: not a GGUF file")
    cursor.skip(4, "magic")
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        big = "; it is big-endian" if version.to_bytes(4, "big")[0] in VERSIONS and version > 0xFFFF else ""
        raise CheckpointError(f"GGUF version {version}{big}; read are versions 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("Q", "number of tensors"), cursor.number("Q", "number of metadata keys")
    for count, most, least, what in (
        (num_keys, MAX_KEYS, LEAST_KEY_BYTES, "metadata keys"),
        (num_tensors, MAX_TENSORS, LEAST_TENSOR_BYTES, "tensors"),
    ):
        if count > min(most, cursor.size // least):
            raise CheckpointError(f"its header says it has {count} {what}; read are at most {most}, and {least} bytes for each")
    metadata = read_metadata(cursor, num_keys)
    described = _described(cursor, num_tensors)
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{ALIGNMENT} is {short(alignment)}, expected a power of two from 8 to {MAX_ALIGNMENT}")
    data = _aligned(cursor.place, alignment)
    return metadata, _placed(described, data, alignment, cursor.size), data


def _described(cursor: Cursor, count: int) -> dict[str, Entry]:
    """The next `count` descriptions of tensors, with `begin` as the file has it."""
    entries: dict[str, Entry] = {}
    for number in range(count):
        name = cursor.name(f"tensor {number}", MAX_NAME_BYTES)
        if name in entries:
            raise CheckpointError(f"tensor {name} occurs twice")
        dimensions = cursor.number("I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(f"tensor {name}: {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(cursor.number("Q", name) for _ in range(dimensions))[::-1]
        number, offset = cursor.number("I", name), cursor.number("Q", name)
        if (kind := BLOCK_TYPES.get(number)) is None:
            found = OTHERS.get(number, f"number {number}")
            raise CheckpointError(f"tensor {name} has type {found}; read are {', '.join(BY_NAME)}")
        if min(shape) < 1 or shape[-1] % kind.block_elements:
            raise CheckpointError(f"tensor {name}: shape {list(shape)}, expected rows of one or more blocks of {kind.block_elements}")
        entries[name] = Entry(kind.name, shape, offset, kind.num_bytes(prod(shape)))
    return entries


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _placed(entries: dict[str, Entry], data: int, alignment: int, size: int) -> dict[str, Entry]:
    """Entries with their place in the file. Raises CheckpointError for a tensor that does not begin where the one before it ends."""
    end = expected = data
    placed = {}
    for name, entry in entries.items():
        if data + entry.begin != expected:
            how = "not aligned" if entry.begin % alignment else "an overlap" if data + entry.begin < expected else "a gap"
            raise CheckpointError(f"tensor {name}: offset {entry.begin}, expected {expected - data} (alignment {alignment}): {how}")
        end = expected + entry.num_bytes
        if end > size:
            raise CheckpointError(f"tensor {name}: ends at byte {end}, the file has {size}: truncated")
        placed[name] = Entry(entry.dtype, entry.shape, expected, entry.num_bytes)
        expected = _aligned(end, alignment)
    if size > expected and placed:
        raise CheckpointError(f"file is {size - expected} B longer than its header says")
    return placed
