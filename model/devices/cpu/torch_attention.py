"""CPU attention by torch: rows with the same number of tokens are computed together by one fused
attention.

With one K and V head, the H queries of a token are H rows of one matrix over the same keys: rows of
a single token are stacked that way, so that K and V are read once for all heads. Longer rows are
compute-bound and instead share one mask between the heads. Rows are grouped by token count and
roughly by length, which limits padding.

Shape letters: T tokens of the step, G rows of a bundle, n tokens of a row, H query heads, d columns
of a key, v of a value, K keys (padded), s stacks of pages, p pages.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.layout import pages_for
from cache.pool import KVPool
from model.batch import Batch
from model.devices.row_spans import GroupBatch, RowSpan, group_batches
from model.layers import Rotation


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows with the same number of tokens. `mask_G1nK` is 0 where a token attends to a key,
    otherwise -inf.
    """

    tokens_Gn: Tensor
    pages_sGp: Tensor
    num_keys: int
    mask_G1nK: Tensor


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What the layers of one group share."""

    slots_sT: Tensor
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """Gathers each bundle's pages and computes attention over them."""

    pool: KVPool
    scale: float

    name: ClassVar = "torch"
    batch_invariant: ClassVar = False
    are_whole: ClassVar = None

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        return tuple(self._group(group) for group in group_batches(batch))

    def _group(self, group: GroupBatch) -> GroupPlan:
        rows_by_shape: dict[tuple[int, int], list[RowSpan]] = defaultdict(list)
        for row in group.rows:
            rows_by_shape[row.num_tokens, row.num_keys.bit_length()].append(row)
        return GroupPlan(
            group.slots_nT,
            tuple(self._bundle(rows, group.num_stacks) for rows in rows_by_shape.values()),
        )

    def _bundle(self, rows: list[RowSpan], num_stacks: int) -> Bundle:
        num_tokens, window = rows[0].num_tokens, rows[0].window
        num_keys = max(row.num_keys for row in rows)
        num_pages = pages_for(num_keys, self.pool.page_size) * num_stacks
        # Padding repeats the row's own pages, masked: another row's could hold a NaN, and 0 * NaN
        # is NaN.
        pages = [(row.pages + row.pages[:num_stacks] * num_pages)[:num_pages] for row in rows]
        pages_sGp = torch.tensor(pages).view(len(rows), -1, num_stacks).permute(2, 0, 1)
        first_G1 = torch.tensor([[row.first] for row in rows])
        start_G1 = torch.tensor([[row.num_keys - num_tokens] for row in rows])
        token_n = torch.arange(num_tokens)
        age_GnK = (start_G1 + token_n)[:, :, None] - torch.arange(num_keys)
        hidden_GnK = age_GnK < 0 if window is None else (age_GnK < 0) | (age_GnK >= window)
        mask_GnK = torch.zeros(hidden_GnK.shape, dtype=self.pool.compute_dtype).masked_fill(
            hidden_GnK, -torch.inf
        )
        return Bundle(first_G1 + token_n, pages_sGp.contiguous(), num_keys, mask_GnK[:, None])

    def run(
        self,
        plan: tuple[GroupPlan, ...],
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
        self.pool.write(layer, group.slots_sT[place.stack], k_Td, v_Tv)
        keys_PSd, values_PSv = self.pool.layer(layer)
        o_THv = q_THd.new_empty(*q_THd.shape[:-1], v_Tv.shape[-1])
        for bundle in group.bundles:
            k_G1Kd = _gather(keys_PSd, bundle.pages_sGp[place.stack], bundle.num_keys, q_THd.dtype)
            # A value within the key is gathered with it, and the whole key is used as value:
            # torch's fused attention needs equal widths; its fallback materialises the keys and
            # logits of every head.
            in_key = self.pool.value_in_key
            v_G1Kv = (
                k_G1Kd
                if in_key
                else _gather(
                    values_PSv, bundle.pages_sGp[place.stack], bundle.num_keys, q_THd.dtype
                )
            )
            q_GnHd = q_THd[bundle.tokens_Gn]
            if q_GnHd.shape[1] == 1:
                o_GnHv = self._attend(q_GnHd, k_G1Kd, v_G1Kv, bundle.mask_G1nK)
            else:
                q_GHnd = q_GnHd.transpose(1, 2)
                heads = (-1, q_GHnd.shape[1], -1, -1)
                o_GnHv = self._attend(
                    q_GHnd, k_G1Kd.expand(heads), v_G1Kv.expand(heads), bundle.mask_G1nK
                ).transpose(1, 2)
            o_THv[bundle.tokens_Gn] = o_GnHv[..., : v_Tv.shape[-1]]
        return o_THv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)


def _gather(pages_PSd: Tensor, pages_Gp: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of a bundle's rows, copied page by page to contiguous memory, in `dtype`.
    -> [G, 1, K, d]
    """
    num_rows, num_pages = pages_Gp.shape
    # index_select copies whole pages; advanced indexing takes 1.6 to 1.8 times as long
    # (docs/bench/history.md, 2026-11-20).
    gathered_GPSd = pages_PSd.index_select(0, pages_Gp.flatten()).to(dtype)
    return gathered_GPSd.view(num_rows, 1, num_pages * pages_PSd.shape[1], -1)[:, :, :num_keys]


def create(pool: KVPool, scale: float, num_heads: int) -> CpuBackend:
    return CpuBackend(pool, scale)
