"""StepPlan -> the tensors of one step. Built from the plan and thrown away after it; nothing here outlives the step.

Shape letters: T tokens of the step, n stacks of pages of a group of layers, S draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import CacheLayout, LayerGroup, pages_for
from model.step import Row, StepPlan

Numbers = Tensor | Sequence[float] | Sequence[Sequence[float]]
Upload = Callable[..., Tensor]
"""(values, dtype) -> a copy on the device of the step (model.devices.device.Device.upload)"""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one row's tokens lie on T, and what they may attend to: the `num_keys` keys on `pages`, causally, within `window`.

    Key 0 is at the beginning of a page, not always of the row; the row's tokens are the last keys.
    """

    first: int
    num_tokens: int
    num_keys: int
    window: int | None
    pages: list[int]
    """Page i of stack j is at i * num_stacks + j."""


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What the layers of one group share: the slots to write, by stack, and what to read."""

    slots_nT: Tensor
    rows: tuple[RowSpan, ...]
    num_stacks: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step laid end to end."""

    rows: tuple[Row, ...]
    layout: CacheLayout
    token_ids_T: Tensor
    position_ids_T: Tensor
    sampled_S: Tensor
    """Index on T of each token after which one is drawn: the last of every row that samples, and those before its drafts."""
    firsts: tuple[int, ...]
    """Index on T of each row's first token."""
    upload: Upload

    def groups(self) -> tuple[GroupBatch, ...]:
        """The rows slot by slot and page by page, for backends that are made of torch's operations."""
        return tuple(self._group(number, group) for number, group in enumerate(self.layout.groups))

    def _group(self, number: int, group: LayerGroup) -> GroupBatch:
        stacks, page_size = group.num_stacks, self.layout.page_size
        slots: list[list[int]] = [[] for _ in range(stacks)]
        for row in self.rows:
            pages, positions = row.pages[number], range(row.start, row.start + len(row.tokens))
            for stack in range(stacks):
                slots[stack] += [pages[p // page_size * stacks + stack] * page_size + p % page_size for p in positions]
        spans = tuple(_span(row, first, number, group, page_size) for row, first in zip(self.rows, self.firsts, strict=True))
        return GroupBatch(self.upload(slots, torch.long), spans, stacks)


def build_batch(plan: StepPlan, layout: CacheLayout, upload: Upload) -> Batch:
    """The tensors of `plan`, on the device to which `upload` copies."""
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    firsts: list[int] = []
    for row in plan.rows:
        first, tokens = len(token_ids), row.tokens
        firsts.append(first)
        token_ids += tokens
        if len(tokens) == 1:
            positions.append(row.start)
        else:
            positions.extend(range(row.start, row.start + len(tokens)))
        if row.sample is not None:
            sampled.extend(range(len(token_ids) - 1 - row.drafts, len(token_ids)))
    ids_T, positions_T, sampled_S = (upload(x, torch.long) for x in (token_ids, positions, sampled))
    return Batch(plan.rows, layout, ids_T, positions_T, sampled_S, tuple(firsts), upload)


def _span(row: Row, first: int, number: int, group: LayerGroup, page_size: int) -> RowSpan:
    end = row.start + len(row.tokens)
    first_page = group.first_seen(row.start) // page_size
    pages = list(row.pages[number][first_page * group.num_stacks : pages_for(end, page_size) * group.num_stacks])
    return RowSpan(first, len(row.tokens), end - first_page * page_size, group.window, pages)
