"""How the attention kernel is cut for a model: a table, because a server cannot try variants out while it answers. No torch, no Triton.

Invariant: one model has one configuration for whatever a step computes. Rows per tile choose the tensor cores' instruction, and another
instruction may round otherwise: a token would depend on whether it came alone or in a chunk.

Shared memory holds a tile's queries and, `stages` times, a block of keys with its values: within 163 KiB on sm_80, 227 on sm_90 and sm_100
(tests/triton/test_compile.py asks the compiler).
"""

from dataclasses import dataclass


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


# (most query heads, most columns of a key, bytes of a number of the queries) -> the first line that fits is taken. Keys and values in
# float8 are converted to the queries' type, so that its lines are theirs.
TABLE = (
    (16, 128, 2, Configuration(16, 64, 256, 4, 3)),
    (16, 256, 2, Configuration(16, 64, 256, 4, 2)),
    (16, 576, 2, Configuration(16, 32, 256, 4, 3)),
    (32, 128, 2, Configuration(32, 64, 256, 4, 3)),
    (32, 256, 2, Configuration(32, 64, 256, 4, 2)),
    (64, 128, 2, Configuration(64, 64, 512, 4, 3)),
    (64, 256, 2, Configuration(64, 64, 512, 8, 2)),
    (1024, 128, 2, Configuration(128, 64, 1024, 8, 3)),
    (1024, 256, 2, Configuration(64, 64, 1024, 8, 2)),
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
            return Configuration(found.rows, keys, max(found.split, keys), found.warps, found.stages)
    return None
