"""The values in a GGUF header: read from bytes in memory, each bound checked before anything is allocated for it.

Invariant: what is read lies within the bytes there are, and a count in the file is compared with the bytes left before it is believed, so
that time and memory are bounded by the size of the header. It knows neither what the keys mean nor torch.
"""

import struct
from array import array
from typing import Any, TypeAlias

from model.checkpoint.config import short
from model.spec import CheckpointError

MAX_KEY_BYTES = 255
MAX_STRINGS = 2**20
"""In the arrays of a file; a vocabulary of 262,144 tokens has half a million merges."""
BOOL, STRING, ARRAY = 7, 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Numbers by type, for `struct` (little-endian) and `array`."""

Value: TypeAlias = "bool | int | float | str | list[str] | array[Any]"
"""A metadata value. Arrays of strings are lists; arrays of numbers are `array.array`s, of booleans too (0 or 1)."""


class Cursor:
    """A place in the first bytes of a file of `size` bytes. Every method raises CheckpointError where those end."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.place, self.num_strings = data, size, 0, 0

    def skip(self, count: int, what: str) -> int:
        """Moves on by `count` bytes; returns where they begin."""
        begin = self.place
        if count > len(self.data) - begin:
            if len(self.data) < self.size and count <= self.size - begin:
                raise CheckpointError(f"{what}: its header goes on after {len(self.data)} bytes, the most that are read of it")
            raise CheckpointError(f"{what}: {count} bytes from byte {begin} on, the file has {self.size}: truncated or damaged")
        self.place = begin + count
        return begin

    def number(self, kind: str, what: str) -> Any:
        """A number in the format of `struct`."""
        layout = struct.Struct("<" + kind)
        return layout.unpack_from(self.data, self.skip(layout.size, what))[0]

    def text(self, what: str) -> str:
        """A string: its length in 8 bytes, then UTF-8."""
        begin = self.skip(self.number("Q", what), what)
        try:
            return str(self.data[begin : self.place], "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{what}: a string that is not UTF-8") from None

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings: `text` in a loop, for the hundreds of thousands of a vocabulary."""
        self.place = self.skip(8 * count, f"{what}, an array of {count} strings")  # Each has a length at least.
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            raise CheckpointError(f"{what}: with the arrays before it, it has more than the {MAX_STRINGS} strings that are read of a file")
        data, place, length_at, found = self.data, self.place, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                (length,) = length_at(data, place)
                end = place + 8 + length
                if end > len(data):
                    break
                found.append(data[place + 8 : end].decode())
                place = end
        except (struct.error, UnicodeDecodeError):
            pass
        self.place = place
        if len(found) < count:
            self.text(f"{what}, string {len(found)}")  # Raises the error that says what is wrong with it.
        return found

    def name(self, what: str, most: int) -> str:
        """A string of 1 to `most` bytes, all printable."""
        begin = self.place
        found = self.text(what)
        if not 0 < self.place - begin - 8 <= most or not found.isprintable():
            raise CheckpointError(f"{what}: {short(found)} is not a name of 1 to {most} printable bytes")
        return found


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """The next `count` pairs of a key and its value. Raises CheckpointError, also for a key that occurs twice."""
    metadata: dict[str, Value] = {}
    for number in range(count):
        key = cursor.name(f"metadata key {number}", MAX_KEY_BYTES)
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
    found: int | float = cursor.number(FORMATS[kind], key)
    if kind == BOOL:
        return bool(_bools(array("B", [int(found)]), key)[0])
    return _shortest(found) if FORMATS[kind] == "f" else found


def _array(cursor: Cursor, key: str) -> "list[str] | array[Any]":
    kind, count = cursor.number("I", key), cursor.number("Q", key)
    if kind == STRING:
        return cursor.texts(count, key)
    if kind not in FORMATS:
        raise CheckpointError(f"{key}: an array of value type {kind}; arrays of strings and numbers are read")
    values = array(FORMATS[kind])
    begin = cursor.skip(values.itemsize * count, f"{key}, an array of {count} numbers")
    values.frombytes(memoryview(cursor.data)[begin : cursor.place])
    return _bools(values, key) if kind == BOOL else values


def _bools(values: "array[Any]", key: str) -> "array[Any]":
    if values and max(values) > 1:
        raise CheckpointError(f"{key}: a boolean of value {max(values)}, expected 0 or 1")
    return values


def _shortest(value: float) -> float:
    """The number with the fewest digits that is this float32: 1e-06 instead of 9.999999974752427e-07, as configs have it."""
    digits = (float(f"{value:.{count}g}") for count in range(1, 9))
    return next((found for found in digits if abs(found) < 3e38 and struct.pack("<f", found) == struct.pack("<f", value)), value)
