"""The reference backend: one row at a time, one softmax over all its keys, in float32. Slow; every
other backend is tested against it.

Shape letters: T tokens of the step, n tokens of a row, H query heads, d columns of a key, v of a
value, p pages of a row in one stack, K keys of a row.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cache.layout import pages_for
from cache.pool import KVPool
from model.batch import Batch
from model.layers import Rotation


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """softmax(q K^T * scale) V with the window and, unless the batch is bidirectional, the causal
    limit of each token, as in the papers.
    """

    pool: KVPool
    scale: float

    name: ClassVar = "reference"
    batch_invariant: ClassVar = False
    are_whole: ClassVar = None

    def plan(self, batch: Batch) -> Batch:
        return batch

    def run(
        self,
        plan: Batch,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Tv: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        place, size = self.pool.layout.places[layer], self.pool.page_size
        group = plan.layout.groups[place.group]
        rows = [
            (
                slice(first, first + len(row.tokens)),
                torch.arange(row.start, row.start + len(row.tokens)),
                torch.tensor(row.pages[place.group][place.stack :: group.num_stacks]),
            )
            for row, first in zip(plan.rows, plan.firsts, strict=True)
        ]
        if k_Td is not None and v_Tv is not None:
            for span, position_n, pages_p in rows:
                slots_n = pages_p[position_n // size] * size + position_n % size
                self.pool.write(layer, slots_n.to(k_Td.device), k_Td[span], v_Tv[span])
        keys_PSd, values_PSv = self.pool.layer(layer)
        o_THv = q_THd.new_empty(*q_THd.shape[:-1], values_PSv.shape[-1])
        for span, position_n, pages_p in rows:
            end = int(position_n[-1]) + 1
            first_page = group.first_seen(int(position_n[0])) // size
            pages_p = pages_p[first_page : pages_for(end, size)]
            position_K = torch.arange(first_page * size, end)
            k_Kd = keys_PSd[pages_p].flatten(0, 1)[: len(position_K)].float()
            v_Kv = values_PSv[pages_p].flatten(0, 1)[: len(position_K)].float()
            logits_nHK = torch.einsum("nhd,kd->nhk", q_THd[span].float(), k_Kd) * self.scale
            age_nK = position_n[:, None] - position_K
            if plan.bidirectional:
                age_nK = age_nK.abs()
            hidden_nK = (age_nK < 0) | (age_nK >= (group.window or end))
            weights_nHK = logits_nHK.masked_fill(
                hidden_nK[:, None, :].to(q_THd.device), -torch.inf
            ).softmax(dim=-1)
            o_THv[span] = torch.einsum("nhk,kv->nhv", weights_nHK, v_Kv).to(o_THv.dtype)
        return o_THv


def create(pool: KVPool, scale: float, num_heads: int) -> ReferenceBackend:
    return ReferenceBackend(pool, scale)
