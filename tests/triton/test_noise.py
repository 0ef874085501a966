"""The noise of random draws: a pure function of its key, and exponential."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")


def test_a_row_is_the_same_in_any_company_and_length() -> None:
    from model.gpu.noise import exponentials_SV

    keys = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (2**64 - 1, 0, 0), (8, 0, 0), (-1, 0, 0)]
    times_SV = exponentials_SV(keys, 1500, CPU)
    for row, key in zip(times_SV, keys, strict=True):
        assert torch.equal(exponentials_SV([key], 1500, CPU)[0], row)
        assert torch.equal(exponentials_SV([key], 100, CPU)[0], row[:100])
    assert torch.equal(times_SV[3], times_SV[5])
    assert len({tuple(row[:4].tolist()) for row in times_SV}) == 5


def test_it_is_exponential() -> None:
    from model.gpu.noise import exponentials_SV

    times = exponentials_SV([(3, 0, index) for index in range(8)], 4096, CPU).ravel()
    assert times.isfinite().all() and (times >= 0).all()
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -torch.log1p(torch.tensor(-quantile, dtype=torch.float64))
        share = (times < expected).double().mean().item()
        assert abs(share - quantile) < 5 * (quantile * (1 - quantile) / len(times)) ** 0.5
