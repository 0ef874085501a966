"""Attention over the paged one-head cache, one implementation per module; each is tested against `reference` on ragged batches.

Backends never import each other. Only the one asked for is imported.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.layers import Rotation

BACKENDS = {name: f"model.backends.{name}" for name in ("reference", "cpu", "native", "triton")}


class Backend(Protocol):
    """One step is `plan(batch)` once, then `run` once for every layer in order."""

    @property
    def name(self) -> str:
        """What an answer's last bits depend on."""
        ...

    def plan(self, batch: Batch) -> Any:
        """What all layers of the step share (masks, page lists), handed back to `run`."""
        ...

    def run(self, plan: Any, layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Stores K and V of the step's tokens in their slots, then attends: a token at position p sees 0 .. p of its own row. Where there
        is a rotation, Q and K are turned by it first. -> o_THd.
        """
        ...


def backend_for(pool: KVPool, num_heads: int, device: torch.device | None = None) -> str:
    """The fastest backend there is for the device, dtype and sizes of a pool and so many query heads; `device`: of one yet to be."""
    if (device or pool.keys_LPSd.device).type != "cpu":
        # What torch for CUDA brings along on Linux, and is missing elsewhere.
        if find_spec("triton") is None:
            return "reference"
        from model.backends import triton

        return "triton" if triton.supports(pool, num_heads) else "reference"
    from model.backends.native import supports

    return "native" if supports(pool) else "cpu"


def create_backend(name: str, pool: KVPool, scale: float, num_heads: int) -> Backend:
    """The backend `name` over `pool`; logits are multiplied by `scale`. Raises KeyError for an unknown name."""
    return cast(Backend, import_module(BACKENDS[name]).create(pool, scale, num_heads))
