"""Logits to drawn tokens, as pure functions. A draw depends on its own row's logits, history and (seed, choice, output index) alone.

There is no generator with state: preempting, replaying or batching a sequence differently cannot change what it draws.

Shape letters: S rows that sample, F rows that need sorting, V vocabulary, N tokens that a request names.
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import inf, isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.devices.cpu.native import library
from model.step import Sample, SampledToken, SampleError
from model.transfer import download, upload

log = logging.getLogger("onehead.engine")

NOT_FINITE = SampleError("the logits of this request are not finite", code="numerical_error")
NOT_SAMPLED = SampleError("an internal error in drawing this request's token", code="sampling_error")
NOTHING_ALLOWED = SampleError("what it asks for leaves no token that is allowed", refused=True)
SHORTEST = 1e-300
DRAWN_AT_ONCE = 64
"""Rows: sorting holds a dozen numbers of 64 bits for each of their logits."""
GREEDY_BELOW = 1e-5
"""Temperatures under this take the likeliest token: dividing by them would overflow."""


def philox_exponentials(seed: int, choice: int, index: int, count: int) -> NDArray[np.float64]:
    """`count` numbers of the exponential distribution (mean 1), a pure function of the arguments: Philox (Salmon et al. 2011), whose key is
    the seed and whose counter starts at (choice, index).
    """
    philox = np.random.Philox(key=seed & (2**64 - 1), counter=[0, index, choice, 0])
    return np.random.Generator(philox).standard_exponential(count)


@cache
def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def exponential_noise(keys: Sequence[tuple[int, int, int]], count: int, device: torch.device) -> Tensor:
    """`count` exponentials for each (seed, choice, index). A GPU makes its own, other ones: a host would take longer for them than the GPU
    for the step.
    """
    if _has_kernels(device):
        from model.devices.gpu.draw import exponential_noise_SV

        return exponential_noise_SV(keys, count, device)
    return upload(torch.from_numpy(np.stack([philox_exponentials(*key, count) for key in keys])), device)


class Draws:
    """Tokens that have been drawn for some rows, or will have been when the device gets there."""

    def __init__(self, parts: "Sequence[_Part | SampleError]", device: torch.device) -> None:
        self._parts, self._device = parts, device

    def tokens_S(self) -> Tensor:
        """On the device; 0 where none could be drawn."""
        zero = torch.zeros(1, dtype=torch.long, device=self._device)
        return torch.cat([part.tokens_S if isinstance(part, _Part) else zero for part in self._parts])

    def read(self) -> list[SampledToken | SampleError]:
        """One outcome for each row, when the device has got there."""
        return [outcome for part in self._parts for outcome in (part.read() if isinstance(part, _Part) else [part])]


def draw(logits_SV: Tensor, samples: Sequence[Sample]) -> list[SampledToken | SampleError]:
    """As `begin_draw`, waited for."""
    return begin_draw(logits_SV, samples).read()


def begin_draw(logits_SV: Tensor, samples: Sequence[Sample]) -> Draws:
    """One token for each row. Log-probabilities are the model's own, before penalties, temperature and filters.

    A row whose logits hold no finite maximum (NaN, infinity, every token forbidden) draws nothing: what it drew would be noise. Nor does
    one whose sampling fails for a reason that nobody foresaw; the others draw what they would have drawn. Raises MemoryError, and what
    a broken device raises.
    """
    try:
        return Draws([_Part(logits_SV, samples)], logits_SV.device)
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
        raise
    except Exception:
        _check(logits_SV.device)
        return Draws([_alone(logits_SV[i : i + 1], sample) for i, sample in enumerate(samples)], logits_SV.device)


def _alone(logits_1V: Tensor, sample: Sample) -> "_Part | SampleError":
    try:
        return _Part(logits_1V, [sample])
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
        raise
    except Exception:
        _check(logits_1V.device)
        log.exception("a row could not be sampled")
        return NOT_SAMPLED


def _check(device: torch.device) -> None:
    """Raises what a broken device raises: Triton says of it what it says of anything."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


