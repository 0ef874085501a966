"""StepPlan -> the tensors of one step, which are discarded after it.

Shape letters: T tokens of the step, S draws.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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

    plan: StepPlan
    layout: CacheLayout
    token_ids_T: Tensor
    position_ids_T: Tensor
    sampled_S: Tensor
    """Index on T of each token after which one is drawn: the last of every row that samples, and
    those before its drafts."""
    firsts: tuple[int, ...]
    """Index on T of each row's first token."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.plan.rows


def build_batch(plan: StepPlan, layout: CacheLayout, upload: Upload) -> Batch:
    """The tensors of `plan`, on the device to which `upload` copies."""
    ids, positions, sampled, firsts = list[Any](), list[Any](), list[int](), [0]
    if plan.decode is not None:
        num_rows = len(plan.decode)
        ids.append(plan.decode.token_ids_R)
        positions.append(plan.decode.positions_R)
        sampled += range(num_rows)
        firsts += range(1, num_rows + 1)
    for row in plan.listed:
        first, count = firsts[-1], len(row.tokens)
        # Several times as fast as an array made from the list at once.
        ids.append(np.frombuffer(array("q", row.tokens), np.int64))
        positions.append(np.arange(row.start, row.start + count))
        firsts.append(first + count)
        if row.sample is not None:
            sampled += range(first + count - 1 - row.drafts, first + count)
    ids_T, positions_T = (
        upload(torch.from_numpy(np.concatenate(x, dtype=np.int64))) for x in (ids, positions)
    )
    return Batch(plan, layout, ids_T, positions_T, upload(sampled, torch.long), tuple(firsts[:-1]))
