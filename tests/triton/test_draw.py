"""The draws of a GPU under Triton's interpreter: the race as numpy computes it in float64,
penalties and filters as torch's, and each row for itself.
"""

import math
import random

import numpy as np
import pytest
import torch

from model import sampling as torch_sampling
from model.devices.gpu.device import GpuDevice
from model.draw_words import NUM_SETTINGS, settings_SN
from model.sampling import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    KernelDrawn,
    begin_draw,
)
from model.step import Sample, SampledToken, SampleError, Sampling, bitmap
from tests.support.draw_cases import (
    CPU,
    REDRAWN,
    adjusted_samples,
    check_adjusted,
    check_filters,
    check_plain,
    draw,
    plain_samples,
    random_logits,
    ties,
)
from tests.support.draw_reference import BLOCK, times, words

pytestmark = pytest.mark.usefixtures("interpreter")
GPU = GpuDevice("cpu")


@pytest.mark.parametrize(
    ("num_rows", "num_tokens"), [(1, 1), (80, 7), (40, 301), (20, 2049), (14, 5001)]
)
def test_a_draw_is_the_race_of_its_definition(num_rows: int, num_tokens: int) -> None:
    check_plain(GPU, num_rows, num_tokens, torch.bfloat16 if num_tokens == 301 else torch.float32)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(3000, 50), (1000, 2047), (500, 4099)])
def test_thousands_of_draws_are_the_race_of_its_definition(num_rows: int, num_tokens: int) -> None:
    check_plain(GPU, num_rows, num_tokens, torch.float32)


def test_noise_is_as_exact_where_it_decides_as_in_float64() -> None:
    """The ratio of times decides, so that relative errors count, and small times win."""
    from tests.triton.speeds_kernel import speeds_of

    found = torch.empty(BLOCK)
    for number in range(12):
        sampling, index = Sampling(seed=2**64 - 1 - (number << 31), choice=number % 3), 5 * number
        settings_1N = torch.from_numpy(settings_SN([Sample(sampling, (), [0] * index)]))
        speeds_of[(1,)](settings_1N, found, number, BLOCK // 4)
        times_V = times(
            words(
                [sampling.seed],
                [sampling.choice],
                [index],
                range(number * BLOCK, (number + 1) * BLOCK),
            )[0]
        )
        errors_V = np.abs(found.double().numpy() + np.log(times_V))
        assert (
            errors_V[times_V < 0.01].max() < 1e-6
            and errors_V[times_V < 1.0].max() < 7e-6
            and errors_V.max() < 1e-3
        )


@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_200_000_draws_follow_the_distribution(min_p: float) -> None:
    """By the definition, to which other tests hold the kernel. The tokens lie in different blocks
    and quarters.
    """
    tokens = np.random.default_rng(1).permutation(6000)[:40].tolist()
    logits_V = np.random.default_rng(2).normal(size=40) * 1.5 / 0.7
    kept_V = logits_V - logits_V.max() >= (math.log(min_p) if min_p else -math.inf)
    probs_V = np.where(kept_V, np.exp(logits_V), 0.0)
    probs_V, num_draws, at_once = probs_V / probs_V.sum(), 200_000, 20_000
    counts_V = np.zeros(40)
    for begin in range(0, num_draws, at_once):
        indices = range(begin, begin + at_once)
        times_SV = times(words([1234] * at_once, [0] * at_once, indices, tokens))
        winners_S = np.where(kept_V, logits_V - np.log(times_SV), -np.inf).argmax(axis=1)
        counts_V += np.bincount(winners_S, minlength=40)
    expected_V = probs_V[kept_V] * num_draws
    freedom = kept_V.sum() - 1
    chi_squared = ((counts_V[kept_V] - expected_V) ** 2 / expected_V).sum()
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom) and not counts_V[~kept_V].any()


def test_seeds_choices_and_indices_draw_different_words() -> None:
    keys = [
        (7, 0, 0),
        (7, 0, 1),
        (7, 1, 0),
        (2**64 - 1, 0, 0),
        (7 + 2**32, 0, 0),
        (7 + 2**63, 0, 0),
    ]
    assert len(
        {words([seed], [choice], [index], [3])[0, 0] for seed, choice, index in keys}
    ) == len(keys)
    assert words([-1], [0], [0], [3]) == words([2**64 - 1], [0], [0], [3])
    assert settings_SN([]).shape == (0, NUM_SETTINGS)


@pytest.mark.parametrize("num_tokens", [60, 2050])
def test_filters_keep_what_they_keep_by_sorting(num_tokens: int) -> None:
    check_filters(GPU, (4 if num_tokens < 100 else 1) * len(REDRAWN), num_tokens)


@pytest.mark.parametrize("number", range(5))
def test_top_k_and_top_p_keep_exactly_the_set_of_a_stable_sort(number: int) -> None:
    """Each token in turn is the one drawn among all: it stays if and only if it is within."""
    from model.devices.gpu.drawing import KernelDraws

    rng = random.Random(number)
    num_tokens = 24
    logits_V = ties(random_logits(5, num_tokens))[number] * rng.choice([0.0, 0.3, 1.0])
    logits_V[rng.sample(range(num_tokens), 3)] = -torch.inf
    sampling = Sampling(
        rng.choice([0.7, 1.0, 2.0]),
        rng.choice([0, 3, 8, 30]),
        rng.choice([0.3, 0.8, 0.95, 1.0 - 1e-9]),
    )
    samples = [Sample(sampling, (), ())] * num_tokens
    logits_SV = logits_V.expand(num_tokens, -1).contiguous()
    settings = torch.from_numpy(settings_SN(samples))
    draws = KernelDraws(num_tokens, num_tokens, CPU.torch_device)
    draws.draw(logits_SV, settings, None)
    draws.results_SR[:, 0] = torch.arange(num_tokens)
    draws.redraw(logits_SV, settings, None, range(num_tokens), samples, None)
    kept_V = (
        torch_sampling._keep_likeliest(
            CPU, (logits_V.double() / sampling.temperature).softmax(dim=-1)[None], samples[:1]
        )[0]
        > 0
    )
    within_V = (draws.results_SR[:, 0] == torch.arange(num_tokens)) & logits_V.isfinite()
    assert torch.equal(within_V, kept_V), (sampling, logits_V)
    assert kept_V[draws.results_SR[:, 0].long()].all()


