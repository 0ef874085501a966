"""Draws to be made by a GPU's kernels, and what each must be: the race as numpy computes it in
float64, penalties by their definition, filters as torch's on a CPU.

Each check raises AssertionError. The kernels run on the device that a check is given, which may be
the interpreter's.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from model import sampling as torch_sampling
from model.adjustment import adjust
from model.devices import find_device
from model.devices.device import Device
from model.devices.gpu.device import GpuDevice
from model.draw_words import banned, settings_SN
from model.sampling import ALL_FINITE, begin_draw
from model.step import Sample, SampledToken, SampleError, Sampling, bitmap
from tests.support.draw_reference import is_clear, speeds

CPU = find_device("cpu")
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, min_p=0.05),
    Sampling(temperature=1.0, min_p=0.7),
    Sampling(temperature=1e-4),
    Sampling(temperature=1e30),
]


def random_logits(num_rows: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * num_tokens)
    return (torch.randn(num_rows, num_tokens, generator=generator) * 3).to(dtype)


def plain_samples(num_rows: int) -> list[Sample]:
    rng = random.Random(num_rows)
    keys = [(rng.getrandbits(64), rng.randrange(4), rng.randrange(1000)) for _ in range(num_rows)]
    samplings = [
        replace(SAMPLINGS[i % len(SAMPLINGS)], seed=seed, choice=choice)
        for i, (seed, choice, _) in enumerate(keys)
    ]
    return [
        Sample(sampling, (), [0] * index)
        for sampling, (_, _, index) in zip(samplings, keys, strict=True)
    ]


REDRAWN = [
    Sampling(top_p=0.9),
    Sampling(top_p=0.5, temperature=1.5),
    Sampling(top_p=0.02, temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=7, temperature=3.0),
    Sampling(top_k=9, top_p=0.6, temperature=2.0),
    Sampling(top_k=40, top_p=0.95, min_p=0.1, temperature=0.8),
    Sampling(top_k=10**9, top_p=0.7),
    Sampling(top_p=1e-300, temperature=2.0),
    Sampling(top_k=12, top_p=0.9, typical_p=0.8),
]


def ties(logits_SV: Tensor) -> Tensor:
    """Rounded so that many are equal, 0 and -0 among them."""
    return (logits_SV * 2).round() / 2


def adjusted_samples(num_tokens: int) -> list[Sample]:
    rng = random.Random(num_tokens)
    history = [rng.randrange(num_tokens) for _ in range(300)]
    allowed = bitmap(rng.sample(range(num_tokens), num_tokens // 2))
    mask = bitmap(rng.sample(range(num_tokens - 9), num_tokens // 3))
    everything = Sampling(
        0.0,
        0,
        1.0,
        0.0,
        1.0,
        1.3,
        0.4,
        -0.2,
        {3: 2.5, 9: -1.0},
        allowed,
        [[4], [*history[-2:], 6], [1, 2, 3]],
    )
    greedy = Sampling(temperature=0.0)
    return [
        Sample(replace(greedy, repetition_penalty=1.7), history, history[:150] + [5] * 40),
        Sample(
            replace(greedy, frequency_penalty=0.3, presence_penalty=0.7), history, history[100:170]
        ),
        Sample(replace(greedy, presence_penalty=0.7), history, []),
        Sample(
            replace(
                greedy,
                logit_bias={i: float(i) for i in range(0, num_tokens, num_tokens // 200 + 1)},
            ),
            (),
            (),
        ),
        Sample(greedy, (), (), forbidden=[0, num_tokens - 1, 0]),
        Sample(greedy, (), (), mask=mask),
        Sample(everything, history, history, [7, 3], 0, mask),
        Sample(
            replace(everything, temperature=0.9, top_p=0.9, seed=5),
            history,
            history,
            [7, 3],
            0,
            mask,
        ),
        Sample(
            replace(everything, temperature=0.9, top_k=5, typical_p=0.9, seed=6),
            history,
            history,
            [7, 3],
            0,
            mask,
        ),
    ]


def draw(
    device: Device, logits_SV: Tensor, samples: Sequence[Sample], drawn_S: Tensor | None = None
) -> list[SampledToken | SampleError]:
    """Of logits on a CPU, as a step draws."""
    begun = begin_draw(device, logits_SV.to(device.torch_device), samples, drawn_S=drawn_S)
    device.synchronize()
    return begun.read()


def check_plain(device: GpuDevice, num_rows: int, num_tokens: int, dtype: torch.dtype) -> None:
    """Draws that need no more than settings are the race of its definition, wherever float32 cannot
    choose another token; their numbers are those of float64.
    """
    from model.devices.gpu.drawing import KernelDraws

    place = device.torch_device
    logits_SV, samples = random_logits(num_rows, num_tokens, dtype), plain_samples(num_rows)
    drawn_S = torch.full((num_rows + 1,), -7, device=place)
    draws = KernelDraws(num_rows + 1, num_tokens, place)
    draws.results_SR.fill_(-7)
    draws.draw(logits_SV.to(place), device.upload(torch.from_numpy(settings_SN(samples))), drawn_S)
    assert not draws._counters_S.any() and (draws.results_SR[num_rows] == -7).all()
    results_SR, drawn_S = draws.results_SR[:num_rows].cpu(), drawn_S.cpu()
    tokens, numbers_SN = results_SR[:, 0].long(), results_SR[:, 1:4].view(torch.float32).double()
    assert torch.equal(drawn_S[:-1], tokens) and drawn_S[-1] == -7
    assert (results_SR[:, 4] == ALL_FINITE).all()
    expected_SV = logits_SV.double().log_softmax(dim=-1)
    assert (numbers_SN[:, 0] - expected_SV.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    assert (numbers_SN[:, 1] - logits_SV.double().logsumexp(dim=-1)).abs().max() < 1e-5
    assert torch.equal(numbers_SN[:, 2], logits_SV.double().amax(dim=-1))
    clear = 0
    for logits_V, sample, token in zip(
        logits_SV.double().numpy(), samples, tokens.tolist(), strict=True
    ):
        speed_V = speeds(logits_V, sample.sampling, sample.index)
        if is_clear(speed_V):
            assert token == speed_V.argmax()
            clear += 1
    assert clear > 0.9 * num_rows


def check_filters(device: GpuDevice, num_rows: int, num_tokens: int) -> None:
    """What wins among the tokens that top-k, top-p and typical-p keep by sorting in float64."""
    samplings = [replace(REDRAWN[i % len(REDRAWN)], seed=i, choice=i % 2) for i in range(num_rows)]
    samples = [Sample(sampling, (), [0] * i) for i, sampling in enumerate(samplings)]
    logits_SV = random_logits(num_rows, num_tokens)
    logits_SV[::3] = ties(logits_SV[::3])
    kept_SV = (torch_sampling._filtered(CPU, logits_SV, samples) > 0).numpy()
    assert 0 < kept_SV.sum() < kept_SV.size
    num_rejected = clear = 0
    for i, drawn in enumerate(draw(device, logits_SV, samples)):
        logits_V = logits_SV[i].double().numpy()
        speed_V = speeds(logits_V, samplings[i], i, kept_SV[i])
        assert isinstance(drawn, SampledToken) and kept_SV[i, drawn.token], (i, drawn)
        num_rejected += speeds(logits_V, samplings[i], i).argmax() != drawn.token
        assert abs(drawn.logprob - logits_SV[i].double().log_softmax(dim=-1)[drawn.token]) < 1e-5
        if is_clear(speed_V):
            assert drawn.token == speed_V.argmax(), samplings[i]
            clear += 1
    assert num_rejected > num_rows // 5 and clear > 0.8 * num_rows


def expected_adjusted(logits_SV: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Penalties, bias and masks by their definition, token by token, in float32."""
    adjusted_SV = logits_SV.float().clone()
    for row_V, sample in zip(adjusted_SV, samples, strict=True):
        s, counts = sample.sampling, Counter(sample.output)
        seen = {*counts, *(sample.prompt if s.repetition_penalty != 1.0 else ())}
        for id in seen if s.penalises else ():
            penalty = torch.tensor(s.repetition_penalty)
            x = row_V[id] / penalty if row_V[id] > 0 else row_V[id] * penalty
            taken = torch.tensor(s.frequency_penalty) * counts[id]
            row_V[id] = x - (taken + torch.tensor(s.presence_penalty) * (counts[id] > 0))
        for id, bias in s.logit_bias.items():
            row_V[id] += bias
        row_V[banned(sample)] = -torch.inf
        for mask in filter(None, (s.allowed_tokens, sample.mask)):
            is_allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            outside = set(range(len(row_V))) - set(is_allowed.nonzero()[0].tolist())
            row_V[sorted(outside)] = -torch.inf
    return adjusted_SV


def check_adjusted(device: Device, num_tokens: int) -> None:
    """Penalties, bias and masks are those of their definition bit for bit, and no other token is
    drawn.
    """
    samples = adjusted_samples(num_tokens)
    logits_SV = random_logits(len(samples), num_tokens, torch.bfloat16)
    expected_SV = expected_adjusted(logits_SV, samples)
    found_SV = logits_SV.float().to(device.torch_device)
    adjust(device, found_SV, samples)
    assert torch.equal(found_SV.cpu(), expected_SV)
    for i, drawn in enumerate(draw(device, logits_SV, samples)):
        assert isinstance(drawn, SampledToken) and expected_SV[i, drawn.token] > -torch.inf
        assert samples[i].sampling.temperature or drawn.token == expected_SV[i].argmax()
        assert abs(drawn.logprob - logits_SV[i].double().log_softmax(dim=-1)[drawn.token]) < 1e-5
