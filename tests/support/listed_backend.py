"""Attention by torch over the page lists that the GPU kernels read, for steps of single tokens; other steps use the rows themselves.

Every operation of a listed step is on whole tensors, so that it can be recorded. Padding is written to the last page of the pool, which
no sequence may use.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.devices.gpu.attention.configurations import Configuration
from model.devices.gpu.attention.plan import GroupLists, Shape, classes, filled_up, padding_of, plan_groups, shape_of
from model.devices.reference import ReferenceBackend
from model.layers import Rotation
from model.step import Row

CONFIGURATION = Configuration(16, 16, 32, 1, 1, short_split=16, num_short=50)


class ListedReference:
    """A ListedBackend."""

    name, batch_invariant = "listed", False

    def __init__(self, pool: KVPool, scale: float, num_heads: int) -> None:
        self.pool, self.scale, self.num_heads = pool, scale, num_heads
        self.reference = ReferenceBackend(pool, scale)
        self.capacity = 64

    def plan(self, batch: Batch) -> Any:
        return self.reference.plan(batch)

    def _padding(self, shape: Shape) -> list[GroupLists]:
        return [padding_of(shape, group, self.pool.page_size, self.num_heads, CONFIGURATION) for group in self.pool.layout.groups]

    def contexts(self, longest: int) -> list[int]:
        return [min(num_keys, longest) for num_keys in classes(self.pool.page_size, longest)]

    def pack(self, rows: Sequence[Row], num_rows: int) -> Any:
        lists = plan_groups(rows, range(len(rows)), self.pool.layout, self.num_heads, CONFIGURATION, self.capacity)
        shape = shape_of(rows, num_rows, self.pool.page_size)
        if shape is None or any(len(group.waves) > 1 for group in lists):
            return None
        return filled_up(lists, self._padding(shape)), shape

    def unpack(self, words: Tensor, shape: Shape) -> Any:
        parts = [part for group in self._padding(shape) for part in group.parts]
        tensors = [x.view(part.shape) for x, part in zip(words.split([part.size for part in parts]), parts, strict=True)]
        return ["listed", *(tensors[4 * number : 4 * number + 4] for number in range(len(parts) // 4))]

    def run(self, plan: Any, layer: int, q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor, rotation: Rotation | None = None) -> Tensor:
        if plan[0] != "listed":
            return self.reference.run(plan, layer, q_THd, k_Td, v_Tv, rotation)
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        place, page_size = self.pool.layout.places[layer], self.pool.page_size
        group, (spans, _, tables, slots) = self.pool.layout.groups[place.group], plan[1 + place.group]
        num_rows, nowhere = len(q_THd), self.pool.num_pages * page_size - 1
        slots_T = slots[place.stack, :num_rows].long()
        self.pool.write(layer, torch.where(slots_T < 0, nowhere, slots_T), k_Td, v_Tv)
        keys_PSd, values_PSv = self.pool.layer(layer)
        pages_TW = tables[:, place.stack :: group.num_stacks].long()
        k_TKd, v_TKv = keys_PSd[pages_TW].flatten(1, 2), values_PSv[pages_TW].flatten(1, 2)
        start_T1, first_page_T1 = spans[:, 2:3], spans[:, 3:4]
        position_TK = first_page_T1 * page_size + torch.arange(k_TKd.shape[1])
        hidden_TK = position_TK > start_T1
        if group.window is not None:
            hidden_TK = hidden_TK | (position_TK <= start_T1 - group.window)
        logits_THK = torch.einsum("thd,tkd->thk", q_THd, k_TKd) * self.scale
        weights_THK = logits_THK.masked_fill(hidden_TK[:, None], -torch.inf).softmax(dim=-1)
        # Padding of a page table names a page of another row, which may hold NaN: a weight of 0 would not remove it.
        return torch.einsum("thk,tkv->thv", weights_THK, v_TKv.masked_fill(hidden_TK[..., None], 0.0))
