"""The noise of random draws: a pure function of its key, and exponential."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")


def test_a_row_is_the_same_in_any_company_and_length() -> None:
    from model.devices.gpu.draw import exponential_noise_SV

    keys = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (2**64 - 1, 0, 0), (8, 0, 0), (-1, 0, 0)]
    times_SV = exponential_noise_SV(keys, 1500, CPU)
    for row, key in zip(times_SV, keys, strict=True):
        assert torch.equal(exponential_noise_SV([key], 1500, CPU)[0], row)
        assert torch.equal(exponential_noise_SV([key], 100, CPU)[0], row[:100])
    assert torch.equal(times_SV[3], times_SV[5])
    assert len({tuple(row[:4].tolist()) for row in times_SV}) == 5


def test_it_is_exponential() -> None:
    from model.devices.gpu.draw import exponential_noise_SV

    times = exponential_noise_SV([(3, 0, index) for index in range(8)], 4096, CPU).ravel()
    assert times.isfinite().all() and (times >= 0).all()
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -torch.log1p(torch.tensor(-quantile, dtype=torch.float64))
        share = (times < expected).double().mean().item()
        assert abs(share - quantile) < 5 * (quantile * (1 - quantile) / len(times)) ** 0.5


@pytest.mark.parametrize("num_tokens", [5, 1024, 2500])
def test_a_race_draws_what_the_probabilities_and_the_noise_say(num_tokens: int) -> None:
    from model.devices.gpu.draw import exponential_noise_SV, gumbel_max_S

    logits_SV = 4 * torch.randn(9, num_tokens, generator=torch.Generator().manual_seed(1))
    logits_SV[3, 1::2] = -torch.inf
    logits_SV[4, :-1] = -torch.inf
    rows, keys = [8, 0, 3, 4, 3], [(7, 0, 0), (8, 1, 5), (2**64 - 1, 0, 1), (9, 0, 2), (-5, 0, 3)]
    settings = [(1.0, 0.0), (0.6, 0.0), (1.5, 0.1), (1.0, 0.0), (0.01, 1.0)]
    temperature_S1, min_p_S1 = torch.tensor(settings, dtype=torch.float64)[:, :, None].unbind(1)
    weights_SV = (logits_SV[rows].double() / temperature_S1).softmax(dim=-1)
    weights_SV = weights_SV.masked_fill(weights_SV < min_p_S1 * weights_SV.amax(dim=-1, keepdim=True), 0.0)
    expected = (weights_SV / exponential_noise_SV(keys, num_tokens, CPU)).argmax(dim=-1)
    drawn_S = gumbel_max_S(logits_SV, logits_SV.amax(dim=-1), rows, keys, settings)
    assert drawn_S.tolist() == expected.tolist()
    assert drawn_S[3] == num_tokens - 1 and drawn_S[4] == logits_SV[3].argmax()
    for i in range(len(rows)):
        assert gumbel_max_S(logits_SV, logits_SV.amax(dim=-1), rows[i : i + 1], keys[i : i + 1], settings[i : i + 1]) == drawn_S[i]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_race_of_what_is_not_a_number_names_a_token_that_there_is(broken: float) -> None:
    from model.devices.gpu.draw import gumbel_max_S

    logits_SV = torch.full((2, 1030), broken)
    logits_SV[1, :7] = 1.0
    drawn_S = gumbel_max_S(logits_SV, logits_SV.amax(dim=-1), [0, 1], [(1, 0, 0), (2, 0, 0)], [(1.0, 0.0), (1.0, 0.5)])
    assert all(0 <= token < 1030 for token in drawn_S.tolist())


def test_a_race_draws_tokens_as_often_as_they_are_likely() -> None:
    from model.devices.gpu.draw import gumbel_max_S

    probs_V = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    logits_SV = probs_V.log().repeat(4000, 1)
    rows = range(4000)
    drawn_S = gumbel_max_S(logits_SV, logits_SV.amax(dim=-1), rows, [(5, 0, index) for index in rows], [(1.0, 0.0)] * 4000)
    counts_V = drawn_S.bincount(minlength=5) / 4000
    assert (counts_V - probs_V).abs().max() < 5 * (0.25 / 4000) ** 0.5 and counts_V[4] == 0
