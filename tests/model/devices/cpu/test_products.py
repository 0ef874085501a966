"""Packed products against torch and against themselves: every shape, every activation, floats of 32
and 16 bits and blocks of int8 and int4, at every width of vectors.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from model.devices.blocks import INT4, INT8, BlockFormat
from model.devices.cpu import native
from model.devices.cpu.device import CpuDevice
from model.devices.cpu.products import PackedEmbedding, PackedLinear
from model.layers import ACTIVATIONS, Embedding
from tests.model.devices.cpu.test_native import WIDTHS
from tests.support.torch_blocks import dequantize, parts, product


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of one width, in place of this processor's widest."""
    chosen = native.library(request.param)
    monkeypatch.setattr("model.devices.cpu.products.library", lambda: chosen)
    monkeypatch.setattr("model.devices.cpu.device.library", lambda: chosen)
    yield request.param


def packed(
    linear: nn.Linear,
    form: BlockFormat | None,
    activation: str = "none",
    dtype: torch.dtype = torch.float32,
) -> PackedLinear:
    replacement = PackedLinear(linear, form)
    replacement.allocate(torch.device("cpu"), dtype)
    cut = random.Random(0).randint(0, linear.out_features)
    for first, last in ((0, cut), (cut, linear.out_features)):
        replacement.set_rows(first, linear.weight.detach()[first:last])
    replacement.activation = activation
    return replacement


BLOCKS = [pytest.param(form, id=form.name) for form in (INT8, INT4)]
SHAPES = [(1, 1), (3, 5), (64, 64), (65, 33), (127, 96), (768, 100), (200, 768)]


