"""Sampling tokens from logits. A draw depends only on its own row's logits, its history and (seed,
choice, output index).

There is no generator state: preempting, replaying or batching a sequence differently cannot change
what it draws.

Shape letters: S rows that sample, F rows that need more, V vocabulary, N tokens named by a
request, or settings of a row, R results of a row.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, starmap
from math import inf, isfinite
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.adjustment import adjust
from model.decode import DecodeStep
from model.devices.device import Device, RowDraws
from model.draw_words import (
    GREEDY_BELOW,
    is_adjusted,
    is_filtered,
    is_typical,
    needs_more,
    settings_SN,
)
from model.step import Outcome, Sample, SampledToken, SampleError

NOT_FINITE = SampleError("the logits of this request are not finite", code="numerical_error")
NOT_FINITE_STATES = SampleError(
    "a numerical error: the model's states for this request are not finite", code="numerical_error"
)
NOTHING_ALLOWED = SampleError(
    "allowed_token_ids, bad_words, min_tokens or its grammar exclude every token", refused=True
)
ALL_FINITE = 3
"""A row's last result (RowDraws.results_SR) where everything is finite."""
LEAST_NOISE = 1e-300
DRAWN_AT_ONCE = 64
"""Random draws that are computed at a time, where the device has no kernel for them: they take
about a dozen 64-bit numbers for each of their logits.
"""


class Draws(Protocol):
    """Tokens drawn for some rows, which the device may still be computing."""

    def read(self) -> list[Outcome]:
        """One outcome for each row. The device must have computed them."""


class Vectors:
    """What a model makes of texts in place of tokens: vectors_SE."""

    def __init__(self, device: Device, vectors_SE: Tensor) -> None:
        self._vectors_SE = device.download(vectors_SE.float())

    def read(self) -> list[Outcome]:
        return [
            SampledToken(0, 0.0, vector=vector_E.numpy().tobytes())
            if vector_E.isfinite().all()
            else NOT_FINITE_STATES
            for vector_E in self._vectors_SE
        ]


class Captured(NamedTuple):
    """The draws that kernels have made already for all rows of a step, by these settings."""

    draws: RowDraws
    settings_SN: Tensor


def begin_draw(
    device: Device,
    logits_SV: Tensor,
    samples: Sequence[Sample],
    decode: DecodeStep | None = None,
    drawn_S: Tensor | None = None,
    captured: Captured | None = None,
) -> Draws:
    """One token for each row: those of `decode`, then those of `samples`. `drawn_S` holds them too.
    Log-probabilities are the model's own, before penalties, temperature and filters.

    A row without a finite largest logit (NaN, infinity, every token forbidden) draws nothing: its
    token would be noise.
    """
    if captured is None and (draws := device.row_draws(*logits_SV.shape)) is not None:
        settings = (
            settings_SN(samples)
            if decode is None
            else np.concatenate([decode.settings_RN, settings_SN(samples)])
        )
        captured = Captured(draws, device.upload(torch.from_numpy(settings)))
        draws.draw(logits_SV, captured.settings_SN, drawn_S)
    if captured is not None:
        known = decode.current_samples() if decode is not None and decode.needs_samples else ()
        special = {}
        if known or samples:
            listed = enumerate(samples, start=0 if decode is None else len(decode))
            special = {
                i: sample for i, sample in chain(enumerate(known), listed) if needs_more(sample)
            }
        return KernelDrawn(device, logits_SV, special, drawn_S, captured)
    drawn = TorchDrawn(
        device, logits_SV, samples if decode is None else [*decode.current_samples(), *samples]
    )
    if drawn_S is not None:
        drawn_S[: len(logits_SV)].copy_(drawn.tokens_S)
    return drawn


