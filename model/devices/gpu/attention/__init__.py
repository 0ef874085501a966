"""Attention on a GPU by our Triton kernels, which read pages in place.

Two backends share them: `triton`, of which a token's output depends on its own sequence alone, bit
for bit, and `triton-fast`, which has a kernel for long chunks and splits contexts by the number of
rows. Triton is imported when a backend is created.
"""

from typing import Any

import torch

from cache.pool import KVPool
from model.devices.backend import Backend
from model.devices.gpu.attention.configurations import LARGEST_SHARED, Sizes, choose_chunks


def sizes_of_pool(pool: KVPool, num_heads: int) -> Sizes:
    """What a model with this pool, and the pool's card, ask of a configuration."""
    device, value_dim = pool.keys_LPSd.device, pool.values_LPSv.shape[-1]
    shared = LARGEST_SHARED
    if device.type == "cuda":
        # torch's annotations lack it.
        properties: Any = torch.cuda.get_device_properties(device)
        shared = properties.shared_memory_per_block_optin
    return Sizes(
        num_heads,
        pool.keys_LPSd.shape[-1],
        0 if pool.value_in_key else value_dim,
        pool.compute_dtype.itemsize,
        pool.page_size,
        shared,
    )


def supports(pool: KVPool, num_heads: int) -> bool:
    """Whether there is a configuration for these pages and heads."""
    return choose_chunks(sizes_of_pool(pool, num_heads)) is not None


def create(pool: KVPool, scale: float, num_heads: int) -> Backend:
    from model.devices.gpu.attention.backend import TritonBackend

    return TritonBackend(pool, scale, num_heads, sizes_of_pool(pool, num_heads))


def create_invariant(pool: KVPool, scale: float, num_heads: int) -> Backend:
    from model.devices.gpu.attention.backend import TritonBackend

    return TritonBackend(pool, scale, num_heads, sizes_of_pool(pool, num_heads), invariant=True)
