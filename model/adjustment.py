"""Logit processing before sampling: repetition, frequency and presence penalties, logit bias,
forbidden tokens and token masks, for all rows of a step at once.

Invariant: a row's logits depend on its own logits and sample, bit for bit. Nothing here waits for
the device. It knows nothing of temperatures and filters.

Shape letters: F rows, V vocabulary, X the same as one row, N ids of all rows, M masks, B bytes of a
mask.
"""

from collections.abc import Sequence
from itertools import chain
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.devices.device import Device
from model.draw_words import IN_PROMPT, banned, history_of
from model.step import Sample

_NONE = np.zeros((0, 2), np.int32)


def adjust(device: Device, logits_FV: Tensor, samples: Sequence[Sample]) -> None:
    """Changes float32 logits in contiguous memory: penalties, bias and forbidden tokens, masks.
    Raises IndexError for an id that is not in the vocabulary.
    """
    _penalise(device, logits_FV, samples)
    _add(device, logits_FV, samples)
    _mask(device, logits_FV, samples)


def _penalise(device: Device, logits_FV: Tensor, samples: Sequence[Sample]) -> None:
    """Repetition penalty (Keskar et al. 2019, section 4.1), then frequency and presence penalties
    (as OpenAI's API defines them).
    """
    histories = [history_of(sample) for sample in samples]
    pairs = [_NONE if history is None else history.pairs() for history in histories]
    counts, settings = list(map(len, pairs)), [sample.sampling for sample in samples]
    if not any(counts):
        return
    row_N = torch.repeat_interleave(device.upload(counts), output_size=sum(counts))
    id_N, times_N = device.upload(torch.from_numpy(np.concatenate(pairs))).unbind(1)
    logits_X = logits_FV.view(-1)
    place_N = torch.add(id_N, row_N, alpha=logits_FV.shape[1])
    repetition_N = device.upload([s.repetition_penalty for s in settings], torch.float32)[row_N]
    x_N = logits_X[place_N]
    x_N = torch.where(x_N > 0, x_N / repetition_N, x_N * repetition_N)
    if any(s.frequency_penalty or s.presence_penalty for s in settings):
        penalties = [(s.frequency_penalty, s.presence_penalty) for s in settings]
        frequency_N, presence_N = device.upload(penalties, torch.float32)[row_N].unbind(1)
        times_N = times_N & (IN_PROMPT - 1)
        x_N -= frequency_N * times_N + presence_N * (times_N > 0)
    logits_X[place_N] = x_N


def _add(device: Device, logits_FV: Tensor, samples: Sequence[Sample]) -> None:
    """Adds the logit bias, and -inf to forbidden tokens."""
    entries = [
        {**sample.sampling.logit_bias, **dict.fromkeys(banned(sample), -inf)} for sample in samples
    ]
    if not any(entries):
        return
    num_tokens = logits_FV.shape[1]
    if (largest := max(chain.from_iterable(entries))) >= num_tokens:
        raise IndexError(f"id {largest} is not in the vocabulary of {num_tokens} tokens")
    places = [row * num_tokens + id for row, each in enumerate(entries) for id in each]
    values = [value for each in entries for value in each.values()]
    logits_FV.view(-1)[device.upload(places)] += device.upload(values, torch.float32)


def _mask(device: Device, logits_FV: Tensor, samples: Sequence[Sample]) -> None:
    """Sets logits to -inf where a mask (allowed_token_ids, a grammar) excludes the token."""
    masks = [(sample.sampling.allowed_tokens, sample.mask) for sample in samples]
    rows = [row for row, each in enumerate(masks) if any(each)]
    if not rows:
        return
    num_tokens = logits_FV.shape[1]
    allowed_MB = np.stack([_allowed(masks[row], -(-num_tokens // 8)) for row in rows])
    bytes_MB = device.upload(torch.from_numpy(allowed_MB))
    bit_8 = torch.arange(8, dtype=torch.uint8, device=bytes_MB.device)
    bits_MV = ((bytes_MB[:, :, None] >> bit_8) & 1).flatten(1)[:, :num_tokens]
    rows_M = device.upload(rows)
    logits_FV[rows_M] = logits_FV[rows_M].masked_fill(bits_MV == 0, -inf)


def _allowed(masks: Sequence[bytes | None], num_bytes: int) -> NDArray[np.uint8]:
    """The tokens that all masks allow. A mask ends with its largest id."""
    bits_B = np.full(num_bytes, 0xFF, np.uint8)
    for mask in filter(None, masks):
        bits_B[: len(mask)] &= np.frombuffer(mask, np.uint8)[:num_bytes]
        bits_B[len(mask) :] = 0
    return bits_B
