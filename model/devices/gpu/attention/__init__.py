"""Attention on a GPU by our Triton kernels: pages are read in place, once for all query heads of a
tile of tokens.

Invariant: of the backend `triton` a token's output depends on its own sequence alone, bit for bit;
`triton-fast` (fast.py) has kernels of their own for single tokens and for chunks. Triton is
imported when a backend is created.
"""

from cache.pool import KVPool
from model.devices.backend import Backend
from model.devices.gpu.attention.configurations import Configuration, choose


def supports(pool: KVPool, num_heads: int) -> bool:
    """Whether there is a configuration for these pages and heads."""
    return _configuration(pool, num_heads) is not None


def create(pool: KVPool, scale: float, num_heads: int) -> Backend:
    from model.devices.gpu.attention.backend import TritonBackend

    configuration = _configuration(pool, num_heads)
    assert configuration is not None
    return TritonBackend(pool, scale, num_heads, configuration)


def _configuration(pool: KVPool, num_heads: int) -> Configuration | None:
    return choose(num_heads, pool.keys_LPSd.shape[-1], pool.compute_dtype.itemsize, pool.page_size)
