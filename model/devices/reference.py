"""The reference backend: one row at a time, one softmax over all its keys, in float32. Slow; every
other backend is tested against it.

Shape letters: T tokens of the step, n tokens of a row, H query heads, d columns of a key, v of a
value, K keys of a row.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.devices.row_spans import GroupBatch, group_batches
from model.layers import Rotation


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """softmax(q K^T * scale) V with the causal limit and the window of each token, as in the
    papers.
    """

    pool: KVPool
    scale: float

    name: ClassVar = "reference"
    batch_invariant: ClassVar = False
    are_whole: ClassVar = None

    def plan(self, batch: Batch) -> tuple[GroupBatch, ...]:
        return group_batches(batch)

    def run(
        self,
        plan: tuple[GroupBatch, ...],
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor,
        v_Tv: Tensor,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        place = self.pool.layout.places[layer]
        group = plan[place.group]
        self.pool.write(layer, group.slots_nT[place.stack], k_Td, v_Tv)
        keys_PSd, values_PSv = self.pool.layer(layer)
        o_THv = q_THd.new_empty(*q_THd.shape[:-1], v_Tv.shape[-1])
        for row in group.rows:
            pages = row.pages[place.stack :: group.num_stacks]
            k_Kd = keys_PSd[pages].flatten(0, 1)[: row.num_keys].float()
            v_Kv = values_PSv[pages].flatten(0, 1)[: row.num_keys].float()
            q_nHd = q_THd[row.first : row.first + row.num_tokens].float()
            logits_nHK = torch.einsum("nhd,kd->nhk", q_nHd, k_Kd) * self.scale
            age_nK = torch.arange(row.num_keys - row.num_tokens, row.num_keys)[
                :, None
            ] - torch.arange(row.num_keys)
            hidden_nK = (age_nK < 0) | (age_nK >= (row.window or row.num_keys))
            weights_nHK = logits_nHK.masked_fill(
                hidden_nK[:, None, :].to(q_THd.device), -torch.inf
            ).softmax(dim=-1)
            o_nHv = torch.einsum("nhk,kv->nhv", weights_nHK, v_Kv)
            o_THv[row.first : row.first + row.num_tokens] = o_nHv.to(o_THv.dtype)
        return o_THv


def create(pool: KVPool, scale: float, num_heads: int) -> ReferenceBackend:
    return ReferenceBackend(pool, scale)
