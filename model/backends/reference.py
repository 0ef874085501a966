"""The obviously right backend: one row at a time, one softmax over all its keys, in float32. Slow; every other backend is held to it.

Shape letters: T tokens of the step, n tokens of a row, H query heads, d head size, K keys of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """softmax(q K^T * scale) V with the causal limit of each token, as the paper writes it."""

    pool: KVPool
    scale: float

    def plan(self, batch: Batch) -> Batch:
        return batch

    def run(self, plan: Batch, layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor) -> Tensor:
        self.pool.write(layer, plan.slots_T, k_Td, v_Td)
        o_THd = torch.empty_like(q_THd)
        for row in plan.rows:
            k_Kd = self.pool.keys_LPSd[layer, row.pages].flatten(0, 1)[: row.num_keys].float()
            v_Kd = self.pool.values_LPSd[layer, row.pages].flatten(0, 1)[: row.num_keys].float()
            q_nHd = q_THd[row.first : row.first + row.num_tokens].float()
            logits_nHK = torch.einsum("nhd,kd->nhk", q_nHd, k_Kd) * self.scale
            position_n = torch.arange(row.num_keys - row.num_tokens, row.num_keys, device=q_THd.device)
            hidden_nK = torch.arange(row.num_keys, device=q_THd.device)[None, :] > position_n[:, None]
            weights_nHK = logits_nHK.masked_fill(hidden_nK[:, None, :], -torch.inf).softmax(dim=-1)
            o_nHd = torch.einsum("nhk,kd->nhd", weights_nHK, v_Kd)
            o_THd[row.first : row.first + row.num_tokens] = o_nHd.to(o_THd.dtype)
        return o_THd


def create(pool: KVPool, scale: float) -> ReferenceBackend:
    return ReferenceBackend(pool, scale)
