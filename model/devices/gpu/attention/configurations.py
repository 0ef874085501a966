"""Tile sizes of the attention kernel for a model: a table, as a server cannot autotune while it serves. No torch, no Triton.

Invariant: one model has one configuration for all steps. The rows of a tile determine the tensor core instruction, and another instruction
may round differently: a token's output would depend on whether it is computed alone or in a chunk.

Shared memory holds a tile's queries and some blocks of keys with their values: within 163 KiB on sm_80, 227 on sm_90 and sm_100
(checked in tests/triton/test_compile.py). The load of a block depends on the load of its page number, and Triton's pipeline puts half of
its stages between the two: with fewer than five stages no block is loaded while another is computed. Latents have no room for five.
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
    """Keys of a split. Writing and reading partial outputs costs 2 * rows / split of reading keys and values."""
    warps: int
    stages: int
    short_split: int = 256
    """Keys of a split for tokens at the first positions, where a step of few sequences would otherwise have too few programs."""
    num_short: int = 1024
    """The number of first positions. The split depends on a token's own position only, so that the order of its sums does too."""
    most_registers: int | None = None
    """Limit for a thread, if the compiler would use so many that a multiprocessor holds one tile instead of two."""

    @property
    def options(self) -> dict[str, int | None]:
        """Options for the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}


# (most query heads, most key columns, bytes of the query dtype, configuration); the first line that fits applies. Keys and values in float8
# are converted to the query dtype.
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


def choose(num_heads: int, key_dim: int, itemsize: int, page_size: int) -> Configuration | None:
    """The configuration of a model, or None if there is none: the key is too wide, or no block fits into a page."""
    if page_size < 16 or page_size & (page_size - 1):
        return None
    for most_heads, most_columns, size, found in TABLE:
        if num_heads <= most_heads and key_dim <= most_columns and itemsize == size:
            keys = min(found.keys, page_size)
            return replace(found, keys=keys, split=max(found.split, keys), short_split=max(found.short_split, keys))
    return None
