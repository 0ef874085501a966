"""Tile sizes of the attention kernels for a model: tables, as a server cannot autotune while it
serves. No torch, no Triton.

The rows of a tile determine the tensor core instruction, and another instruction may round
differently. So the invariant backend has one configuration of the decode kernel for all steps.

Shared memory holds a tile's queries and some blocks of keys with their values. The tables are for
163 KiB and more (compute capability 8.0, 9.0, 10.0); for cards with 99 (8.6, 8.9, 12.0) `fitted`
lets fewer blocks be on their way, or halves the tile, which tests/triton/test_compile.py checks for
all of them.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Configuration:
    """Sizes and compiler options of a kernel."""

    rows: int
    """Rows of a tile: heads of one token, or heads of several."""
    keys: int
    """Keys of a block, at most; a block never crosses a page."""
    warps: int
    stages: int
    """Blocks on their way and being computed: the number of a block's page is loaded while the
    block before it is computed."""
    warp_groups: int = 1
    """Groups of warps of the decode kernel, each with `keys` of a block to itself; 1: all warps
    share the keys."""
    most_registers: int | None = None
    """Limit for a thread, if the compiler would use so many that a multiprocessor holds one tile
    instead of two."""

    @property
    def options(self) -> dict[str, int | None]:
        """Options for the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}


# (most query heads, most key columns, bytes of the query dtype, configuration); the first line that
# fits applies. Keys and values in float8 are converted to the query dtype.
DECODE = (
    (16, 128, 2, Configuration(16, 16, 4, 3, warp_groups=4)),
    (16, 576, 2, Configuration(16, 32, 4, 3)),
    (32, 128, 2, Configuration(32, 64, 4, 3)),
    (32, 256, 2, Configuration(32, 32, 4, 3)),
    (64, 128, 2, Configuration(64, 64, 4, 3)),
    (64, 256, 2, Configuration(64, 32, 8, 3)),
    (1024, 64, 2, Configuration(128, 64, 8, 3, most_registers=128)),
    (1024, 128, 2, Configuration(128, 64, 8, 3)),
    (1024, 256, 2, Configuration(64, 32, 8, 3)),
    (1024, 576, 2, Configuration(64, 32, 8, 2)),
    # float32 does not use tensor cores.
    (32, 128, 4, Configuration(16, 32, 4, 1)),
    (1024, 128, 4, Configuration(32, 32, 8, 1)),
    (1024, 576, 4, Configuration(16, 16, 4, 1)),
)
MANY_SMALL = Configuration(16, 32, 1, 4)
"""In place of the first line of DECODE for many rows, which occupy a card with a warp each, and for
pages too small for its groups of warps."""
CHUNKS = (
    (1024, 64, 2, Configuration(128, 64, 8, 3, most_registers=128)),
    (1024, 128, 2, Configuration(64, 64, 4, 3)),
    (1024, 256, 2, Configuration(64, 32, 8, 3)),
    (1024, 576, 2, Configuration(64, 32, 8, 2)),
    (1024, 128, 4, Configuration(32, 32, 8, 1)),
    (1024, 576, 4, Configuration(16, 16, 4, 1)),
)
LARGEST_SHARED = 227 * 1024
"""Bytes of shared memory of a program, of the cards that have the most."""
LEAST_ROWS = 16
"""Rows of the smallest multiplication of matrices."""
MANY_ROWS = 192
"""Single tokens of a step from which on it has many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model and a card ask of a configuration."""

    num_heads: int
    key_dim: int
    value_dim: int
    """Columns of a value that are stored apart from its key's; 0 where they are some of these."""
    itemsize: int
    """Bytes of a number of the query dtype."""
    page_size: int
    shared: int = LARGEST_SHARED
    """Bytes of shared memory that a program may have."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How the keys of a single token are divided among programs."""

    keys: int
    """Of a split, at least: writing and reading partial outputs takes time too."""
    most: int
    """Of a token. Programs that a context is too short for end at once, some 5 us for 2,000."""


INVARIANT_SPLITS = Splits(512, 16)
MOST_SPLITS = 32
"""Maximum number of splits of a token's keys, which scratch memory is sized for."""


def choose_splits(key_dim: int, num_rows: int) -> Splits:
    """Short and many where few rows have to occupy a card: together some 128 programs, as an H100
    has 132 multiprocessors. A program takes twice as long for a key of more than 128 columns.
    """
    rows = 1 << (num_rows - 1).bit_length()
    keys = (256 if key_dim <= 128 else 128) * min(4, max(1, rows // 16))
    return Splits(keys, min(MOST_SPLITS, max(8, 128 // rows)))


def fitted(found: Configuration, sizes: Sizes) -> Configuration:
    """The configuration with blocks that fit into a page, and with fewer of them on their way, or
    with fewer rows, as far as the card's shared memory demands it. As compiled by Triton 3.7.1 it
    holds a tile's queries, the blocks that are loaded while one is computed, and 64 bytes a row.
    """
    keys = min(found.keys, sizes.page_size // found.warp_groups)
    found = replace(found, keys=keys)
    key_dim, value_dim = sizes.key_dim, sizes.value_dim
    if value_dim:
        # Blocks have as many columns as the next power of two.
        key_dim, value_dim = (1 << (columns - 1).bit_length() for columns in (key_dim, value_dim))
    row_bytes = key_dim * sizes.itemsize + 64
    block_bytes = keys * found.warp_groups * (key_dim + value_dim) * sizes.itemsize
    while found.rows * row_bytes + max(1, found.stages - 1) * block_bytes > sizes.shared:
        if found.stages > 2:
            found = replace(found, stages=found.stages - 1)
        elif found.rows > LEAST_ROWS:
            found = replace(found, rows=found.rows // 2)
        else:
            break
    return found


def choose_decode(sizes: Sizes, num_rows: int = 1) -> Configuration:
    """The configuration for single tokens of a step of so many rows."""
    found = _first_of(DECODE, sizes)
    assert found is not None
    groups = found.warp_groups
    if groups > 1 and (num_rows >= MANY_ROWS or sizes.page_size < groups * LEAST_ROWS):
        found = MANY_SMALL
    return fitted(found, sizes)


def choose_chunks(sizes: Sizes) -> Configuration | None:
    """The configuration for long chunks; None where there are no kernels: the key is too wide, or
    no block fits into a page.
    """
    page_size, found = sizes.page_size, _first_of(CHUNKS, sizes)
    if found is None or page_size < LEAST_ROWS or page_size & (page_size - 1):
        return None
    return fitted(found, sizes)


def _first_of(
    table: "tuple[tuple[int, int, int, Configuration], ...]", sizes: Sizes
) -> Configuration | None:
    return next(
        (
            found
            for most_heads, most_columns, itemsize, found in table
            if sizes.num_heads <= most_heads
            and sizes.key_dim <= most_columns
            and sizes.itemsize == itemsize
        ),
        None,
    )