class KernelDrawn:
    """Draws of the device's kernels, which have drawn for every row already; `special` rows, which
    need more than kernels know, are drawn again, or told what else was likely.
    """

    def __init__(
        self,
        device: Device,
        logits_SV: Tensor,
        special: Mapping[int, Sample],
        drawn_S: Tensor | None,
        captured: Captured,
    ) -> None:
        self._device = device
        self._logits_SV = logits_SV
        self._special = special
        self._drawn_S = drawn_S
        self._captured = captured
        if special and (
            again := [
                i for i, sample in special.items() if is_adjusted(sample) or is_filtered(sample)
            ]
        ):
            self._redraw(again)
        results_SR = captured.draws.results_SR[: len(logits_SV)]
        self._results_SR = device.download(results_SR)
        self._tops: _Tops | None = None
        if special and any(
            sample.num_top or sample.sampling.logprob_token_ids for sample in special.values()
        ):
            num_tops, named = [0] * len(logits_SV), list[Sequence[int]]([()]) * len(logits_SV)
            for i, sample in special.items():
                num_tops[i], named[i] = sample.num_top, sample.sampling.logprob_token_ids
            self._tops = _Tops(
                device, logits_SV, results_SR[:, 2].view(torch.float32), num_tops, named
            )

    def _redraw(self, rows: list[int]) -> None:
        samples, (draws, settings) = [self._special[i] for i in rows], self._captured
        adjusted_FV = None
        typical = [i for i, sample in enumerate(samples) if is_typical(sample)]
        if typical or any(map(is_adjusted, samples)):
            adjusted_FV = self._logits_SV[self._device.upload(rows)].float()
            adjust(self._device, adjusted_FV, samples)
            for begin in range(0, len(typical), DRAWN_AT_ONCE):
                drawn = typical[begin : begin + DRAWN_AT_ONCE]
                index = self._device.upload(drawn)
                part_FV = adjusted_FV[index]
                probs_FV = _filtered(self._device, part_FV, [samples[i] for i in drawn])
                adjusted_FV[index] = part_FV.masked_fill(probs_FV == 0.0, -torch.inf)
        draws.redraw(self._logits_SV, settings, self._drawn_S, rows, samples, adjusted_FV)

    def read(self) -> list[Outcome]:
        results = self._results_SR.numpy()
        tokens = results[:, 0].tolist()
        logprobs = results[:, 1].view(np.float32).tolist()
        states = results[:, 4]
        tops: Sequence[tuple[tuple[int, float], ...]] = (
            [()] * len(tokens) if self._tops is None else self._tops.read()
        )
        if not self._special and states.tolist().count(ALL_FINITE) == len(states):
            return list(map(SampledToken, tokens, logprobs, tops))
        outcomes = list(
            map(_outcome, tokens, logprobs, *results[:, 2:4].view(np.float32).T.tolist(), tops)
        )
        for row in (states & 1 == 0).nonzero()[0].tolist():
            outcomes[row] = NOT_FINITE_STATES
        return outcomes


class TorchDrawn:
    """Draws of torch's operations. Nothing here waits for the device before `read`."""

    def __init__(self, device: Device, logits_SV: Tensor, samples: Sequence[Sample]) -> None:
        logits_SV = logits_SV.float()
        normaliser_S, largest_S, tokens_S = device.summary(logits_SV)
        adjusted_SV = logits_SV
        if any(map(is_adjusted, samples)):
            adjusted_SV = logits_SV.clone(memory_format=torch.contiguous_format)
            adjust(device, adjusted_SV, samples)
            largest_S, tokens_S = adjusted_SV.max(dim=-1)
        random = [
            i for i, sample in enumerate(samples) if sample.sampling.temperature >= GREEDY_BELOW
        ]
        for begin in range(0, len(random), DRAWN_AT_ONCE):
            drawn = random[begin : begin + DRAWN_AT_ONCE]
            rows = _rows(device, drawn, adjusted_SV)
            tokens_S[rows] = _draw_random(device, adjusted_SV[rows], [samples[i] for i in drawn])
        logprobs_S = logits_SV.gather(1, tokens_S[:, None])[:, 0] - normaliser_S
        self.tokens_S = tokens_S
        self._tokens_S = device.download(tokens_S)
        self._numbers_3S = device.download(torch.stack([logprobs_S, normaliser_S, largest_S]))
        named = [sample.sampling.logprob_token_ids for sample in samples]
        self._tops = _Tops(
            device, logits_SV, normaliser_S, [sample.num_top for sample in samples], named
        )

    def read(self) -> list[Outcome]:
        tokens = self._tokens_S.tolist()
        (logprobs, normalisers, largest) = self._numbers_3S.tolist()
        tops = self._tops.read()
        if all(map(isfinite, normalisers)) and all(map(isfinite, largest)):
            return list(map(SampledToken, tokens, logprobs, tops))
        return list(map(_outcome, tokens, logprobs, normalisers, largest, tops))


