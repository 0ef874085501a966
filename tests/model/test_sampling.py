"""Sampling: each parameter does what it says, draws have the right distribution, and nothing but
the row's own data decides.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.devices import find_device
from model.sampling import Scores, philox_exponentials
from model.step import Sample, SampledToken, SampleError, Sampling
from tests.support.drawing import draw

CPU = find_device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
PROBS = LOGITS.softmax(0).tolist()


def token_of(drawn: SampledToken | SampleError) -> int:
    assert isinstance(drawn, SampledToken)
    return drawn.token


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(typical_p=0.7)]
)
def test_a_row_alone_has_the_bits_of_one_in_company(sampling: Sampling) -> None:
    """So large that torch sums a single row by several threads."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(12, 49_152)
    samples = [Sample(replace(sampling, seed=seed), [], [seed]) for seed in range(12)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = draw(logits, samples)
        assert [
            draw(logits[i : i + 1], [sample])[0] for i, sample in enumerate(samples)
        ] == together
        targets = [3] * 12
        assert [Scores(CPU, logits[i : i + 1], [3], [2]).read()[0] for i in range(12)] == Scores(
            CPU, logits, targets, [2] * 12
        ).read()
    finally:
        torch.set_num_threads(threads)


def tokens(
    sampling: Sampling, draws: int = 400, logits: torch.Tensor = LOGITS, **sample: object
) -> Counter[int]:
    """How often each token comes up over many seeds."""
    given: dict[str, Any] = {"output": [], **sample}
    rows = [Sample(replace(sampling, seed=seed), [], **given) for seed in range(draws)]
    return Counter(token_of(drawn) for drawn in draw(logits.expand(draws, -1), rows))


def one(
    sampling: Sampling,
    logits: torch.Tensor = LOGITS,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
) -> int:
    return token_of(draw(logits[None], [Sample(sampling, prompt or [], output or [])])[0])


GREEDY = Sampling(temperature=0.0)


def test_greedy_takes_the_likeliest_and_a_denormal_temperature_is_greedy() -> None:
    assert tokens(GREEDY) == {0: 400}
    assert tokens(Sampling(temperature=1e-320)) == {0: 400}


def test_draws_follow_the_distribution() -> None:
    draws = 20_000
    counts = tokens(Sampling(), draws)
    for token, probability in enumerate(PROBS):
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[token] - draws * probability) < 5 * deviation


def test_temperature_sharpens_and_flattens() -> None:
    assert (
        tokens(Sampling(temperature=0.3))[0]
        > tokens(Sampling())[0]
        > tokens(Sampling(temperature=2.0))[0]
    )


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=5), {0, 1, 2, 3, 4}),
        (Sampling(top_p=PROBS[0] - 0.01), {0}),
        (Sampling(top_p=PROBS[0] + 0.01), {0, 1}),
        (Sampling(top_k=2, top_p=0.9), {0, 1}),
        (Sampling(top_k=3, top_p=(PROBS[0] - 0.001) / sum(PROBS[:3])), {0}),
        (Sampling(min_p=0.5), {0}),
        (Sampling(min_p=PROBS[2] / PROBS[0] - 0.001), {0, 1, 2}),
        (Sampling(top_k=4, min_p=0.3), {0, 1}),
        (Sampling(top_p=5e-324, top_k=1), {0}),
        (Sampling(top_p=5e-324), {0}),
        (Sampling(typical_p=0.99), {0, 1, 2, 3}),
        (Sampling(typical_p=5e-324), {1}),
    ],
)
def test_filters_keep_exactly(sampling: Sampling, kept: set[int]) -> None:
    assert set(tokens(replace(sampling, temperature=1.0), 3000)) == kept


def test_repetition_penalty_reaches_prompt_and_output_and_both_signs() -> None:
    logits = torch.tensor([2.0, 1.5, -0.5, -0.6])
    assert one(replace(GREEDY, repetition_penalty=2.0), logits, prompt=[0]) == 1
    assert one(replace(GREEDY, repetition_penalty=2.0), logits, output=[0]) == 1
    negative = torch.tensor([-1.0, -1.5])
    assert one(replace(GREEDY, repetition_penalty=2.0), negative, prompt=[0]) == 1


def test_frequency_counts_and_presence_does_not_and_neither_reads_the_prompt() -> None:
    logits = torch.tensor([2.0, 1.0])
    assert one(replace(GREEDY, frequency_penalty=0.6), logits, output=[0]) == 0
    assert one(replace(GREEDY, frequency_penalty=0.6), logits, output=[0, 0]) == 1
    assert one(replace(GREEDY, presence_penalty=0.6), logits, output=[0, 0, 0]) == 0
    assert one(replace(GREEDY, presence_penalty=1.1), logits, output=[0]) == 1
    assert (
        one(replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0), logits, prompt=[0, 0, 0])
        == 0
    )


def test_bias_and_forbidden_tokens() -> None:
    assert one(replace(GREEDY, logit_bias={3: 100.0})) == 3
    assert one(replace(GREEDY, logit_bias={0: -100.0})) == 1
    (drawn,) = draw(LOGITS[None], [Sample(GREEDY, [], [], forbidden=[0, 1])])
    assert drawn.token == 2
    assert 0 not in tokens(Sampling(temperature=2.0), forbidden=(0,))


