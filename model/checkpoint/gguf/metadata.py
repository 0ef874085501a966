"""The values in a GGUF header, read from bytes in memory.

Invariant: what is read lies within the bytes there are, and a length in the file is compared with
the bytes left before it is believed, so that time and memory are bounded by the size of the header.
It knows neither what the keys mean nor torch.
"""

import struct
from array import array
from typing import Any, TypeAlias

from model.checkpoint.config import short
from model.spec import CheckpointError

MAX_NAME_BYTES = 255
MAX_STRINGS = 2**20
"""In the arrays of a file; a vocabulary of 262,144 tokens has half a million merges."""
STRING, ARRAY = 8, 9
FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Numbers by type, for `struct` (little-endian) and, but for booleans, `array`."""

Value: TypeAlias = "bool | int | float | str | list[str] | array[Any]"
"""A metadata value. Arrays of strings are lists; arrays of numbers are `array.array`s, of booleans
too (0 for false).
"""


class Cursor:
    """A position in the first bytes of a file of `size` bytes. Every method raises CheckpointError
    where those end.
    """

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.place, self.num_strings = data, size, 0, 0

    def skip(self, count: int, what: str) -> int:
        """Moves on by `count` bytes; returns where they begin."""
        begin = self.place
        if count > len(self.data) - begin:
            if len(self.data) < self.size and count <= self.size - begin:
                most = f"{len(self.data)} bytes, the most that are read of it"
                raise CheckpointError(f"{what}: its header goes on after {most}")
            found = f"{count} bytes from byte {begin} on, the file has {self.size}"
            raise CheckpointError(f"{what}: {found}: truncated or damaged")
        self.place = begin + count
        return begin

    def number(self, kind: str, what: str) -> Any:
        """A number in the format of `struct`."""
        layout = struct.Struct("<" + kind)
        return layout.unpack_from(self.data, self.skip(layout.size, what))[0]

    def text(self, what: str) -> str:
        """A string: its length in 8 bytes, then UTF-8."""
        begin = self.place + 8
        end = begin + int.from_bytes(self.data[self.place : begin], "little")
        self.skip(end - self.place, what)
        try:
            return self.data[begin:end].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{what}: a string that is not UTF-8") from None

    def name(self, what: str) -> str:
        """A string of 1 to MAX_NAME_BYTES bytes, all printable."""
        found = self.text(what)
        if not 0 < len(found.encode()) <= MAX_NAME_BYTES or not found.isprintable():
            expected = f"is not a name of 1 to {MAX_NAME_BYTES} printable bytes"
            raise CheckpointError(f"{what}: {short(found)} {expected}")
        return found


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """The next `count` pairs of a key and its value. Raises CheckpointError, also for a key that
    occurs twice.
    """
    metadata: dict[str, Value] = {}
    for number in range(count):
        key = cursor.name(f"metadata key {number}")
        if key in metadata:
            raise CheckpointError(f"metadata key {key} occurs twice")
        metadata[key] = _value(cursor, cursor.number("I", key), key)
    return metadata


def _value(cursor: Cursor, kind: int, key: str) -> Value:
    if kind == STRING:
        return cursor.text(key)
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in FORMATS:
        raise CheckpointError(f"{key}: value type {kind} is not known")
    found: bool | int | float = cursor.number(FORMATS[kind], key)
    return _shortest(found) if FORMATS[kind] == "f" else found


def _array(cursor: Cursor, key: str) -> "list[str] | array[Any]":
    kind, count = cursor.number("I", key), cursor.number("Q", key)
    if kind == STRING:
        cursor.num_strings += count
        if cursor.num_strings > MAX_STRINGS:
            most = f"the {MAX_STRINGS} strings that are read of a file"
            raise CheckpointError(f"{key}: with the arrays before it, it has more than {most}")
        return [cursor.text(key) for _ in range(count)]
    if kind not in FORMATS:
        read = "arrays of strings and numbers are read"
        raise CheckpointError(f"{key}: an array of value type {kind}; {read}")
    values = array(FORMATS[kind].replace("?", "B"))
    begin = cursor.skip(values.itemsize * count, f"{key}, an array of {count} numbers")
    values.frombytes(memoryview(cursor.data)[begin : cursor.place])
    return values


def _shortest(value: float) -> float:
    """The number with the fewest digits that is this float32: 1e-06 instead of
    9.999999974752427e-07, as configs have it.
    """
    digits = (float(f"{value:.{count}g}") for count in range(1, 9))
    return next((found for found in digits if array("f", [found])[0] == value), value)
