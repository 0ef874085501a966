"""A batch slot by slot and page by page, for the backends that are made of torch's operations.

Shape letters: T tokens of the step, n stacks of pages of a group of layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import LayerGroup, pages_for
from model.batch import Batch
from model.step import Row


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one row's tokens are on T, and what they attend to: the `num_keys` keys on `pages`,
    causally, within `window`.

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


def group_batches(batch: Batch) -> tuple[GroupBatch, ...]:
    """The batch as each group of layers sees it."""
    return tuple(_group(batch, number, group) for number, group in enumerate(batch.layout.groups))


def _group(batch: Batch, number: int, group: LayerGroup) -> GroupBatch:
    stacks, page_size = group.num_stacks, batch.layout.page_size
    slots: list[list[int]] = [[] for _ in range(stacks)]
    for row in batch.rows:
        pages, positions = row.pages[number], range(row.start, row.start + len(row.tokens))
        for stack in range(stacks):
            slots[stack] += [
                pages[p // page_size * stacks + stack] * page_size + p % page_size
                for p in positions
            ]
    spans = tuple(
        _span(row, first, number, group, page_size)
        for row, first in zip(batch.rows, batch.firsts, strict=True)
    )
    return GroupBatch(
        torch.tensor(slots, dtype=torch.long, device=batch.token_ids_T.device), spans, stacks
    )


def _span(row: Row, first: int, number: int, group: LayerGroup, page_size: int) -> RowSpan:
    end = row.start + len(row.tokens)
    first_page = group.first_seen(row.start) // page_size
    pages = list(
        row.pages[number][
            first_page * group.num_stacks : pages_for(end, page_size) * group.num_stacks
        ]
    )
    return RowSpan(first, len(row.tokens), end - first_page * page_size, group.window, pages)
