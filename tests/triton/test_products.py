"""The GPU's products and summaries under Triton's interpreter: torch's numbers, and a row's own
bits wherever it lies.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.checkpoint.families import read_spec
from model.devices.gpu.device import GpuDevice, order
from model.devices.gpu.tiles import TABLE, choose, part_of
from model.layers import ACTIVATIONS
from model.options import EngineOptions
from model.runner.runner import ModelRunner

# An exponential that is too large, and NaN's arithmetic: numpy warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.usefixtures("interpreter", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}
DTYPES = pytest.mark.parametrize("dtype", NEAR, ids=lambda dtype: str(dtype).removeprefix("torch."))
SIZES = [(1, 16, 16), (70, 96, 40), (5, 33, 301), (129, 130, 64)]
"""(rows, inputs, outputs): whole tiles and parts of some."""


def matrices(
    num_rows: int, inputs: int, outputs: int, dtype: torch.dtype, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, groups, inputs, dtype=dtype)
    return (
        x,
        (torch.randn(groups, outputs, inputs) * inputs**-0.5).to(dtype),
        torch.randn(outputs, dtype=dtype),
    )


def near(actual: Tensor, expected: Tensor, relative: float) -> bool:
    return bool(((actual.float() - expected).abs() <= relative * (1 + expected.abs())).all())


@DTYPES
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), SIZES)
def test_products_are_torchs(num_rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    from model.devices.gpu.launches import multiply

    x, weight, bias = matrices(num_rows, inputs, outputs, dtype)
    y = multiply(x, weight, bias)
    assert y.dtype is dtype and near(
        y[:, 0], F.linear(x[:, 0].float(), weight[0].float(), bias.float()), NEAR[dtype]
    )
    assert near(
        multiply(x, weight)[:, 0], F.linear(x[:, 0].float(), weight[0].float()), NEAR[dtype]
    )


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_gates_are_torchs(activation: str, gated: bool, dtype: torch.dtype) -> None:
    from model.devices.gpu.launches import multiply

    x, weight, bias = matrices(20, 40, 36, dtype)
    x = x * 4  # Far enough for the ends of every curve.
    hidden = F.linear(x[:, 0].float(), weight[0].float(), bias.float())
    gate, opened = hidden.chunk(2, dim=-1) if gated else (hidden, torch.ones(()))
    assert near(
        multiply(x, weight, bias, activation, gated)[:, 0],
        ACTIVATIONS[activation](gate) * opened,
        NEAR[dtype],
    )


def test_an_activation_at_its_ends() -> None:
    from model.devices.gpu.launches import multiply

    x = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30])[:, None, None]
    for name, activation in ACTIVATIONS.items():
        assert torch.equal(
            multiply(x, torch.ones(1, 1, 1), None, name)[:, 0, 0], activation(x[:, 0, 0])
        ), name
        assert (
            multiply(torch.full((1, 1, 1), torch.nan), torch.ones(1, 1, 1), None, name)
            .isnan()
            .all()
        )


def test_a_float_among_16_bit_weights_and_no_rows() -> None:
    from model.devices.gpu.launches import multiply, norm

    x, weight, _ = matrices(9, 48, 7, torch.float32)
    narrow = weight.bfloat16()
    assert near(multiply(x, narrow)[:, 0], F.linear(x[:, 0], narrow[0].float()), 1e-5)
    assert multiply(x[:0], weight).shape == (0, 1, 7) and norm(
        x[:0], x[0, 0], None, 1e-5, 0.0, centred=True
    ).shape == (0, 1, 48)


def test_every_head_by_its_own_matrix_either_way_round() -> None:
    from model.devices.gpu.launches import multiply

    x, weight, _ = matrices(37, 24, 40, torch.float32, groups=5)
    assert near(multiply(x, weight), torch.einsum("thi,hoi->tho", x, weight), 1e-5)
    stored = weight.transpose(1, 2).contiguous()
    assert torch.equal(multiply(x, stored.transpose(1, 2)), multiply(x, weight))
    columns = torch.cat([x, x], dim=-1)[..., :24]
    assert not columns.is_contiguous() and torch.equal(
        multiply(columns, weight), multiply(x, weight)
    )


def check_invariance(compute: Callable[[Tensor], Tensor], row: Tensor, most: int) -> None:
    """A row alone, first, last, and at every place among strangers, in companies of many sizes."""
    alone = compute(row[None])[0]
    torch.manual_seed(0)
    company = torch.randn(most, *row.shape).to(row.dtype)
    for place in range(most):
        together = company.clone()
        together[place] = row
        assert torch.equal(compute(together)[place], alone), place
    for size in (2, 3, 17, 31, 33, most - 1):
        together = company[:size].clone()
        together[-1] = row
        assert torch.equal(compute(together)[-1], alone), size


@DTYPES
def test_a_products_row_has_the_same_bits_at_every_place(dtype: torch.dtype) -> None:
    from model.devices.gpu.launches import multiply

    x, weight, bias = matrices(1, 140, 40, dtype)
    most = choose(40, x.element_size()).rows + 5  # A tile and the beginning of the next.
    check_invariance(lambda x: multiply(x, weight, bias, "silu", True), x[0], most)


PARTED = 1100, 40
"""Inputs and outputs of a matrix whose inputs are divided into two parts, one of which is not
whole."""


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 70])
def test_parts_are_summed_to_torchs_product_in_one_program_as_in_several(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.devices.gpu import launches

    x, weight, bias = matrices(num_rows, *PARTED, dtype)
    expected = F.gelu(F.linear(x[:, 0].double(), weight[0].double()) + bias.double())
    joined, found = launches.join_parts, []
    for programs, num_joined in ((1, 0), (1000, 1)):
        calls: list[Tensor] = []
        monkeypatch.setattr(launches, "_num_programs", lambda device, programs=programs: programs)
        monkeypatch.setattr(
            launches,
            "join_parts",
            lambda *args, calls=calls: (calls.append(args[0]), joined(*args)),
        )
        found.append(launches.multiply(x, weight, bias, "gelu"))
        assert [len(sums) for sums in calls] == [2] * num_joined and near(
            found[-1][:, 0], expected, NEAR[dtype]
        )
    assert torch.equal(*found)


@DTYPES
def test_a_row_of_a_product_in_parts_has_the_same_bits_at_every_place(dtype: torch.dtype) -> None:
    """Alone in parts apart, in two tiles of rows one after another."""
    from model.devices.gpu.launches import multiply

    x, weight, bias = matrices(1, *PARTED, dtype)
    check_invariance(
        lambda x: multiply(x, weight, bias, "silu"),
        x[0],
        choose(PARTED[1], x.element_size()).rows + 2,
    )


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [
        (2304, 2048, 2),
        (2048, 2048, 2),
        (8192, 2048, 1),
        (2048, 8192, 2),
        (256, 2048, 4),
        (49152, 2048, 1),
    ],
)
def test_only_matrices_with_few_tiles_are_divided(outputs: int, inputs: int, parts: int) -> None:
    from model.devices.gpu.launches import PARTED_PROGRAMS

    tile = choose(outputs, 2)
    part = part_of(inputs, -(-outputs // tile.columns), PARTED_PROGRAMS, tile.depth)
    assert -(-inputs // part) == parts and part % tile.depth == 0


def test_the_number_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.devices.gpu import launches

    x, weight, bias = matrices(80, 50, 90, torch.float32)
    found = []
    for count in (1, 2, 7, 1000):
        monkeypatch.setattr(launches, "_num_programs", lambda device, count=count: count)
        found.append(launches.multiply(x, weight, bias))
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("vocab_size", [7, 301, 4096, 9001])
def test_a_summary_is_torchs(vocab_size: int) -> None:
    from model.devices.gpu.launches import softmax, summary

    torch.manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size) * 5
    logits[1, [3, vocab_size - 1]] = 50.0
    normaliser, largest, tokens = summary(logits)
    assert near(normaliser, logits.logsumexp(dim=-1), 1e-6)
    assert (
        torch.equal(largest, logits.amax(dim=-1))
        and tokens.tolist() == logits.argmax(dim=-1).tolist()
        and tokens[1] == 3
    )
    assert near(softmax(logits), logits.softmax(dim=-1), 1e-6)
    check_invariance(
        lambda x: torch.stack(list(map(torch.Tensor.double, summary(x)))).T, logits[2], 12
    )
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = logits.clone()
        spoilt[2] = bad
        assert not summary(spoilt)[0][2].isfinite() and torch.equal(
            summary(spoilt)[0][:2], normaliser[:2]
        )
        assert 0 <= summary(spoilt)[2][2] < vocab_size


def test_rows_that_begin_anywhere_are_computed_where_all_others_are() -> None:
    """Triton compiles another kernel for an address that is no multiple of 16."""
    from model.devices.gpu.launches import in_place

    x = torch.randn(41)[1:].view(2, 20)
    assert x.data_ptr() % 16 and in_place(x).data_ptr() % 16 == 0 and torch.equal(in_place(x), x)
    assert in_place(whole := torch.randn(2, 20)) is whole


def test_equal_logits_are_ordered_by_their_ids() -> None:
    logits = torch.tensor([[1.0, -2.5, 1.0, 0.0, -torch.inf, torch.inf, -2.5, 3e38, -3e38, 1e-40]])
    expected = logits[0].sort(descending=True, stable=True).indices.tolist()
    assert order(logits).topk(10, dim=-1).indices[0].tolist() == expected


def test_every_line_of_the_table_is_reached() -> None:
    assert {
        choose(columns, size) for columns in (1, 4096, 4097, 50257, 10**6) for size in (2, 4)
    } == {line[2] for line in TABLE}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_gets_them_when_it_is_asked_to(
    deterministic: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's device over the CPU."""
    from model.devices.gpu.modules import GpuLinear, GpuNorm

    monkeypatch.setattr("model.runner.runner.find_device", lambda *_: GpuDevice("cpu"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(ModelRunner, "warm_up", lambda *_: None)
    options = EngineOptions("cuda", "auto", 1, 64, 20, None, 256, 4, 64, "none", deterministic)
    runner = ModelRunner.load(tiny_folder, read_spec(tiny_folder), options)
    assert isinstance(runner.decoder.final_norm, GpuNorm)
    assert (
        isinstance(runner.decoder.get_submodule("blocks.0.mlp.down"), GpuLinear)
        is deterministic
        is runner.deterministic
    )
    assert (
        runner.kernels == ("triton" if deterministic else "triton-fast+cublas")
        and runner.pool.compute_dtype is torch.bfloat16
    )