class _Part:
    """Rows that are drawn together. Nothing here waits for the device before `read`."""

    def __init__(self, logits_SV: Tensor, samples: Sequence[Sample]) -> None:
        logits_SV = logits_SV.float()
        normaliser_S, largest_S, tokens_S = summary(logits_SV)
        adjusted_SV = _adjust(logits_SV, samples)
        if adjusted_SV is not logits_SV:
            largest_S, tokens_S = adjusted_SV.max(dim=-1)
        random = [i for i, sample in enumerate(samples) if sample.sampling.temperature >= GREEDY_BELOW]
        if random and _has_kernels(logits_SV.device):
            plain = [i for i in random if not samples[i].sampling.filters]
            if plain:
                tokens_S[_rows(plain, tokens_S)] = gumbel_max(adjusted_SV, largest_S, plain, [samples[i] for i in plain])
            random = [i for i in random if samples[i].sampling.filters]
        for begin in range(0, len(random), DRAWN_AT_ONCE):
            drawn = random[begin : begin + DRAWN_AT_ONCE]
            rows = _rows(drawn, adjusted_SV)
            tokens_S[rows] = _draw_random(adjusted_SV[rows], [samples[i] for i in drawn])
        logprobs_S = logits_SV.gather(1, tokens_S[:, None])[:, 0] - normaliser_S
        self.tokens_S = tokens_S
        self._tokens_S = download(tokens_S)
        self._numbers_3S = download(torch.stack([logprobs_S, normaliser_S, largest_S]))
        named = [sample.sampling.logprob_token_ids for sample in samples]
        self._tops = _Tops(logits_SV, normaliser_S, [sample.num_top for sample in samples], named)

    def read(self) -> list[SampledToken | SampleError]:
        tokens, (logprobs, normalisers, largest), tops = self._tokens_S.tolist(), self._numbers_3S.tolist(), self._tops.read()
        if all(map(isfinite, normalisers)) and all(map(isfinite, largest)):
            return list(map(SampledToken, tokens, logprobs, tops))
        return list(map(_outcome, tokens, logprobs, normalisers, largest, tops))


def _rows(wanted: list[int], x_SV: Tensor) -> Tensor | slice:
    """What picks these rows of x."""
    return slice(None) if len(wanted) == len(x_SV) else upload(wanted, x_SV.device)


def _outcome(
    token: int, logprob: float, normaliser: float, largest: float, top: tuple[tuple[int, float], ...]
) -> SampledToken | SampleError:
    if isfinite(normaliser) and isfinite(largest):
        return SampledToken(token, logprob, top)
    return NOT_FINITE if not isfinite(normaliser) or largest > -inf else NOTHING_ALLOWED


def summary(logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normaliser_S, largest_S, tokens_S): the logarithm of the sum of each row's exponentials, its largest logit and which one that is.

    By our kernel where there is one: torch's sum of a row depends on how many rows there are.
    """
    if _has_kernels(logits_SV.device):
        from model.devices.gpu.launches import summary as by_triton

        return by_triton(logits_SV)
    kernels = library() if logits_SV.device.type == "cpu" else None
    if kernels is None:
        return logits_SV.logsumexp(dim=-1), *logits_SV.max(dim=-1)
    logits_SV = logits_SV.contiguous()
    normaliser_S, largest_S = logits_SV.new_empty(2, len(logits_SV))
    tokens_S = torch.empty(len(logits_SV), dtype=torch.long)
    addresses = (ctypes.c_void_p(x.data_ptr()) for x in (logits_SV, normaliser_S, largest_S, tokens_S))
    kernels.summarise_logits(*addresses, *map(ctypes.c_int64, (*logits_SV.shape, torch.get_num_threads())))
    return normaliser_S, largest_S, tokens_S


class Scores:
    """The log-probability, rank and likeliest alternatives of each row's known token, under the model's own distribution; to be read when
    the device has got there.
    """

    def __init__(self, logits_SV: Tensor, targets: Sequence[int], num_tops: Sequence[int]) -> None:
        logits_SV = logits_SV.float()
        normaliser_S = summary(logits_SV)[0]
        chosen_S1 = logits_SV.gather(1, upload(targets, logits_SV.device)[:, None])
        self._targets = targets
        self._logprobs_S = download(chosen_S1[:, 0] - normaliser_S)
        self._ranks_S = download((logits_SV >= chosen_S1).sum(dim=-1))
        self._tops = _Tops(logits_SV, normaliser_S, num_tops)

    def read(self) -> list[SampledToken]:
        return [
            SampledToken(*row)
            for row in zip(self._targets, self._logprobs_S.tolist(), self._tops.read(), self._ranks_S.tolist(), strict=True)
        ]


class _Tops:
    """For each row its `num_tops` likeliest tokens with their log-probabilities, or the tokens that a request has named."""

    def __init__(self, logits_SV: Tensor, normaliser_S: Tensor, num_tops: Sequence[int], named: Sequence[Sequence[int]] = ()) -> None:
        self._num_tops = num_tops
        self._named = named
        if most := max(map(len, named), default=0):
            ids_SN = upload([(*ids, *[0] * (most - len(ids))) for ids in named], logits_SV.device)
            self._named_SN = download(logits_SV.gather(1, ids_SN) - normaliser_S[:, None])
        self._rows = [i for i, count in enumerate(num_tops) if count]
        if self._rows:
            most = min(max(num_tops), logits_SV.shape[-1])
            rows = _rows(self._rows, logits_SV)
            chosen_FV = logits_SV[rows]
            # A GPU's topk goes about it in another way where there are many rows, and takes others of equal logits.
            ordered_FV = chosen_FV if chosen_FV.device.type == "cpu" else _order(chosen_FV)
            ids_FK = ordered_FV.topk(most, dim=-1).indices
            self._ids_FK, self._logprobs_FK = download(ids_FK), download(chosen_FV.gather(1, ids_FK) - normaliser_S[rows, None])

    def read(self) -> list[tuple[tuple[int, float], ...]]:
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(self._num_tops)
        if self._rows:
            for i, ids, logprobs in zip(self._rows, self._ids_FK.tolist(), self._logprobs_FK.tolist(), strict=True):
                tops[i] = tuple(zip(ids, logprobs, strict=True))[: self._num_tops[i]]
        if any(self._named):
            for i, (ids, logprobs) in enumerate(zip(self._named, self._named_SN.tolist(), strict=True)):
                tops[i] = tuple(zip(ids, logprobs, strict=False)) or tops[i]
        return tops


def _order(logits_FV: Tensor) -> Tensor:
    """Whole numbers, no two of a row alike, that are ordered as the logits are, equal ones with the first id first."""
    bits_FV = logits_FV.contiguous().view(torch.int32)
    # A float's bits count up with it from 0 on, and down below.
    ordered_FV = torch.where(bits_FV < 0, bits_FV ^ 0x7FFFFFFF, bits_FV).long()
    return (ordered_FV << 32) - torch.arange(logits_FV.shape[-1], device=logits_FV.device)


def _adjust(logits_SV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Logits after penalties, bias and forbidden tokens. Copies only where some row asks for any of them."""
    rows = [i for i, sample in enumerate(samples) if sample.sampling.adjusts or sample.forbidden or sample.mask is not None]
    if not rows:
        return logits_SV
    adjusted_SV = logits_SV.clone()
    for i in rows:
        _adjust_row(adjusted_SV[i], samples[i])
    return adjusted_SV


