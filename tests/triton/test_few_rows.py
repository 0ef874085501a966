"""Products of few rows under Triton's interpreter: float64's numbers, for every kind of tile."""

import pytest
import torch
import torch.nn.functional as F

from model.devices import gpu
from model.devices.gpu.device import GpuDevice
from model.layers import ACTIVATIONS, Linear
from tests.triton.test_products import DTYPES, NEAR, matrices, near

pytestmark = [pytest.mark.usefixtures("interpreter", "poisoned"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 70), (512, 64), (1100, 9)], ids=["less", "whole", "parts"])
def test_products_of_few_rows_are_torchs(num_rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    from model.devices.gpu.few_rows import multiply_few

    x, weight, bias = matrices(num_rows, inputs, outputs, dtype)
    expected = F.linear(x[:, 0].double(), weight[0].double())
    assert near(multiply_few(x[:, 0], weight[0]), expected, NEAR[dtype])
    for name, activation in ACTIVATIONS.items():
        y = multiply_few(x[:, 0], weight[0], bias, name)
        assert y.dtype is dtype and near(y, activation(expected + bias.double()), NEAR[dtype])


@pytest.mark.parametrize("num_rows", [1, 20])
def test_inputs_are_divided_where_a_piece_has_no_room_for_them(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from model.devices.gpu import few_rows

    monkeypatch.setattr(few_rows, "LONGEST", 64)
    monkeypatch.setattr(few_rows, "TILE", (16, 32))
    x, weight, bias = matrices(num_rows, 150, 21, torch.float32)
    expected = F.relu(F.linear(x[:, 0].double(), weight[0].double(), bias.double()))
    assert near(few_rows.multiply_few(x[:, 0], weight[0], bias, "relu"), expected, 1e-5)


def test_pieces_of_starcoderbase_1b() -> None:
    """As measured: all inputs of 4 or 8 outputs for one row."""
    from model.devices.gpu.few_rows import piece_of

    shapes = {(2304, 2048): (1, 8, 2048), (2048, 2048): (1, 4, 2048), (8192, 2048): (1, 8, 2048), (2048, 8192): (1, 4, 8192)}
    assert {shape: piece_of(1, *shape) for shape in shapes} == shapes
    assert piece_of(1, 6144, 24576) == (1, 4, 8192) and piece_of(2, 2048, 2048) == (16, 64, 512) and piece_of(17, 9, 9) == (32, 64, 512)


@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
def test_only_few_rows_of_what_was_measured_are_not_cublass(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from model.devices.gpu import few_rows, modules

    called: list[int] = []
    monkeypatch.setattr(modules, "multiply_few", lambda x, *args: (called.append(len(x)), few_rows.multiply_few(x, *args))[1])

    def rows_by_us(dtype: torch.dtype) -> list[int]:
        called.clear()
        torch.manual_seed(0)
        linear = Linear(20, 12).to(dtype)
        replaced = modules.CublasLinear(linear)
        replaced.activation = activation
        for num_rows in (0, 1, 2, 32, 33):
            x = torch.randn(num_rows, 20).to(dtype)
            expected = F.linear(x.double(), linear.weight.double(), linear.bias.double())
            assert near(replaced(x), F.gelu(expected, approximate="tanh") if activation != "none" else expected, 2.0**-7)
        return called

    with torch.inference_mode():
        assert rows_by_us(torch.bfloat16) == [1] and rows_by_us(torch.float32) == []
        monkeypatch.setattr(gpu, "DEPENDENT_LAUNCHES", True)
        assert rows_by_us(torch.bfloat16) == [1, 2, 32]
        monkeypatch.setattr(modules, "MOST_WEIGHTS", 20 * 12 - 1)
        assert rows_by_us(torch.bfloat16) == []


def test_launches_are_dependent_only_where_that_is_asked_for_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for capability, asked, expected in (((9, 0), False, False), ((9, 0), True, True), ((8, 9), True, False), ((10, 0), True, True)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(gpu, "DEPENDENT_LAUNCHES", asked)
        assert gpu.dependent(cuda) == {"DEPENDENT": True, "launch_pdl": True} if expected else {"DEPENDENT": False}
        assert gpu.dependent(GpuDevice("cpu").torch_device) == {"DEPENDENT": False}
