"""Products of one row under Triton's interpreter: float64's numbers, whole and in parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.layers import ACTIVATIONS, Linear
from tests.triton.test_products import DTYPES, NEAR, near

pytestmark = [
    pytest.mark.usefixtures("interpreter", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def matrices(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and b."""
    torch.manual_seed(inputs)
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    return torch.randn(1, inputs, dtype=dtype), weight.to(dtype), torch.randn(outputs, dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 70), (512, 64), (1100, 9)])
def test_products_of_one_row_are_torchs(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    from model.devices.gpu.one_row import multiply_row

    x, weight, bias = matrices(inputs, outputs, dtype)
    expected = F.linear(x.double(), weight.double())
    assert near(multiply_row(x, weight), expected, NEAR[dtype])
    for name, activation in ACTIVATIONS.items():
        y = multiply_row(x, weight, bias, name)
        assert y.dtype is dtype and near(y, activation(expected + bias.double()), NEAR[dtype])


def test_inputs_are_divided_where_a_piece_has_no_room_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from model.devices.gpu import one_row

    monkeypatch.setattr(one_row, "LONGEST", 64)
    x, weight, bias = matrices(150, 21, torch.float32)
    expected = F.relu(F.linear(x.double(), weight.double(), bias.double()))
    assert near(one_row.multiply_row(x, weight, bias, "relu"), expected, 1e-5)


def test_pieces_of_starcoderbase_1b() -> None:
    """As measured: all inputs of 4 or 8 outputs."""
    from model.devices.gpu.one_row import piece_of

    shapes = {(2304, 2048): (8, 2048), (2048, 2048): (4, 2048), (8192, 2048): (8, 2048)}
    shapes |= {(2048, 8192): (4, 8192), (6144, 24576): (4, 8192)}
    assert {shape: piece_of(*shape) for shape in shapes} == shapes


@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
def test_one_row_of_what_was_measured_is_not_cublass(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.devices.gpu import modules, one_row

    called: list[int] = []

    def noted(x: torch.Tensor, *others: object) -> torch.Tensor:
        called.append(len(x))
        return one_row.multiply_row(x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(modules, "multiply_row", noted)

    def rows_by_us(dtype: torch.dtype) -> list[int]:
        called.clear()
        torch.manual_seed(0)
        linear = Linear(20, 12).to(dtype)
        replaced = modules.CublasLinear(linear)
        replaced.activation = activation
        for num_rows in (0, 1, 2, 33):
            x = torch.randn(num_rows, 20).to(dtype)
            expected = F.linear(x.double(), linear.weight.double(), linear.bias.double())
            if activation != "none":
                expected = F.gelu(expected, approximate="tanh")
            assert near(replaced(x), expected, 2.0**-7)
        return called

    with torch.inference_mode():
        assert rows_by_us(torch.bfloat16) == [1] and rows_by_us(torch.float32) == []
        monkeypatch.setattr(modules, "MOST_WEIGHTS", 20 * 12 - 1)
        assert rows_by_us(torch.bfloat16) == []
