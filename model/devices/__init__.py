"""Attention over the paged one-head cache, one implementation per module; each is tested against `reference` on ragged batches.

Backends never import each other. Only the one asked for is imported.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch

from cache.pool import KVPool
from model.devices.backend import Backend

BACKENDS = {
    "reference": "model.devices.reference",
    "cpu": "model.devices.cpu.torch_attention",
    "native": "model.devices.cpu.attention",
    "triton": "model.devices.gpu.attention",
}
"""Module of each attention backend, by the name that options, /info and logs show."""


def backend_for(pool: KVPool, num_heads: int, device: torch.device | None = None) -> str:
    """The fastest backend there is for the device, dtype and sizes of a pool and so many query heads; `device`: of one yet to be."""
    if (device or pool.keys_LPSd.device).type != "cpu":
        # What torch for CUDA brings along on Linux, and is missing elsewhere.
        if find_spec("triton") is None:
            return "reference"
        from model.devices.gpu import attention as triton

        return "triton" if triton.supports(pool, num_heads) else "reference"
    from model.devices.cpu.attention import supports

    return "native" if supports(pool) else "cpu"


def create_backend(name: str, pool: KVPool, scale: float, num_heads: int) -> Backend:
    """The backend `name` over `pool`; logits are multiplied by `scale`. Raises KeyError for an unknown name."""
    return cast(Backend, import_module(BACKENDS[name]).create(pool, scale, num_heads))
