"""Sums with their norms, norms of heads and gates under Triton's interpreter: float64's numbers,
torch's sums, and a row's own bits.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import norm_heads
from model.layers import ACTIVATIONS, LayerNorm, RMSNorm, add_norm
from tests.triton.test_products import check_invariance

# An exponential that is too large, and NaN's arithmetic: numpy warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-11 + 2.0**-20, torch.bfloat16: 2.0**-8}
"""Of one result, relative to it; in float32, of the sums that lead to it. In 16 bits half a unit of
the last place."""
DTYPES = pytest.mark.parametrize(
    "dtype", ROUNDING, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
WIDTHS = pytest.mark.parametrize("width", [1, 6, 100, 2048])
KINDS = pytest.mark.parametrize("centred", [False, True], ids=["rms_norm", "layer_norm"])
ROWS = 5


def make_norm(width: int, dtype: torch.dtype, *, centred: bool) -> Any:
    """Weights and biases about 1 and 0, as they are stored."""
    from model.devices.gpu.modules import GpuNorm

    norm = LayerNorm(width) if centred else RMSNorm(width, 1e-6, 1.0)
    for parameter in norm.parameters():
        parameter.data += torch.randn(width) * 0.3
    return GpuNorm(norm.to(dtype))


def exact(norm: Any, x: Tensor) -> Tensor:
    """In float64."""
    x, shape, weight = x.double(), x.shape[-1:], norm.weight.double() + norm.offset
    return (
        F.layer_norm(x, shape, weight, norm.bias.double(), norm.epsilon)
        if norm.centred
        else F.rms_norm(x, shape, weight, norm.epsilon)
    )


def is_rounded(actual: Tensor, expected: Tensor, absolute: float = 1e-6) -> bool:
    return bool(
        (
            (actual.double() - expected).abs() <= ROUNDING[actual.dtype] * expected.abs() + absolute
        ).all()
    )


@pytest.fixture
def launches(interpreter: None) -> Iterator[Any]:
    """The launches, whose outputs torch fills with NaN before they are written."""
    from model.devices.gpu import launches

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield launches
    torch.use_deterministic_algorithms(False)


def rows(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(ROWS, width) * 3 + 1).to(dtype)


@DTYPES
@WIDTHS
@KINDS
@pytest.mark.parametrize("num_branches", [1, 2])
def test_sums_are_torchs_and_norms_are_float64s(
    num_branches: int, centred: bool, width: int, dtype: torch.dtype, launches: Any
) -> None:
    torch.manual_seed(width)
    norm, x = make_norm(width, dtype, centred=centred), rows(width, dtype)
    branches = [(rows(width, dtype), None) for _ in range(num_branches)]
    before = x.clone()
    sum_TD, y_TD = launches.add_norm(x, branches, 1.0, norm)
    assert torch.equal(sum_TD, add_norm(x, branches, 1.0, nn.Identity())[0]) and torch.equal(
        x, before
    )
    assert sum_TD.dtype is y_TD.dtype is dtype and is_rounded(y_TD, exact(norm, sum_TD))
    assert is_rounded(norm(sum_TD), exact(norm, sum_TD)) and torch.equal(norm(sum_TD), y_TD)


@DTYPES
@KINDS
def test_a_branchs_norm_is_rounded_before_the_sum(
    centred: bool, dtype: torch.dtype, launches: Any
) -> None:
    """As if each were a launch of its own. A scale multiplies exactly."""
    torch.manual_seed(3)
    norms, x = [make_norm(100, dtype, centred=centred) for _ in range(3)], rows(100, dtype)
    branch, other = rows(100, dtype), rows(100, dtype)
    expected = launches.add_norm(
        x, [(norms[0](branch), None), (norms[1](other), None)], 0.25, norms[2]
    )
    found = launches.add_norm(x, [(branch, norms[0]), (other, norms[1])], 0.25, norms[2])
    assert all(map(torch.equal, found, expected))
    assert torch.equal(found[0], x + norms[0](branch) * 0.25 + norms[1](other) * 0.25)


def test_a_scale_is_applied_before_the_sum_is_rounded(launches: Any) -> None:
    x = rows(100, torch.bfloat16)
    branch = rows(100, torch.bfloat16)
    norm = make_norm(100, torch.bfloat16, centred=False)
    (sum_TD, _) = launches.add_norm(x, [(branch, None)], 0.22, norm)
    assert is_rounded(sum_TD, x.double() + branch.double() * 0.22)


@DTYPES
@KINDS
def test_a_row_alone_has_the_bits_that_it_has_in_company(
    centred: bool, dtype: torch.dtype, launches: Any
) -> None:
    torch.manual_seed(1)
    norms = [make_norm(70, dtype, centred=centred) for _ in range(2)]

    def compute(x_T3D: Tensor) -> Tensor:
        x, branch, other = x_T3D.unbind(1)
        return torch.stack(
            launches.add_norm(x, [(branch, norms[0]), (other, None)], 0.3, norms[1]), dim=1
        )

    check_invariance(compute, torch.randn(3, 70).to(dtype), 9)


def test_a_nan_stays_in_its_row_and_there_may_be_no_rows(launches: Any) -> None:
    x = rows(20, torch.float32)
    branch = rows(20, torch.float32)
    norm = make_norm(20, torch.float32, centred=True)
    before = launches.add_norm(x, [(branch, None)], 1.0, norm)
    branch[2, 7] = torch.inf
    after = launches.add_norm(x, [(branch, None)], 1.0, norm)
    assert after[1][2].isnan().all() and after[0][2, 7] == torch.inf
    assert all(
        torch.equal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]]) for a, b in zip(after, before, strict=True)
    )
    assert [y.shape for y in launches.add_norm(x[:0], [(branch[:0], None)], 1.0, norm)] == [
        (0, 20),
        (0, 20),
    ]


@DTYPES
@KINDS
@pytest.mark.parametrize(("num_heads", "columns"), [(4, 16), (1, 24), (3, 6)])
def test_heads_and_key_are_normalised_as_each_alone(
    num_heads: int, columns: int, centred: bool, dtype: torch.dtype, launches: Any
) -> None:
    """Columns of one matrix, of any number of tokens."""
    torch.manual_seed(columns)
    norms = [make_norm(columns, dtype, centred=centred) for _ in range(2)]
    qkv = rows((num_heads + 2) * columns, dtype)
    for num_tokens in (0, 1, ROWS):
        q, k, _ = qkv[:num_tokens].split([num_heads * columns, columns, columns], dim=-1)
        q = q.view(-1, num_heads, columns)
        found, expected = launches.norm_heads(q, k, *norms), norm_heads(q, k, *norms)
        assert torch.equal(found[0], expected[0]) and found[0].shape == q.shape
        assert found[1] is not None and expected[1] is not None
        assert torch.equal(found[1], expected[1]) and found[1].shape == k.shape


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 30, 1024, 1500])
def test_a_gate_is_float64s_and_rounded_once(
    width: int, activation: str, dtype: torch.dtype, launches: Any
) -> None:
    torch.manual_seed(width)
    x = rows(2 * width, dtype)
    gate, opened = x.double().chunk(2, dim=-1)
    y = launches.gate(x, activation)
    assert y.shape == (ROWS, width) and is_rounded(y, ACTIVATIONS[activation](gate) * opened, 1e-5)
    assert torch.equal(launches.gate(x[3:4], activation)[0], y[3]) and launches.gate(
        x[:0], activation
    ).shape == (0, width)
