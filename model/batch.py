"""StepPlan -> the tensors of one step, which are discarded after it.

Shape letters: T tokens of the step, K those of them whose logits are wanted, S draws.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
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
    tail: "BatchTail | None" = None
    """The tokens that pass the layers after those that store keys and values, if not all do."""
    bidirectional: bool = False
    """A token attends to those after it too: rows are whole texts."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.plan.rows


class BatchTail(NamedTuple):
    """Of each row of a step the tokens from the first one on whose logits are wanted."""

    rows_K: Tensor
    """Their indices on T."""
    batch: Batch
    """Its rows and their places, for `Backend.plan`: of ids and draws it says nothing."""


def build_batch(
    plan: StepPlan,
    layout: CacheLayout,
    upload: Upload,
    has_tail: bool = False,
    bidirectional: bool = False,
) -> Batch:
    """The tensors of `plan`, on the device to which `upload` copies. `has_tail`: whether the model
    has layers that only tokens pass whose logits are wanted; `bidirectional`: as in Batch.
    """
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
    tail = _tail(plan, layout, upload, ids_T, positions_T) if has_tail else None
    sampled_S = upload(sampled, torch.long)
    places = tuple(firsts[:-1])
    return Batch(plan, layout, ids_T, positions_T, sampled_S, places, tail, bidirectional)


def _tail(
    plan: StepPlan, layout: CacheLayout, upload: Upload, ids_T: Tensor, positions_T: Tensor
) -> BatchTail | None:
    """None where all tokens belong to it."""
    num_decoding = plan.num_decoding
    rows, kept, begin = list[Row](), [*range(num_decoding)], num_decoding
    for row in plan.listed:
        first, count = _first_wanted(row), len(row.tokens)
        kept += range(begin + first, begin + count)
        begin += count
        if first < count:
            rows.append(replace(row, tokens=row.tokens[first:], start=row.start + first))
    if len(kept) == begin:
        return None
    rows_K = upload(kept, torch.long)
    counts = [1] * num_decoding + [len(row.tokens) for row in rows]
    return BatchTail(
        rows_K,
        Batch(
            StepPlan(tuple(rows), decode=plan.decode),
            layout,
            ids_T[rows_K],
            positions_T[rows_K],
            upload((), torch.long),
            tuple(accumulate(counts, initial=0))[:-1],
        ),
    )


def _first_wanted(row: Row) -> int:
    """The first of a row's tokens whose logits are wanted; their number if none are."""
    count = len(row.tokens)
    sampled = count if row.sample is None else count - 1 - row.drafts
    return sampled if row.scoring is None else min(sampled, row.scoring.first)