@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@torch.inference_mode()
def test_float_products_are_torchs(width: str, activation: str) -> None:
    for inputs, outputs in SHAPES:
        torch.manual_seed(inputs)
        linear = nn.Linear(inputs, outputs, bias=activation != "none")
        replacement = packed(linear, None, activation)
        for rows in (1, 2, 7, 12, 13, 40):
            x = torch.randn(rows, inputs) * 3
            expected = x.double() @ linear.weight.double().T + (
                0 if linear.bias is None else linear.bias.double()
            )
            expected = expected if activation == "none" else ACTIVATIONS[activation](expected)
            assert (replacement(x) - expected).abs().max() < 1e-6 * (1 + inputs**0.5), (
                inputs,
                outputs,
                rows,
            )


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_every_number_of_16_bits_is_widened_exactly(width: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    linear = nn.Linear(1, 2**16, bias=False)
    linear.weight.copy_(numbers[:, None])
    expected, actual = numbers.float(), packed(linear, None, dtype=dtype)(torch.ones(1, 1))[0]
    assert torch.equal(expected.isnan(), actual.isnan()) and torch.equal(
        expected.nan_to_num(), actual.nan_to_num()
    )


@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_weights_of_16_bits_give_the_bits_of_the_same_numbers_in_float32(
    width: str, dtype: torch.dtype
) -> None:
    for inputs, outputs in SHAPES:
        linear = nn.Linear(inputs, outputs)
        linear.weight.copy_(linear.weight.to(dtype))
        half, whole = (packed(linear, None, "gelu", each) for each in (dtype, torch.float32))
        assert (
            2 * half.weight.nbytes == whole.weight.nbytes and half.num_filling == whole.num_filling
        )
        for rows in (1, 2, 7, 15, 29, 40):
            x = torch.randn(rows, inputs)
            assert torch.equal(half(x), whole(x)), (inputs, outputs, rows)


@pytest.mark.parametrize("form", BLOCKS)
@torch.inference_mode()
def test_products_of_blocks_have_the_bits_of_their_definition(
    width: str, form: BlockFormat
) -> None:
    for inputs, outputs in [*SHAPES, (2048, 40)]:
        torch.manual_seed(inputs)
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.mul_(torch.randn(outputs, 1).exp())
        replacement, rows_OI = packed(linear, form), form.quantize(linear.weight)
        assert replacement.weight.numel() - replacement.num_filling == rows_OI.numel()
        for rows in (1, 3, 8, 25):
            x = torch.randn(rows, inputs) * torch.randn(rows, 1).exp() + 1
            assert torch.equal(replacement(x), product(form, x, rows_OI)), (inputs, outputs, rows)
        assert torch.equal(
            replacement.rows(torch.arange(outputs)), dequantize(form, rows_OI, inputs)
        )


def quantized(width: str, form: BlockFormat, weight_NI: Tensor) -> Tensor:
    blocks = torch.empty(len(weight_NI), form.row_bytes(weight_NI.shape[1]), dtype=torch.uint8)
    getattr(native.library(width), f"quantize_{form.name}")(
        weight_NI.data_ptr(), blocks.data_ptr(), *weight_NI.shape
    )
    return blocks


@pytest.mark.parametrize("form", BLOCKS)
def test_rows_are_quantized_with_the_bits_of_their_definition(
    width: str, form: BlockFormat
) -> None:
    for rows, inputs in ((1, 1), (7, 33), (300, 640)):
        weight_NI = torch.randn(rows, inputs) * torch.randn(rows, 1).mul(3).exp()
        weight_NI[::5, :40], weight_NI[1::5, :40] = 0.0, 0.5
        weight_NI[2::5].round_()
        weight_NI[3::5] *= 1e-5  # Scales that float16 holds with fewer bits, or not at all.
        assert torch.equal(quantized(width, form, weight_NI), form.quantize(weight_NI))


@pytest.mark.parametrize("form", BLOCKS)
def test_a_block_that_is_not_finite_has_no_finite_scale(width: str, form: BlockFormat) -> None:
    weight_NI = torch.randn(6, 96)
    weight_NI[0, 40] = torch.nan
    weight_NI[1, 40] = torch.inf
    weight_NI[2, 40] = -torch.inf
    weight_NI[3, 40] = 1e38
    expected = torch.ones(6, 3, dtype=torch.bool)
    expected[:4, 1] = False
    for blocks in (quantized(width, form, weight_NI), form.quantize(weight_NI)):
        assert torch.equal(parts(form, blocks)[0].isfinite(), expected)


@pytest.mark.parametrize("form", BLOCKS)
@torch.inference_mode()
def test_products_of_the_largest_numbers_are_exact(width: str, form: BlockFormat) -> None:
    """Where sums in 16 bits would overflow: every byte of numbers that a file may hold, against x
    of largest size.
    """
    replacement = PackedLinear(nn.Linear(64, 256, bias=False), form)
    replacement.allocate(torch.device("cpu"))
    blocks = torch.zeros(256, 2, form.block_bytes, dtype=torch.uint8)
    blocks[:, :, :2] = torch.tensor([1.0]).half().view(torch.uint8)
    blocks[:, :, (4 if form is INT4 else 2) :] = torch.arange(256, dtype=torch.uint8)[:, None, None]
    rows = blocks.flatten(1)
    replacement.set_blocks(0, rows)
    for x in (
        torch.full((3, 64), 127.0),
        torch.full((3, 64), -127.0),
        127.0 * torch.tensor([1.0, -1.0]).repeat(3, 32),
    ):
        expected = x.double() @ dequantize(form, rows, 64).double().T
        assert torch.equal(replacement(x).double(), expected)


@pytest.mark.parametrize(("form", "error"), [(INT8, 0.01), (INT4, 0.12)])
@torch.inference_mode()
def test_blocks_are_near_float32(width: str, form: BlockFormat, error: float) -> None:
    linear = nn.Linear(300, 200)
    x = torch.randn(9, 300)
    expected = linear(x)
    assert (packed(linear, form)(x) - expected).norm() < error * expected.norm()


@pytest.mark.parametrize("form", [pytest.param(None, id="floats"), *BLOCKS])
@torch.inference_mode()
def test_a_row_is_the_same_bits_in_any_company_and_on_any_number_of_threads(
    width: str, form: BlockFormat | None
) -> None:
    threads = torch.get_num_threads()
    for inputs, outputs in SHAPES:
        linear = nn.Linear(inputs, outputs)
        replacement = packed(linear, form, "gelu_tanh")
        x = torch.randn(64, inputs)
        together = replacement(x)
        for first, last in ((0, 1), (63, 64), (3, 5), (10, 17), (20, 52)):
            assert torch.equal(replacement(x[first:last]), together[first:last])
        order = torch.randperm(64)
        try:
            torch.set_num_threads(1)
            assert torch.equal(replacement(x[order]), together[order])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("form", [pytest.param(None, id="floats"), *BLOCKS])
@torch.inference_mode()
def test_what_is_not_finite_stays_so_in_its_row(width: str, form: BlockFormat | None) -> None:
    replacement = packed(nn.Linear(64, 40), form, "silu")
    x = torch.randn(5, 64)
    before = replacement(x)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x[2, 7] = wrong
        after = replacement(x)
        assert not after[2].isfinite().all() and torch.equal(
            after[[0, 1, 3, 4]], before[[0, 1, 3, 4]]
        )


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float32) for form in (INT8, INT4)),
        *((None, each) for each in (torch.float32, *HALVES)),
    ],
)
@torch.inference_mode()
def test_a_packed_table_gives_its_rows(
    width: str, form: BlockFormat | None, dtype: torch.dtype
) -> None:
    table = Embedding(45, 70)
    table.weight.copy_(table.weight.to(dtype))
    replacement = PackedEmbedding(table, form)
    replacement.allocate(torch.device("cpu"), dtype)
    replacement.set_rows(0, table.weight)
    ids = torch.tensor([0, 44, 7, 7, 31])
    expected: Tensor = table(ids)
    assert replacement(ids).dtype is torch.float32
    assert (replacement(ids) - expected).abs().max() <= (
        0 if form is None else 0.03 if form is INT8 else 0.3
    )
    assert (replacement.logits(expected) - expected @ table.weight.T).abs().max() < (
        1e-4 if form is None else 0.5 if form is INT8 else 4
    )


