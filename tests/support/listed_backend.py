"""Attention by torch over the positions and page tables that the GPU kernels read, for steps of
single tokens; other steps use the rows themselves.

Every operation of a listed step is on whole tensors, so that it can be recorded. Padding is written
to the last page of the pool, which no sequence may use.
"""

from typing import Any

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.devices.gpu.attention.plan import StepLists
from model.devices.reference import ReferenceBackend
from model.layers import Rotation


class ListedReference:
    """A ListedBackend."""

    name, batch_invariant, are_whole = "listed", False, None

    def __init__(self, pool: KVPool, scale: float, num_heads: int) -> None:
        self.pool, self.scale = pool, scale
        self.reference = ReferenceBackend(pool, scale)

    def plan(self, batch: Batch) -> Any:
        return self.reference.plan(batch)

    def listed(
        self, positions_B: Tensor, offsets_GB: Tensor, pages_P: Tensor, num_keys: int
    ) -> StepLists[Tensor]:
        return StepLists(positions_B, offsets_GB, pages_P, num_keys)

    def run(
        self,
        plan: Any,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Tv: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if not isinstance(plan, StepLists):
            return self.reference.run(plan, layer, q_THd, k_Td, v_Tv, rotation)
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        place, page_size = self.pool.layout.places[layer], self.pool.page_size
        group, nowhere = self.pool.layout.groups[place.group], self.pool.num_pages * page_size - 1
        position_T1 = plan.positions_T[:, None].long()
        number_W = torch.arange(-(-plan.num_keys // page_size))
        begin_T1 = plan.offsets_GT[place.group, : len(position_T1), None] + place.stack
        # Behind a row's pages lies anything.
        places_TW = (begin_T1 + number_W * group.num_stacks).clamp(max=len(plan.pages_P) - 1)
        pages_TW = plan.pages_P[places_TW.long()].long()
        pages_TW = torch.where(number_W * page_size <= position_T1, pages_TW, 0).clamp(min=0)
        pages_T1 = pages_TW.gather(1, position_T1.clamp(min=0) // page_size)
        slots_T1 = torch.where(
            position_T1 < 0, nowhere, pages_T1 * page_size + position_T1 % page_size
        )
        if k_Td is not None and v_Tv is not None:
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