def _rows(device: Device, wanted: list[int], x_SV: Tensor) -> Tensor | slice:
    """An index that selects these rows of x."""
    return slice(None) if len(wanted) == len(x_SV) else device.upload(wanted)


def _outcome(
    token: int,
    logprob: float,
    normaliser: float,
    largest: float,
    top: tuple[tuple[int, float], ...],
) -> Outcome:
    if isfinite(normaliser) and isfinite(largest):
        return SampledToken(token, logprob, top)
    return NOT_FINITE if not isfinite(normaliser) or largest > -inf else NOTHING_ALLOWED


class Scores:
    """The log-probability, rank and likeliest alternatives of each row's known token, under the
    model's own distribution. To be read once the device has computed them.
    """

    def __init__(
        self, device: Device, logits_SV: Tensor, targets: Sequence[int], num_tops: Sequence[int]
    ) -> None:
        logits_SV = logits_SV.float()
        normaliser_S = device.summary(logits_SV)[0]
        chosen_S1 = logits_SV.gather(1, device.upload(targets)[:, None])
        self._targets = targets
        self._logprobs_S = device.download(chosen_S1[:, 0] - normaliser_S)
        self._ranks_S = device.download((logits_SV >= chosen_S1).sum(dim=-1))
        self._tops = _Tops(device, logits_SV, normaliser_S, num_tops)

    def read(self) -> list[SampledToken]:
        logprobs, ranks = self._logprobs_S.tolist(), self._ranks_S.tolist()
        scores = zip(self._targets, logprobs, self._tops.read(), ranks, strict=True)
        return list(starmap(SampledToken, scores))


class _Tops:
    """For each row its `num_tops` likeliest tokens with their log-probabilities, or the tokens
    named by its request.
    """

    def __init__(
        self,
        device: Device,
        logits_SV: Tensor,
        normaliser_S: Tensor,
        num_tops: Sequence[int],
        named: Sequence[Sequence[int]] = (),
    ) -> None:
        self._num_tops = num_tops
        self._named = named
        if most := max(map(len, named), default=0):
            ids_SN = device.upload([(*ids, *[0] * (most - len(ids))) for ids in named])
            self._named_SN = device.download(
                logits_SV.gather(1, ids_SN).float() - normaliser_S[:, None]
            )
        self._rows = [i for i, count in enumerate(num_tops) if count]
        if self._rows:
            most = min(max(num_tops), logits_SV.shape[-1])
            rows = _rows(device, self._rows, logits_SV)
            chosen_FV = logits_SV[rows].float()
            ids_FK = device.largest(chosen_FV, most)
            logprobs_FK = chosen_FV.gather(1, ids_FK) - normaliser_S[rows, None]
            self._ids_FK, self._logprobs_FK = device.download(ids_FK), device.download(logprobs_FK)

    def read(self) -> list[tuple[tuple[int, float], ...]]:
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(self._num_tops)
        if self._rows:
            for i, ids, logprobs in zip(
                self._rows, self._ids_FK.tolist(), self._logprobs_FK.tolist(), strict=True
            ):
                tops[i] = tuple(zip(ids, logprobs, strict=True))[: self._num_tops[i]]
        if any(self._named):
            for i, (ids, logprobs) in enumerate(
                zip(self._named, self._named_SN.tolist(), strict=True)
            ):
                tops[i] = tuple(zip(ids, logprobs, strict=False)) or tops[i]
        return tops


def philox_exponentials(seed: int, choice: int, index: int, count: int) -> NDArray[np.float64]:
    """`count` exponentially distributed numbers (mean 1), a pure function of the arguments: Philox
    (Salmon et al. 2011) with the seed as its key and a counter that starts at (choice, index).
    """
    philox = np.random.Philox(key=seed & (2**64 - 1), counter=[0, index, choice, 0])
    return np.random.Generator(philox).standard_exponential(count)