@pytest.mark.parametrize("num_tokens", [70, 4100])
def test_penalties_bias_and_masks_are_those_of_their_definition(num_tokens: int) -> None:
    check_adjusted(GPU, num_tokens)
    check_adjusted(CPU, num_tokens)


@pytest.mark.parametrize("num_tokens", [70, 2100])
def test_a_row_alone_has_the_bits_of_one_in_company(num_tokens: int) -> None:
    samples = [
        *plain_samples(4),
        *adjusted_samples(num_tokens)[5:],
        Sample(REDRAWN[5], (), ()),
        Sample(REDRAWN[0], (), (), num_top=3),
    ]
    logits_SV = random_logits(len(samples), num_tokens, torch.bfloat16)
    order = list(range(len(samples)))
    random.Random(3).shuffle(order)
    together = begin_draw(GPU, logits_SV[order], [samples[i] for i in order])
    assert isinstance(together, KernelDrawn)
    for place, i in enumerate(order):
        alone = begin_draw(GPU, logits_SV[i : i + 1].clone(), samples[i : i + 1])
        assert isinstance(alone, KernelDrawn) and torch.equal(
            alone._results_SR[0], together._results_SR[place]
        )
        assert alone.read()[0] == together.read()[place]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_as_on_a_cpu_and_disturbs_no_other(broken: float) -> None:
    everything = range(2060)
    samples = [
        Sample(Sampling(temperature=0.0), (), ()),
        Sample(Sampling(seed=1, min_p=0.5), (), ()),
        Sample(Sampling(seed=2, top_k=5, top_p=0.9), (), ()),
        Sample(Sampling(seed=3, top_p=0.9, repetition_penalty=1e-45), [*everything], ()),
        Sample(Sampling(seed=4, top_p=0.9, typical_p=0.9), (), (), forbidden=everything),
        Sample(Sampling(temperature=0.0, logit_bias={2: 3.0}), (), (), mask=bitmap([])),
        Sample(Sampling(temperature=0.0, logit_bias={2: 3.0}), (), (), mask=bitmap([2055])),
    ]
    logits_SV = random_logits(len(samples) * 2, 2060)
    clean, spoilt = logits_SV.clone(), logits_SV.clone()
    spoilt[: len(samples)] = broken
    spoilt[1, :7] = 1.0
    drawn_S = torch.full((2 * len(samples),), -1)
    expected, found = draw(GPU, clean, samples * 2), draw(GPU, spoilt, samples * 2, drawn_S)
    assert found[len(samples) :] == expected[len(samples) :]
    on_cpu = begin_draw(CPU, spoilt, samples * 2).read()
    assert [one if isinstance(one, SampleError) else None for one in found] == [
        one if isinstance(one, SampleError) else None for one in on_cpu
    ]
    assert NOT_FINITE in found and NOTHING_ALLOWED in found[len(samples) :]
    assert ((drawn_S >= 0) & (drawn_S < 2060)).all()


def test_states_that_are_not_finite_are_told_of_their_own_row() -> None:
    from model.devices.gpu.drawing import KernelDraws

    for num_tokens, depth in ((5, 70), (4100, 33), (6200, 8)):
        samples = plain_samples(4)
        logits_SV = random_logits(4, num_tokens)
        states_SD = torch.randn(4, depth).bfloat16()
        draws = KernelDraws(6, num_tokens, CPU.torch_device)
        settings = torch.from_numpy(settings_SN(samples))
        for column, broken in ((0, torch.nan), (depth - 1, -torch.inf)):
            spoilt_SD = states_SD.clone()
            spoilt_SD[2, column] = broken
            draws.draw(logits_SV, settings, None, spoilt_SD)
            assert (draws.results_SR[:4, 4] & 1).tolist() == [1, 1, 0, 1]
        draws.draw(logits_SV, settings, None, states_SD)
        assert (draws.results_SR[:4, 4] & 1).all()


def test_the_likeliest_tokens_are_reported_as_on_a_cpu() -> None:
    samples = [
        Sample(Sampling(temperature=0.0), (), (), num_top=4),
        Sample(Sampling(temperature=0.0, logprob_token_ids=[3, 7]), (), ()),
        Sample(Sampling(temperature=0.0, logit_bias={5: 30.0}), (), (), num_top=2),
        Sample(Sampling(temperature=0.0), (), ()),
    ]
    logits_SV = random_logits(4, 90, torch.bfloat16)
    for drawn, expected in zip(
        draw(GPU, logits_SV, samples), begin_draw(CPU, logits_SV, samples).read(), strict=True
    ):
        assert isinstance(drawn, SampledToken) and isinstance(expected, SampledToken)
        assert drawn.token == expected.token and [id for id, _ in drawn.top] == [
            id for id, _ in expected.top
        ]
        assert np.allclose(
            [logprob for _, logprob in drawn.top],
            [logprob for _, logprob in expected.top],
            atol=1e-5,
        )
