"""One GGUF file, version 2 or 3: its header is checked in full before any weights are read.

Invariant: a file that passes `GGUFFile.open` holds every byte that its header describes; its
tensors have distinct names and lie one after the other, each aligned, as llama.cpp requires too. At
most MAX_HEADER_BYTES of the file are read for that, in time and memory that they bound. It imports
no torch, and knows nothing of models and of the meaning of keys.
"""

import os
import re
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path

from model.checkpoint.config import short
from model.checkpoint.files import (
    MAX_TENSORS,
    Stored,
    TensorFile,
    first_bytes,
    open_without_waiting,
    other_kind,
)
from model.checkpoint.gguf.metadata import Cursor, Value, read_metadata
from model.checkpoint.gguf.types import BLOCK_TYPES, BY_NAME, OTHERS, BlockType
from model.spec import CheckpointError

SUFFIX = ".gguf"
MAX_LISTED = 20
"""The most names of files in a message."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**25
"""Twice the tokens and merges of the largest published vocabularies."""
MAX_DIMENSIONS = 4
ALIGNMENT, ALIGNMENTS = "general.alignment", [2**power for power in range(3, 17)]
MERGED = "parts; `llama-gguf-split --merge FIRST_PART NEW.gguf`, of llama.cpp, joins them"
_PART = re.compile(r".+-\d{5}-of-(\d{5})\.gguf")


def check_whole(path: Path) -> None:
    """Raises CheckpointError for a file that is one part of several by its name, which llama.cpp's
    gguf-split gives it: NAME-00001-of-00003.gguf.
    """
    match = _PART.fullmatch(path.name)
    if match and (count := int(match[1])) > 1:
        raise CheckpointError(f"{path}: is one of {count} {MERGED}")


def gguf_in(folder: Path) -> Path | None:
    """The one GGUF file in a folder, by the names or, where none is a GGUF file's, by the first
    bytes of files; None if the folder has none, or safetensors files, which come first. Raises
    CheckpointError if it has several.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    found = [folder / name for name in names if name.endswith(SUFFIX)]
    found = found or [folder / n for n in names if first_bytes(folder / n).startswith(MAGIC)]
    if len(found) > 1:
        check_whole(found[0])
        names = [path.name for path in found[:MAX_LISTED]]
        expected = f"expected one, or the name of the file: {', '.join(names)}"
        raise CheckpointError(f"{folder}: has {len(found)} GGUF files; {expected}")
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class GGUFFile(TensorFile):
    """A file whose header has been checked. `metadata`: keys to values (see metadata.Value), in the
    file's order. A float32 is the shortest decimal number that rounds to it.
    """

    metadata: dict[str, Value]

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Reads and checks the header. Raises CheckpointError naming the file and its fault."""
        check_whole(path)
        try:
            with open(path, "rb", opener=open_without_waiting) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise CheckpointError("not a regular file")
                cursor = Cursor(file.read(min(found.st_size, MAX_HEADER_BYTES)), found.st_size)
            return _file(path, cursor)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _file(path: Path, cursor: Cursor) -> GGUFFile:
    """The file whose header is at the cursor."""
    if cursor.data[:4] != MAGIC:
        begins = f"begins with {cursor.data[:4]!r}, expected {MAGIC!r}: not a GGUF file"
        found = other_kind(cursor.data)
        raise CheckpointError(f"is {found}" if found else begins)
    cursor.skip(4, "magic")
    if (version := cursor.number("I", "version")) not in VERSIONS:
        raise CheckpointError(f"GGUF version {version}; read are 2 and 3, little-endian")
    num_tensors, num_keys = (cursor.number("Q", "counts") for _ in range(2))
    if max(num_tensors, num_keys) > MAX_TENSORS:
        found = f"{num_tensors} tensors and {num_keys} metadata keys"
        raise CheckpointError(f"its header says it has {found}; read are {MAX_TENSORS} of each")
    metadata = read_metadata(cursor, num_keys)
    if (count := metadata.get("split.count", 0)) not in (0, 1):
        raise CheckpointError(f"is one of {short(count)} {MERGED}")
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment not in ALIGNMENTS:
        expected = f"expected a power of two from {ALIGNMENTS[0]} to {ALIGNMENTS[-1]}"
        raise CheckpointError(f"{ALIGNMENT} is {short(alignment)}, {expected}")
    described = [_description(cursor, number) for number in range(num_tensors)]
    end = data = _aligned(cursor.place, alignment)
    tensors: dict[str, Stored] = {}
    for name, kind, shape, offset in described:
        if name in tensors:
            raise CheckpointError(f"tensor {name} occurs twice")
        if data + offset != (begin := _aligned(end, alignment)):
            expected = f"expected {begin - data}, after the tensor before it"
            raise CheckpointError(f"tensor {name}: offset {offset}, {expected}")
        num_bytes = kind.num_bytes(prod(shape))
        tensors[name] = Stored(kind.name, shape, num_bytes, begin, path, name)
        end = begin + num_bytes
    if tensors and not end <= cursor.size <= _aligned(end, alignment):
        sizes = f"ends at byte {cursor.size}, its tensors at {end}"
        raise CheckpointError(f"{sizes}: truncated or damaged")
    return GGUFFile(path, tensors, data, metadata)


def _description(cursor: Cursor, number: int) -> tuple[str, BlockType, tuple[int, ...], int]:
    """(name, type, shape, offset in the data) of a tensor."""
    name = cursor.name(f"tensor {number}")
    dimensions = cursor.number("I", name)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        expected = f"expected 1 to {MAX_DIMENSIONS}"
        raise CheckpointError(f"tensor {name}: {dimensions} dimensions, {expected}")
    shape = tuple(cursor.number("Q", name) for _ in range(dimensions))[::-1]
    number, offset = cursor.number("I", name), cursor.number("Q", name)
    if (kind := BLOCK_TYPES.get(number)) is None:
        found = OTHERS.get(str(number), f"number {number}")
        raise CheckpointError(f"tensor {name} has type {found}; read are {', '.join(BY_NAME)}")
    if min(shape) < 1 or shape[-1] % kind.block_elements:
        expected = f"expected rows of one or more blocks of {kind.block_elements}"
        raise CheckpointError(f"tensor {name}: shape {list(shape)}, {expected}")
    return name, kind, shape, offset


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
