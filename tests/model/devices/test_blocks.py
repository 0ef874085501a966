"""Blocks of int8 and int4: rounding errors, special values, and products by torch against what the
stored numbers stand for.
"""

import pytest
import torch
from torch import nn

from model.devices.blocks import BLOCK, CLIPPING, INT4, INT8, LEVELS, BlockFormat
from model.layers import Embedding
from tests.support.torch_blocks import (
    BlockEmbedding,
    BlockLinear,
    dequantize,
    product,
    quantize_activations,
)

BOTH = [pytest.param(form, id=form.name) for form in (INT8, INT4)]


def test_int8_is_within_half_a_step() -> None:
    weight_NI = torch.randn(7, 100) * torch.logspace(-3, 3, 7)[:, None]
    back_NI = dequantize(INT8, INT8.quantize(weight_NI), 100)
    for b in range(0, 100, BLOCK):
        block, error = weight_NI[:, b : b + BLOCK], (back_NI - weight_NI)[:, b : b + BLOCK]
        assert (error.abs() <= 0.51 / 127 * block.abs().amax(dim=1, keepdim=True)).all()


def test_int4_is_no_worse_than_sixteen_equal_steps_from_the_least_to_the_greatest() -> None:
    weight_NI = torch.randn(50, 4 * BLOCK)
    blocks = weight_NI.view(50, 4, BLOCK)
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    step = (high - low) / LEVELS
    plain = (((blocks - low) / step).round() * step + low - blocks).square().sum(dim=-1)
    found = (
        (dequantize(INT4, INT4.quantize(weight_NI), 4 * BLOCK) - weight_NI)
        .view(50, 4, BLOCK)
        .square()
        .sum(dim=-1)
    )
    assert CLIPPING[0] == 1.0 and (found <= 1.001 * plain).all() and found.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("form", BOTH)
def test_what_the_numbers_can_say_is_stored_exactly(form: BlockFormat) -> None:
    numbers = (
        torch.randint(-127, 128, (5, 64)) if form is INT8 else torch.randint(0, 16, (5, 64)) - 3
    )
    numbers[:, ::BLOCK], numbers[:, 1::BLOCK] = (127, -127) if form is INT8 else (12, -3)
    weight = numbers * 0.25
    assert torch.equal(dequantize(form, form.quantize(weight), 64), weight)
    constant = torch.tensor([[0.0] * 40, [0.5] * 40, [-0.5] * 40])
    assert torch.equal(dequantize(form, form.quantize(constant), 40)[0], constant[0])
    assert (dequantize(form, form.quantize(constant), 40) - constant).abs().max() < 0.001


def test_activations() -> None:
    x = torch.randn(4, 70)
    x[1], x[2, 40], x[3, 0] = 0.0, torch.inf, torch.nan
    numbers, scale = quantize_activations(x)
    assert numbers.abs().max() == 127 and numbers[1].eq(0).all() and numbers.shape == (4, 3, BLOCK)
    assert scale.isfinite().tolist() == [
        [True] * 3,
        [True] * 3,
        [True, False, True],
        [False, True, True],
    ]
    back = (numbers * scale[..., None]).flatten(1)[:, :70]
    assert (back[0] - x[0]).abs().max() <= 0.51 * scale[0].max()


@pytest.mark.parametrize("form", BOTH)
@torch.inference_mode()
def test_torchs_modules_are_near_and_a_row_has_its_bits_in_any_company(form: BlockFormat) -> None:
    linear = nn.Linear(130, 65)
    replacement = BlockLinear(linear, form)
    replacement.allocate(torch.device("cpu"))
    replacement.set_rows(0, linear.weight[:30])
    replacement.set_rows(30, linear.weight[30:])
    x_TI = torch.randn(37, 130)
    together = replacement(x_TI)
    assert all(torch.equal(replacement(x_TI[i : i + 1])[0], together[i]) for i in range(37))
    assert (together - linear(x_TI)).norm() < (0.01 if form is INT8 else 0.12) * linear(x_TI).norm()
    expected = quantized_x(x_TI) @ dequantize(form, form.quantize(linear.weight), 130).double().T
    assert (product(form, x_TI, form.quantize(linear.weight)) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("form", BOTH)
@torch.inference_mode()
def test_a_table_gives_its_rows_and_logits(form: BlockFormat) -> None:
    table = Embedding(45, 70)
    replacement = BlockEmbedding(table, form, torch.float32)
    replacement.allocate(torch.device("cpu"))
    replacement.set_rows(0, table.weight)
    ids = torch.tensor([0, 44, 7, 7, 31])
    expected = table(ids)
    assert (replacement(ids) - expected).norm() < (0.01 if form is INT8 else 0.12) * expected.norm()
    assert replacement.logits(expected).shape == (5, 45)


def quantized_x(x_TI: torch.Tensor) -> torch.Tensor:
    numbers, scale = quantize_activations(x_TI)
    return (numbers.double() * scale[..., None].double()).flatten(1)[:, : x_TI.shape[1]]
