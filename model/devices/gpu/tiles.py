"""How a product is cut: a table by its output columns and the size of a number. No torch, no Triton.

Invariant: the number of rows has no say. Another tile is another instruction of the tensor cores, or another order of sums over the
inputs, and a row computed alone would differ from the same row in company. So a single token pays for a whole tile's rows in arithmetic;
what it waits for is the weights, which are read once either way.

Shared memory holds `stages` blocks of rows and of weights, two of weights where a product is gated: within 163 KiB on sm_80, 227 on sm_90
and sm_100 (tests/triton/test_compile.py asks the compiler).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to cut the work."""

    rows: int
    columns: int
    """Of the output. Narrow products have narrow tiles, so that they make enough programs for a GPU."""
    depth: int
    """Inputs that are multiplied at once."""
    warps: int
    stages: int


# (most output columns, bytes of a number of x) -> the first line that fits is taken. Float8 weights are converted to x's type.
TABLE = (
    (4096, 2, Tile(64, 32, 128, 4, 4)),
    (32768, 2, Tile(64, 64, 64, 4, 4)),
    (2**31, 2, Tile(64, 128, 64, 4, 4)),
    # Without tensor cores: routers, and who wants float32's digits.
    (2**31, 4, Tile(32, 32, 32, 4, 2)),
)


def choose(columns: int, itemsize: int) -> Tile:
    """The tile of a product with so many output columns."""
    return next(tile for most_columns, size, tile in TABLE if columns <= most_columns and itemsize == size)
