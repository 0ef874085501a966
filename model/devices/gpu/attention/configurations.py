"""How the attention kernel is cut for a model: a table, because a server cannot try variants out while it answers. No torch, no Triton.

Invariant: one model has one configuration for whatever a step computes. Rows per tile choose the tensor cores' instruction, and another
instruction may round otherwise: a token would depend on whether it came alone or in a chunk.

Shared memory holds a tile's queries and some blocks of keys with their values: within 163 KiB on sm_80, 227 on sm_90 and sm_100
(tests/triton/test_compile.py asks the compiler). A block is read behind the number of its page. Triton's pipeline puts half of its stages
between two such loads, so that fewer than five leave no block on its way while another is computed; latents have no room for five.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to cut the work."""

    rows: int
    """Of a tile."""
    keys: int
    """Of a block, at most; a page is never crossed."""
    split: int
    """Keys of a split. Parts of a split's output cost 2 * rows / split of reading its keys and values."""
    warps: int
    stages: int
    short_split: int = 256
    """The same for tokens of the first positions, where a step of few sequences would else have too few programs."""
    num_short: int = 1024
    """How many positions these are. By a token's own position, so that nothing else decides in which order it sums."""
    most_registers: int | None = None
    """Of a thread, where the compiler would take so many that a processor has room for one tile instead of two."""

    @property
    def options(self) -> dict[str, int | None]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}


# (most query heads, most columns of a key, bytes of a number of the queries) -> the first line that fits is taken. Keys and values in
# float8 are converted to the queries' type, so that its lines are theirs.
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
    # Without tensor cores, for who wants float32's digits.
    (32, 128, 4, Configuration(16, 32, 256, 4, 1)),
    (1024, 128, 4, Configuration(32, 32, 1024, 8, 1)),
    (1024, 576, 4, Configuration(16, 16, 512, 4, 1)),
)


def choose(num_heads: int, key_dim: int, itemsize: int, page_size: int) -> Configuration | None:
    """The configuration of a model, or None where there is none: a key too wide, or pages that no block fits in."""
    if page_size < 16 or page_size & (page_size - 1):
        return None
    for most_heads, most_columns, size, found in TABLE:
        if num_heads <= most_heads and key_dim <= most_columns and itemsize == size:
            keys = min(found.keys, page_size)
            return replace(found, keys=keys, split=max(found.split, keys), short_split=max(found.short_split, keys))
    return None
