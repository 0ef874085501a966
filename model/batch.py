"""StepPlan -> the tensors of one step, which are discarded after it.

Shape letters: T tokens of the step, S draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import CacheLayout
from model.step import Row, StepPlan

Numbers = Tensor | Sequence[float] | Sequence[Sequence[float]]
Upload = Callable[..., Tensor]
"""(values, dtype) -> a copy on the device of the step (model.devices.device.Device.upload)"""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, concatenated."""

    rows: tuple[Row, ...]
    layout: CacheLayout
    token_ids_T: Tensor
    position_ids_T: Tensor
    sampled_S: Tensor
    """Index on T of each token after which one is drawn: the last of every row that samples, and those before its drafts."""
    firsts: tuple[int, ...]
    """Index on T of each row's first token."""


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
    return Batch(plan.rows, layout, ids_T, positions_T, sampled_S, tuple(firsts))
