"""GGUF files for tests: written by the `gguf` package as llama.cpp's converter writes them, or byte
by byte.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from model.checkpoint.gguf.metadata import ARRAY, FORMATS, STRING

TYPE_OF = {bool: 7, int: 4, float: 6, str: STRING}


def text(value: bytes | str) -> bytes:
    """A string as it lies in a header."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(found: Any, kind: int | None = None) -> bytes:
    """A metadata value with its type before it; of lists the items' type is that of the first."""
    if isinstance(found, list):
        inner = TYPE_OF[type(found[0])] if found else 4
        return struct.pack("<IIQ", ARRAY, inner, len(found)) + b"".join(
            value(item, inner)[4:] for item in found
        )
    kind = TYPE_OF[type(found)] if kind is None else kind
    return struct.pack("<I", kind) + (
        text(found) if kind == STRING else struct.pack("<" + FORMATS[kind], found)
    )


def pair(key: str | bytes, found: Any, kind: int | None = None) -> bytes:
    return text(key) + value(found, kind)


def tensor(name: str | bytes, shape: Iterable[int], kind: int, offset: int) -> bytes:
    """The description of a tensor; `shape` as the file has it, innermost axis first."""
    shape = list(shape)
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw_file(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, **says: int
) -> bytes:
    """A file of these parts with the data at the default alignment. `says_*`: what the header says
    instead of the true counts.
    """
    counts = says.get("says_tensors", len(tensors)), says.get("says_keys", len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def write_file(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Writes a file with the `gguf` package. Tensors are float32 or float16."""
    found = GGUFWriter(path, architecture)
    adders: Any = {
        bool: found.add_bool,
        int: found.add_uint32,
        float: found.add_float32,
        str: found.add_string,
        list: found.add_array,
    }
    for key, item in metadata.items():
        adders[type(item)](key, item)
    for name, array in tensors.items():
        found.add_tensor(name, array)
    found.write_header_to_file()
    found.write_kv_data_to_file()
    found.write_tensors_to_file()
    found.close()
