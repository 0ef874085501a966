"""StepPlan -> the tensors of one step. Built from the plan and thrown away after it; nothing here outlives the step.

Shape letters: T tokens of the step, R rows, S rows that sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.step import StepPlan


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one row's tokens lie on T, and what they may attend to: positions 0 .. num_keys - 1 on `pages`."""

    first: int
    num_tokens: int
    num_keys: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step laid end to end."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    slots_T: Tensor
    last_tokens_S: Tensor
    """Index on T of the last token of each row that samples."""
    rows: tuple[RowSpan, ...]


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    """The tensors of `plan`, on `device`."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_tokens: list[int] = []
    spans: list[RowSpan] = []
    for row in plan.rows:
        first, count = len(token_ids), len(row.tokens)
        spans.append(RowSpan(first, count, row.start + count, list(row.pages)))
        token_ids.extend(row.tokens)
        for position in range(row.start, row.start + count):
            positions.append(position)
            slots.append(row.pages[position // page_size] * page_size + position % page_size)
        if row.sample is not None:
            last_tokens.append(len(token_ids) - 1)
    ids_T, positions_T, slots_T, last_S = (
        torch.tensor(x, dtype=torch.long, device=device) for x in (token_ids, positions, slots, last_tokens)
    )
    return Batch(ids_T, positions_T, slots_T, last_S, tuple(spans))