def _draw_random(device: Device, logits_SV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Draws by the Gumbel-max trick in its exponential form: the token with the largest p_v /
    noise_v. -> tokens_S

    Logits that differ in their last bits, as between batches or replays, change a draw only if two
    tokens are almost equal. Drawing from the cumulative sum would move every token's boundary a
    little.
    """
    probs_SV = _filtered(device, logits_SV, samples)
    min_p_S = device.upload([s.sampling.min_p for s in samples], torch.float64)
    probs_SV = probs_SV.masked_fill(
        probs_SV < probs_SV.amax(dim=-1, keepdim=True) * min_p_S[:, None], 0.0
    )
    noises = [
        philox_exponentials(s.sampling.seed, s.sampling.choice, s.index, logits_SV.shape[-1])
        for s in samples
    ]
    noise_SV = device.upload(torch.from_numpy(np.stack(noises)))
    # Never 0, where a token of probability 0 would win.
    return probs_SV.div_(noise_SV.clamp_(min=LEAST_NOISE)).argmax(dim=-1)


def _filtered(device: Device, logits_SV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Each token's share of the likeliest one's probability, 0 outside top-k, top-p and
    typical-p.
    """
    temperature_S = device.upload([s.sampling.temperature for s in samples], torch.float64)
    scaled_SV = logits_SV.double() / temperature_S[:, None]
    # Not normalised, as nothing here depends on that: torch's sum of a row may depend on its place.
    probs_SV = (scaled_SV - scaled_SV.amax(dim=-1, keepdim=True)).exp()
    likeliest = [i for i, s in enumerate(samples) if s.sampling.top_k > 0 or s.sampling.top_p < 1.0]
    typical = [i for i, s in enumerate(samples) if s.sampling.typical_p < 1.0]
    for keep, wanted in ((_keep_likeliest, likeliest), (_keep_typical, typical)):
        if wanted:
            rows = _rows(device, wanted, probs_SV)
            probs_SV[rows] = keep(device, probs_SV[rows], [samples[i] for i in wanted])
    return probs_SV


def _keep_likeliest(device: Device, probs_FV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities with everything outside top-k, then outside top-p of what is left, set to 0."""
    vocab_size = probs_FV.shape[-1]
    top_k_F = device.upload(
        [s.sampling.top_k if s.sampling.top_k > 0 else vocab_size for s in samples]
    )
    # Without a top-p no finite number is excluded, where rounding might exclude the last ones.
    shares = [s.sampling.top_p if s.sampling.top_p < 1.0 else inf for s in samples]
    sorted_FV, order_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=probs_FV.device)
    sorted_FV = sorted_FV.masked_fill(rank_V >= top_k_F[:, None], 0.0)
    return _keep_first(order_FV, sorted_FV, device.upload(shares, probs_FV.dtype))


def _keep_typical(device: Device, probs_FV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities with all but the most typical tokens set to 0: those whose surprise is nearest
    to the distribution's entropy, as many as hold typical_p of the probability (Meister et al.
    2022, section 3).
    """
    typical_p_F = device.upload([s.sampling.typical_p for s in samples], probs_FV.dtype)
    normal_FV = probs_FV / _total(probs_FV)
    surprise_FV = -normal_FV.log()
    entropy_F1 = _total(torch.special.entr(normal_FV))
    order_FV = (surprise_FV - entropy_F1).abs().sort(dim=-1, stable=True).indices
    sorted_FV = normal_FV.gather(1, order_FV)
    return _keep_first(order_FV, sorted_FV, typical_p_F)


def _keep_first(order_FV: Tensor, sorted_FV: Tensor, share_F: Tensor) -> Tensor:
    """Sorted numbers back in their order, with those set to 0 that follow the first ones which make
    up this share of the row's sum. The first number is always kept.
    """
    parts_FV = _whole(sorted_FV)
    outside_FV = parts_FV.cumsum(dim=-1) - parts_FV >= share_F[:, None] * parts_FV.sum(
        dim=-1, keepdim=True
    )
    outside_FV[:, 0] = False
    kept_FV = sorted_FV.masked_fill(outside_FV, 0.0)
    return torch.zeros_like(sorted_FV).scatter_(1, order_FV, kept_FV)


def _total(x_FV: Tensor) -> Tensor:
    """The sum of each row. -> x_F1"""
    return _whole(x_FV).sum(dim=-1, keepdim=True).double() / _unit(x_FV)


def _whole(x_FV: Tensor) -> Tensor:
    """Numbers from 0 to 1 as integer multiples of a tiny unit: integer sums are the same in every
    order, while torch's order depends on the number of rows, and on a GPU on timing.
    """
    return (x_FV * _unit(x_FV)).round().long()


def _unit(x_FV: Tensor) -> float:
    """How many units are 1, such that the sum of a row fits into 64 bits."""
    return 2.0 ** (62 - x_FV.shape[-1].bit_length())