@torch.inference_mode()
def test_the_summary_of_logits(width: str) -> None:
    for vocab_size in (1, 2, 5, 15, 16, 17, 33, 100, 1000):
        torch.manual_seed(vocab_size)
        logits = torch.randn(9, vocab_size) * 20
        logits[1] = logits[1, 0]  # The first of equal ones is the greatest.
        logits[2, 1:] = -torch.inf
        logits[3] += 1e4
        normaliser, largest, tokens = CpuDevice().summary(logits)
        assert torch.equal(largest, logits.max(dim=-1).values) and torch.equal(
            tokens, logits.argmax(dim=-1)
        )
        assert (normaliser - logits.double().logsumexp(dim=-1)).abs().max() < 1e-3 and int(
            tokens[1]
        ) == 0
        assert all(
            torch.equal(CpuDevice().summary(logits[i : i + 1])[0], normaliser[i : i + 1])
            for i in range(9)
        )


@torch.inference_mode()
def test_the_summary_of_what_is_not_finite_is_not(width: str) -> None:
    for vocab_size in (1, 15, 16, 33):
        for wrong in (torch.nan, torch.inf):
            for place in {0, vocab_size // 2, vocab_size - 1}:
                logits = torch.randn(3, vocab_size)
                logits[1, place] = wrong
                normaliser, _, tokens = CpuDevice().summary(logits)
                assert (
                    normaliser.isfinite().tolist() == [True, False, True]
                    and 0 <= int(tokens[1]) < vocab_size
                )
        assert not CpuDevice().summary(torch.full((1, vocab_size), -torch.inf))[0].isfinite().any()
