"""The CPU backend on torch alone: rows with equally many tokens are attended to together by one fused attention.

With one K and V head, the H queries of a token are H rows of one matrix over the same keys: rows of a single token are stacked that
way, so K and V are read once for all heads. Longer rows are bound by arithmetic and instead share one mask between the heads. Rows
are grouped by token count and, roughly, by length, to bound the padding.

Shape letters: T tokens of the step, G rows of a group, n tokens of a row, H query heads, d head size, K keys (padded), p pages.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pool import KVPool
from cache.table import pages_for
from model.batch import Batch, RowSpan


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with equally many tokens. `mask_G1nK` is 0 where a token may see a key and -inf where not."""

    tokens_Gn: Tensor
    pages_Gp: Tensor
    num_keys: int
    mask_G1nK: Tensor


@dataclass(frozen=True, slots=True)
class CpuPlan:
    slots_T: Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """Gathers each group's pages and attends to them."""

    pool: KVPool
    scale: float

    def plan(self, batch: Batch) -> CpuPlan:
        rows_by_shape: dict[tuple[int, int], list[RowSpan]] = defaultdict(list)
        for row in batch.rows:
            rows_by_shape[row.num_tokens, row.num_keys.bit_length()].append(row)
        return CpuPlan(batch.slots_T, tuple(self._group(rows) for rows in rows_by_shape.values()))

    def _group(self, rows: list[RowSpan]) -> Group:
        num_tokens = rows[0].num_tokens
        num_keys = max(row.num_keys for row in rows)
        num_pages = pages_for(num_keys, self.pool.page_size)
        # Padding repeats a page of the row's own, hidden by the mask: another's could hold a NaN, and 0 * NaN is one.
        pages = [(row.pages + row.pages[:1] * num_pages)[:num_pages] for row in rows]
        first_G1 = torch.tensor([[row.first] for row in rows])
        start_G1 = torch.tensor([[row.num_keys - num_tokens] for row in rows])
        token_n = torch.arange(num_tokens)
        hidden_GnK = torch.arange(num_keys) > (start_G1 + token_n)[:, :, None]
        mask_GnK = torch.zeros(hidden_GnK.shape, dtype=self.pool.keys_LPSd.dtype).masked_fill(hidden_GnK, -torch.inf)
        return Group(first_G1 + token_n, torch.tensor(pages), num_keys, mask_GnK[:, None])

    def run(self, plan: CpuPlan, layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor) -> Tensor:
        self.pool.write(layer, plan.slots_T, k_Td, v_Td)
        o_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        for group in plan.groups:
            k_G1Kd = _gather(self.pool.keys_LPSd[layer], group)
            v_G1Kd = _gather(self.pool.values_LPSd[layer], group)
            q_GnHd = q_THd[group.tokens_Gn]
            if q_GnHd.shape[1] == 1:
                o_GnHd = self._attend(q_GnHd, k_G1Kd, v_G1Kd, group.mask_G1nK)
            else:
                q_GHnd = q_GnHd.transpose(1, 2)
                heads = (-1, q_GHnd.shape[1], -1, -1)
                o_GnHd = self._attend(q_GHnd, k_G1Kd.expand(heads), v_G1Kd.expand(heads), group.mask_G1nK).transpose(1, 2)
            o_THd[group.tokens_Gn] = o_GnHd
        return o_THd

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)


def _gather(pages_PSd: Tensor, group: Group) -> Tensor:
    """The keys or values of a group's rows, copied page by page to where they lie side by side. -> [G, 1, K, d]"""
    num_rows, num_pages = group.pages_Gp.shape
    # index_select copies whole pages; advanced indexing takes 1.6 to 1.8 times as long for the same (docs/bench, 2026-11-20).
    gathered_GPSd = pages_PSd.index_select(0, group.pages_Gp.flatten())
    return gathered_GPSd.view(num_rows, 1, num_pages * pages_PSd.shape[1], -1)[:, :, : group.num_keys]


def create(pool: KVPool, scale: float) -> CpuBackend:
    return CpuBackend(pool, scale)