def test_the_logprob_is_the_models_own() -> None:
    (drawn,) = draw(
        LOGITS[None], [Sample(Sampling(temperature=0.0, logit_bias={3: 100.0}), [], [])]
    )
    assert drawn.logprob == pytest.approx(math.log(PROBS[3]), abs=1e-6)


sampling_strategy = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    typical_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-5, 5), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)


@given(st.lists(sampling_strategy, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_row_draws_the_same_alone_and_in_any_company(
    samplings: list[Sampling], seed: int
) -> None:
    logits = torch.randn(len(samplings), 50, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [Sample(s, [1, 2, 3], [4, 4, 5], forbidden=[7]) for s in samplings]
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert all(drawn.token != 7 and math.isfinite(drawn.logprob) for drawn in together)


@given(st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(0, 10_000))
def test_the_noise_is_a_pure_function(seed: int, choice: int, index: int) -> None:
    values = philox_exponentials(seed, choice, index, 300)
    assert (values >= 0).all() and (values == philox_exponentials(seed, choice, index, 300)).all()


def test_all_of_the_seed_counts() -> None:
    assert (
        len({float(philox_exponentials(7 + (bit << 32), 0, 0, 1)[0]) for bit in range(1000)})
        == 1000
    )


def test_the_last_bits_of_the_logits_decide_no_draw() -> None:
    """Other batches and replays round otherwise. Drawn by cumulative sums, 44 of these 20,000 draws
    differ.
    """
    generator = torch.Generator().manual_seed(5)
    differ = 0
    for batch in range(20):
        logits = torch.randn(1000, 300, generator=generator) * 3
        rounded = logits + 5e-4 * (torch.rand(logits.shape, generator=generator) - 0.5)
        rows = [Sample(Sampling(temperature=0.8, seed=batch), [], [1] * i) for i in range(1000)]
        pairs = zip(draw(logits, rows), draw(rounded, rows), strict=True)
        differ += sum(
            one.token != other.token
            for one, other in pairs
            if isinstance(one, SampledToken) and isinstance(other, SampledToken)
        )
    assert differ <= 5


def test_typical_sampling_keeps_what_is_nearest_to_the_entropy() -> None:
    entropy = -sum(p * math.log(p) for p in PROBS)
    order = sorted(range(5), key=lambda token: abs(-math.log(PROBS[token]) - entropy))
    for keep in range(1, 5):
        share = sum(PROBS[token] for token in order[: keep - 1]) + 1e-6
        assert set(tokens(Sampling(typical_p=share), 3000)) == set(order[:keep])


def test_the_noise_differs_in_each_argument_and_is_exponential() -> None:
    values = {
        float(philox_exponentials(s, c, i, 1)[0])
        for s in range(20)
        for c in range(20)
        for i in range(20)
    }
    assert len(values) == 8000
    for bound in (0.1, 0.5, 1.0, 2.0):
        assert abs(sum(value < bound for value in values) / 8000 - (1 - math.exp(-bound))) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_draws_nothing_and_its_neighbours_are_untouched(
    bad: float, temperature: float
) -> None:
    rows = [
        Sample(Sampling(temperature=temperature, top_p=0.9, seed=seed), [], []) for seed in range(3)
    ]
    clean = LOGITS.expand(3, -1).clone()
    broken = clean.clone()
    broken[1, 2] = bad
    expected, drawn = draw(clean, rows), draw(broken, rows)
    assert (drawn[0], drawn[2]) == (expected[0], expected[2]) and isinstance(drawn[1], SampleError)
    everything = Sample(Sampling(temperature=temperature), [], [], forbidden=range(5))
    assert isinstance(draw(LOGITS[None], [everything])[0], SampleError)
    overflow = Sample(Sampling(temperature=temperature, repetition_penalty=1e-45), [0], [])
    assert isinstance(draw(LOGITS[None], [overflow])[0], SampleError)


def test_tokens_that_are_named_are_reported_instead_of_the_likeliest() -> None:
    """Each row has its own, whatever else is in the batch, and under the model's own distribution
    whatever bias the draw has.
    """
    logits_SV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 4
    logprobs_SV = logits_SV.log_softmax(dim=-1)
    samplings = [
        Sampling(0.0, logprob_token_ids=[7, 3, 49]),
        Sampling(0.0),
        Sampling(1.0, logprob_token_ids=[0], logit_bias={0: 9.0}),
        Sampling(0.0),
    ]
    samples = [
        Sample(sampling, [1], [], num_top=num_top)
        for sampling, num_top in zip(samplings, (2, 2, 0, 0), strict=True)
    ]
    together = draw(logits_SV, samples)
    for i, drawn in enumerate(together):
        (alone,) = draw(logits_SV[i : i + 1], samples[i : i + 1])
        assert (
            isinstance(drawn, SampledToken)
            and isinstance(alone, SampledToken)
            and drawn.top == alone.top
        )
        likeliest = logprobs_SV[i].topk(samples[i].num_top).indices.tolist()
        assert [id for id, _ in drawn.top] == (list(samplings[i].logprob_token_ids) or likeliest)
        assert all(
            logprob == pytest.approx(logprobs_SV[i, id].item(), abs=1e-5)
            for id, logprob in drawn.top
        )
