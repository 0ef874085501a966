"""Tile sizes of the attention kernels for a model: tables, as a server cannot autotune while it
serves. No torch, no Triton.

With engine.deterministic one model has one configuration for all steps, a line of TABLE: the rows
of a tile determine the tensor core instruction, and another instruction may round differently, so
that a token's output would depend on whether it is computed alone or in a chunk. Otherwise single
tokens and chunks have each their own.

Shared memory holds a tile's queries and some blocks of keys with their values. The tables are for
163 KiB and more (compute capability 8.0, 9.0, 10.0); for cards with 99 (8.6, 8.9, 12.0) `fitted`
lets fewer blocks be on their way, or halves the tile, which tests/triton/test_compile.py checks for
all of them. The load of a block depends on the load of its page number, and Triton's pipeline puts
half of its stages between the two: with fewer than five stages no block is loaded while another is
computed. Latents have no room for five.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Configuration:
    """Sizes and compiler options of the kernel."""

    rows: int
    """Rows of a tile."""
    keys: int
    """Keys of a block, at most; a block never crosses a page."""
    split: int
    """Keys of a split. Writing and reading partial outputs costs 2 * rows / split of reading keys
    and values."""
    warps: int
    stages: int
    short_split: int = 256
    """Keys of a split for tokens at the first positions, where a step of few sequences would
    otherwise have too few programs."""
    num_short: int = 1024
    """The number of first positions. The split depends on a token's own position only, so that the
    order of its sums does too."""
    most_registers: int | None = None
    """Limit for a thread, if the compiler would use so many that a multiprocessor holds one tile
    instead of two."""
    ahead: bool = False
    """Whether the number of a block's page is loaded while the block before is computed: three
    stages are then two blocks on their way."""

    @property
    def options(self) -> dict[str, int | None]:
        """Options for the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}


# (most query heads, most key columns, bytes of the query dtype, configuration); the first line that
# fits applies. Keys and values in float8 are converted to the query dtype.
TABLE = (
    (16, 128, 2, Configuration(16, 64, 256, 4, 5)),
    (16, 256, 2, Configuration(16, 32, 256, 4, 5)),
    (16, 576, 2, Configuration(16, 32, 256, 4, 3)),
    (32, 128, 2, Configuration(32, 64, 256, 4, 5)),
    (32, 256, 2, Configuration(32, 32, 256, 4, 5)),
    (64, 128, 2, Configuration(64, 64, 512, 4, 5)),
    (64, 256, 2, Configuration(64, 32, 512, 8, 5)),
    (1024, 64, 2, Configuration(128, 64, 1024, 8, 5, most_registers=128)),
    (1024, 128, 2, Configuration(128, 64, 1024, 8, 5)),
    (1024, 256, 2, Configuration(64, 32, 1024, 8, 5)),
    (1024, 576, 2, Configuration(64, 32, 1024, 8, 2)),
    # float32 does not use tensor cores.
    (32, 128, 4, Configuration(16, 32, 256, 4, 1)),
    (1024, 128, 4, Configuration(32, 32, 1024, 8, 1)),
    (1024, 576, 4, Configuration(16, 16, 512, 4, 1)),
)


LARGEST_SHARED = 227 * 1024
"""Bytes of shared memory of a program, of the cards that have the most."""


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


