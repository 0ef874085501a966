"""Attention by torch over the positions and page tables that the GPU kernels read, for steps of
single tokens; other steps use the rows themselves.

Every operation of a listed step is on whole tensors, so that it can be recorded. Padding is written
to the last page of the pool, which no sequence may use.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.devices.gpu.attention.singles import Shape, Singles, classes, shape_of
from model.devices.reference import ReferenceBackend
from model.layers import Rotation


class ListedReference:
    """A ListedBackend."""

    name, batch_invariant = "listed", False

    def __init__(self, pool: KVPool, scale: float, num_heads: int) -> None:
        self.pool, self.scale = pool, scale
        self.reference = ReferenceBackend(pool, scale)

    def plan(self, batch: Batch) -> Any:
        return self.reference.plan(batch)

    def contexts(self, longest: int) -> list[int]:
        return [min(num_keys, longest) for num_keys in classes(self.pool.page_size, longest)]

    def shape(self, num_keys: int, num_rows: int, several: bool = False) -> Shape | None:
        return shape_of(num_keys, num_rows, self.pool.page_size)

    def listed(self, positions_B: Tensor, tables_BW: Sequence[Tensor], shape: Shape) -> Singles:
        return Singles(positions_B, tuple(tables_BW), shape.num_keys)

    def run(
        self,
        plan: Any,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor,
        v_Tv: Tensor,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if not isinstance(plan, Singles):
            return self.reference.run(plan, layer, q_THd, k_Td, v_Tv, rotation)
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        place, page_size = self.pool.layout.places[layer], self.pool.page_size
        group, nowhere = self.pool.layout.groups[place.group], self.pool.num_pages * page_size - 1
        position_T1 = plan.positions_B[:, None].long()
        pages_TW = plan.tables_BW[place.group][:, place.stack :: group.num_stacks].long()
        pages_T1 = pages_TW.gather(1, position_T1.clamp(min=0) // page_size)
        slots_T1 = torch.where(
            position_T1 < 0, nowhere, pages_T1 * page_size + position_T1 % page_size
        )
        self.pool.write(layer, slots_T1[:, 0], k_Td, v_Tv)
        keys_PSd, values_PSv = self.pool.layer(layer)
        k_TKd, v_TKv = keys_PSd[pages_TW].flatten(1, 2), values_PSv[pages_TW].flatten(1, 2)
        position_TK = torch.arange(k_TKd.shape[1])
        hidden_TK = position_TK > position_T1
        if group.window is not None:
            hidden_TK = hidden_TK | (position_TK <= position_T1 - group.window)
        logits_THK = torch.einsum("thd,tkd->thk", q_THd, k_TKd) * self.scale
        weights_THK = logits_THK.masked_fill(hidden_TK[:, None], -torch.inf).softmax(dim=-1)
        # Padding of a page table names a page of another row, which may hold NaN: a weight of 0
        # would not remove it.
        o_THv = torch.einsum(
            "thk,tkv->thv", weights_THK, v_TKv.masked_fill(hidden_TK[..., None], 0.0)
        )
        return o_THv.masked_fill(position_T1[..., None] < 0, 0.0)
