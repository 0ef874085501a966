"""Attention on a GPU by our Triton kernels, which read pages in place.

Two backends share them: `triton`, of which a token's output depends on its own sequence alone, bit
for bit, and `triton-fast`, which has a kernel for long chunks and splits contexts by the number of
rows. Triton is imported when a backend is created.
"""

from functools import partial
from typing import Any

import torch

from cache.layout import Columns
from cache.pool import KVPool
from model.devices.backend import Backend
from model.devices.gpu.attention.configurations import LARGEST_SHARED, Sizes, choose_chunks


def sizes_of(pool: KVPool, columns: Columns, num_heads: int) -> Sizes:
    """What layers with these columns, and the pool's card, ask of a configuration."""
    device, shared = pool.numbers_PN.device, LARGEST_SHARED
    if device.type == "cuda":
        # torch's annotations lack it.
        properties: Any = torch.cuda.get_device_properties(device)
        shared = properties.shared_memory_per_block_optin
    return Sizes(
        num_heads,
        columns.key,
        0 if columns.value_in_key else columns.value,
        pool.compute_dtype.itemsize,
        pool.page_size,
        shared,
    )


def supports(pool: KVPool, num_heads: int) -> bool:
    """Whether there are configurations for these pages and heads."""
    columns = (group.columns for group in pool.layout.groups)
    return all(choose_chunks(sizes_of(pool, each, num_heads)) is not None for each in columns)


def create(pool: KVPool, scale: float, num_heads: int, *, invariant: bool = False) -> Backend:
    from model.devices.gpu.attention.backend import MixedBackend, TritonBackend

    backends: dict[Columns, TritonBackend] = {
        each: TritonBackend(
            pool, scale, num_heads, each, sizes_of(pool, each, num_heads), invariant=invariant
        )
        for each in {group.columns for group in pool.layout.groups}
    }
    first, *others = backends.values()
    return MixedBackend(pool, backends) if others else first


create_invariant = partial(create, invariant=True)