def fitted(found: Configuration, sizes: Sizes) -> Configuration:
    """The configuration with fewer blocks on their way, or with fewer rows, as far as the card's
    shared memory demands it. As compiled by Triton 3.7.1 it holds a tile's queries, the blocks that
    are loaded while one is computed, and 64 bytes a row.
    """
    key_dim, value_dim = sizes.key_dim, sizes.value_dim
    if value_dim:
        # Blocks have as many columns as the next power of two.
        key_dim, value_dim = (1 << (columns - 1).bit_length() for columns in (key_dim, value_dim))
    row_bytes = key_dim * sizes.itemsize + 64
    block_bytes = found.keys * (key_dim + value_dim) * sizes.itemsize
    num_blocks = max(1, found.stages - 1 if found.ahead else found.stages // 2)
    while found.rows * row_bytes + num_blocks * block_bytes > sizes.shared:
        if num_blocks > 1:
            num_blocks -= 1
            found = replace(found, stages=num_blocks + 1 if found.ahead else 2 * num_blocks + 1)
        elif found.rows > LEAST_ROWS:
            found = replace(found, rows=found.rows // 2)
        else:
            break
    return found


def choose(sizes: Sizes) -> Configuration | None:
    """The configuration of a model, or None if there is none: the key is too wide, or no block fits
    into a page.
    """
    page_size = sizes.page_size
    if page_size < 16 or page_size & (page_size - 1):
        return None
    for most_heads, most_columns, size, found in TABLE:
        if (
            sizes.num_heads <= most_heads
            and sizes.key_dim <= most_columns
            and sizes.itemsize == size
        ):
            keys = min(found.keys, page_size)
            found = replace(
                found,
                keys=keys,
                split=max(found.split, keys),
                short_split=max(found.short_split, keys),
            )
            return fitted(found, sizes)
    return None


LEAST_ROWS = 16
"""Rows of the smallest multiplication of matrices."""
WHOLE = 2**30
"""Keys of a split where nothing is split."""
CHUNKS = (
    (64, 2, Configuration(128, 64, WHOLE, 8, 3, WHOLE, 0, 128, ahead=True)),
    (128, 2, Configuration(64, 64, WHOLE, 4, 3, WHOLE, 0, ahead=True)),
    (256, 2, Configuration(64, 32, WHOLE, 8, 3, WHOLE, 0, ahead=True)),
    (576, 2, Configuration(64, 32, WHOLE, 8, 2, WHOLE, 0, ahead=True)),
    (128, 4, Configuration(32, 32, WHOLE, 8, 1, WHOLE, 0, ahead=True)),
    (576, 4, Configuration(16, 16, WHOLE, 4, 1, WHOLE, 0, ahead=True)),
)
"""(most key columns, bytes of the query dtype, configuration) of steps with many tiles."""
LEAST_TILES = 64
"""Tiles of CHUNKS in a step from which on these are faster than the split ones of TABLE, which a
few tokens need to occupy a GPU."""
FEW_ROWS, MANY_ROWS = 48, 192
"""Single tokens of a step below which it has few rows, and from which on it has many: classes with
different configurations."""


def choose_chunks(sizes: Sizes) -> Configuration:
    """The configuration for many tiles of a model for which `choose` finds one."""
    found = next(
        found
        for most_columns, size, found in CHUNKS
        if sizes.key_dim <= most_columns and sizes.itemsize == size
    )
    return fitted(replace(found, keys=min(found.keys, sizes.page_size)), sizes)


@dataclass(frozen=True, slots=True)
class DecodeConfiguration:
    """Sizes and compiler options of the decode kernel."""

    rows: int
    """Heads of a tile."""
    groups: int
    """Warps that have keys of their own, `keys` of each block; 1: all warps share the keys."""
    keys: int
    split: int
    """The fewest keys of a split: short where few rows have to occupy a GPU, else long, as a
    program's beginning and end take time too."""
    warps: int
    stages: int
    most_registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Options for the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}


def choose_decode(common: Configuration, sizes: Sizes, num_rows: int) -> DecodeConfiguration:
    """The configuration for single tokens of a step of so many rows, of a model that `choose` gives
    `common`.
    """
    split = 256 if num_rows < FEW_ROWS else 1024
    is_small = sizes.num_heads <= 16 and sizes.key_dim <= 128 and sizes.itemsize == 2
    if is_small and sizes.page_size >= 64:
        # Measured for 16 heads of 128 columns on an H100.
        return (
            DecodeConfiguration(16, 4, 16, split, 4, 3)
            if num_rows < MANY_ROWS
            else DecodeConfiguration(16, 1, 32, split, 1, 4)
        )
    # More heads or columns leave a warp no registers for keys of its own.
    split = max(split, common.keys)
    return DecodeConfiguration(
        common.rows,
        1,
        common.keys,
        split,
        common.warps,
        min(common.stages, 3),
        common.most_registers,
    )
