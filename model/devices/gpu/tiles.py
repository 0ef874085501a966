"""The tile of a product: a table by output columns and dtype size; and the parts of its inputs. No
torch, no Triton.

Invariant: the tile does not depend on the number of rows. Another tile may use another tensor core
instruction or another order of summation, so that a row computed alone would differ from the same
row in a batch. A single token therefore computes a whole tile's rows; its time is bound by reading
the weights, which are read once either way.

Shared memory holds `stages` blocks of rows and of weights, two of weights where a product is gated:
within 163 KiB on sm_80, 227 on sm_90 and sm_100 (checked in tests/triton/test_compile.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes and compiler options of a tile."""

    rows: int
    columns: int
    """Output columns. Narrow products have narrow tiles, so that there are enough programs for a
    GPU."""
    depth: int
    """Input columns of one multiplication."""
    warps: int
    stages: int


# (most output columns, bytes of x's dtype, tile); the first line that fits applies.
TABLE = (
    (4096, 2, Tile(64, 32, 128, 4, 4)),
    (32768, 2, Tile(64, 64, 64, 4, 4)),
    (2**31, 2, Tile(64, 128, 64, 4, 4)),
    # float32 does not use tensor cores: routers, and models served in float32.
    (2**31, 4, Tile(32, 32, 32, 4, 2)),
)


def choose(columns: int, itemsize: int) -> Tile:
    """The tile of a product with `columns` output columns."""
    return next(
        tile for most_columns, size, tile in TABLE if columns <= most_columns and itemsize == size
    )


LEAST_PART = 512
"""Inputs of a part, below which a program's beginning and end would be most of it."""


def part_of(num_inputs: int, num_tiles: int, num_programs: int, depth: int) -> int:
    """Inputs of each of a matrix's parts, a multiple of `depth`: so many that these tiles give that
    many programs. All, where they do.
    """
    parts = max(1, min(-(-num_programs // num_tiles), num_inputs // LEAST_PART))
    return -(-num_inputs // (parts * depth)) * depth