def _adjust_row(logits_V: Tensor, sample: Sample) -> None:
    s = sample.sampling
    if s.repetition_penalty != 1.0:
        seen = upload([*sample.prompt, *sample.output], logits_V.device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if sample.output and (s.frequency_penalty or s.presence_penalty):
        ids = upload(sample.output, logits_V.device)
        # torch.bincount waits for a GPU.
        counts_V = torch.zeros_like(logits_V, dtype=torch.long).scatter_add_(0, ids, torch.ones_like(ids))
        logits_V -= s.frequency_penalty * counts_V + s.presence_penalty * (counts_V > 0)
    if s.logit_bias:
        ids = upload(list(s.logit_bias), logits_V.device)
        logits_V[ids] += upload(list(s.logit_bias.values()), logits_V.device)
    banned = [*sample.forbidden, *(word[-1] for word in s.bad_words if _stands_before(sample.output, word))]
    if banned:
        # A number that is assigned by index is copied to a GPU first, and that waits for it.
        logits_V.index_fill_(0, upload(banned, logits_V.device), -torch.inf)
    if s.allowed_token_ids:
        allowed_V = torch.zeros_like(logits_V, dtype=torch.bool)
        allowed_V.index_fill_(0, upload(s.allowed_token_ids, logits_V.device), True)
        logits_V.masked_fill_(~allowed_V, -torch.inf)
    if sample.mask is not None:
        bits = np.unpackbits(np.frombuffer(sample.mask, np.uint8), count=len(logits_V), bitorder="little")
        logits_V.masked_fill_(upload(torch.from_numpy(bits), logits_V.device) == 0, -torch.inf)


def _stands_before(output: Sequence[int], word: Sequence[int]) -> bool:
    """Whether `output` ends with all of `word` but its last token."""
    length = len(word) - 1
    return length <= len(output) and list(output[len(output) - length :]) == list(word[:-1])


def gumbel_max(logits_SV: Tensor, largest_S: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> Tensor:
    """What `_draw_random` does for rows that filter nothing, in one launch and without a copy of theirs."""
    from model.devices.gpu.draw import gumbel_max_S

    settings = [(s.sampling.temperature, s.sampling.min_p) for s in samples]
    return gumbel_max_S(logits_SV, largest_S, rows, _keys(samples), settings)


def _keys(samples: Sequence[Sample]) -> list[tuple[int, int, int]]:
    return [(s.sampling.seed, s.sampling.choice, s.index) for s in samples]


def _draw_random(logits_SV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Draws as races: token v arrives after an exponential time of rate p_v, and the first one is drawn (the Gumbel-max trick). -> tokens_S

    Logits that differ in their last bits, as those of other batches and of replays do, change a draw only where two tokens arrive almost
    together. Drawn from the cumulative sum, every token's edge would move a little.
    """
    temperature_S = upload([s.sampling.temperature for s in samples], logits_SV.device, torch.float64)
    scaled_SV = logits_SV.double() / temperature_S[:, None]
    # Up to a factor, of which nothing here depends: torch's sum of a row may depend on where the row lies.
    probs_SV = (scaled_SV - scaled_SV.amax(dim=-1, keepdim=True)).exp()
    min_p_S = upload([s.sampling.min_p for s in samples], logits_SV.device, torch.float64)
    sorts = [i for i, s in enumerate(samples) if s.sampling.top_k > 0 or s.sampling.top_p < 1.0]
    if sorts:
        rows = _rows(sorts, probs_SV)
        probs_SV[rows] = _keep_likeliest(probs_SV[rows], [samples[i] for i in sorts])
    typical = [i for i, s in enumerate(samples) if s.sampling.typical_p < 1.0]
    if typical:
        rows = _rows(typical, probs_SV)
        probs_SV[rows] = _keep_typical(probs_SV[rows], [samples[i] for i in typical])
    probs_SV = probs_SV.masked_fill(probs_SV < probs_SV.amax(dim=-1, keepdim=True) * min_p_S[:, None], 0.0)
    times_SV = exponential_noise(_keys(samples), probs_SV.shape[-1], probs_SV.device)
    # No time is 0: a token of probability 0 would win.
    return probs_SV.div_(times_SV.clamp_(min=SHORTEST)).argmax(dim=-1)


def _keep_likeliest(probs_FV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities with everything outside top-k, then outside top-p of what is left, set to 0."""
    vocab_size = probs_FV.shape[-1]
    top_k_F = upload([s.sampling.top_k if s.sampling.top_k > 0 else vocab_size for s in samples], probs_FV.device)
    top_p_F = upload([s.sampling.top_p for s in samples], probs_FV.device, probs_FV.dtype)
    sorted_FV, order_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=probs_FV.device)
    sorted_FV = sorted_FV.masked_fill(rank_V >= top_k_F[:, None], 0.0)
    outside_FV = _outside(sorted_FV, top_p_F) & (top_p_F < 1.0)[:, None]
    return torch.zeros_like(probs_FV).scatter_(1, order_FV, sorted_FV.masked_fill(outside_FV, 0.0))


def _keep_typical(probs_FV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities with all but the most typical tokens set to 0: those whose surprise is nearest to the distribution's entropy,
    as many as hold typical_p of the probability (Meister et al. 2022, section 3).
    """
    typical_p_F = upload([s.sampling.typical_p for s in samples], probs_FV.device, probs_FV.dtype)
    normal_FV = probs_FV / _total(probs_FV)
    surprise_FV = -normal_FV.log()
    entropy_F1 = _total(torch.special.entr(normal_FV))
    order_FV = (surprise_FV - entropy_F1).abs().sort(dim=-1, stable=True).indices
    sorted_FV = normal_FV.gather(1, order_FV)
    outside_FV = _outside(sorted_FV, typical_p_F)
    return torch.zeros_like(probs_FV).scatter_(1, order_FV, sorted_FV.masked_fill(outside_FV, 0.0))


def _outside(sorted_FV: Tensor, share_F: Tensor) -> Tensor:
    """What lies behind the first numbers of a row that hold this share of its sum. However small that is, the first one is among them."""
    parts_FV = _whole(sorted_FV)
    outside_FV = parts_FV.cumsum(dim=-1) - parts_FV >= share_F[:, None] * parts_FV.sum(dim=-1, keepdim=True)
    outside_FV[:, 0] = False
    return outside_FV


def _total(x_FV: Tensor) -> Tensor:
    """The sum of each row. -> x_F1"""
    return _whole(x_FV).sum(dim=-1, keepdim=True).double() / _unit(x_FV)


def _whole(x_FV: Tensor) -> Tensor:
    """Numbers from 0 to 1 as multiples of a tiny one: sums of integers are the same in every order, and torch's order depends on how many
    rows there are, and on a GPU on the moment.
    """
    return (x_FV * _unit(x_FV)).round().long()


def _unit(x_FV: Tensor) -> float:
    """How many of them are 1: the sum of a row fits into 64 bits."""
    return 2.0 ** (62 - x_FV.shape[-1].bit_length())
