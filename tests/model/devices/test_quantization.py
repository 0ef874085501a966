"""Int8 weights with a scale for each row, and quantized models: exact sums, a token's result independent of its company, small error, a
quarter of the memory.
"""

import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress
from torch import nn

from commands.perplexity import measure
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices.cpu.native import library
from model.devices.cpu.torch_blocks import BlockMatrix, BlockProducts
from model.devices.gpu.device import GpuDevice
from model.devices.products import Products
from model.devices.quantization import integer_product, product_in_floats, quantize_tokens, quantize_weights
from model.devices.quantized_modules import QuantizedLinear
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import OptionError
from model.step import Row, Sample, SampledToken, SampleError, Sampling, StepPlan
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.paths import EMBEDDED

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 50), st.integers(0, 2**31))
def test_products_are_exact(num_tokens: int, num_inputs: int, num_outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TI, weight_OI = (torch.randint(-128, 128, (n, num_inputs), dtype=torch.int8, generator=generator) for n in (num_tokens, num_outputs))
    expected = x_TI.long() @ weight_OI.long().T
    assert torch.equal(integer_product(x_TI, weight_OI).long(), expected)
    assert torch.equal(product_in_floats(x_TI, weight_OI).long(), expected)


def test_products_are_exact_at_the_extremes_and_on_processors_that_saturate() -> None:
    """torch adds pairs of products in 16 bits where there is no VNNI."""
    program = """
import torch
from model.devices.quantization import integer_product
for size in (64, 2000):
    x, w = torch.full((3, size), -128, dtype=torch.int8), torch.full((5, size), 127, dtype=torch.int8)
    assert (integer_product(x, w) == -128 * 127 * size).all()
"""
    for level in ("ALL", "AVX2"):
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": level}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]), st.booleans())
def test_rounding_is_within_half_a_step(seed: int, size: float, positive: bool) -> None:
    x_TI = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed)) * size
    x_TI = x_TI.abs() if positive else x_TI
    x_int8_TI, scale_T, zero_T = quantize_tokens(x_TI)
    back_TI = (x_int8_TI.float() - zero_T[:, None]) * scale_T[:, None]
    assert ((back_TI - x_TI).abs() <= 0.51 * scale_T[:, None]).all()
    rows, scale = quantize_weights(x_TI)
    assert ((rows.float() * scale[:, None] - x_TI).abs() <= 0.51 * scale[:, None]).all()


def test_zeros_stay_zeros() -> None:
    linear = nn.Linear(16, 4)
    linear.weight.data[1] = 0
    replacement = QuantizedLinear(linear, "int8", torch.float32)
    replacement.allocate(CPU)
    replacement.set_rows(0, linear.weight.data)
    assert torch.allclose(replacement(torch.zeros(2, 16)), linear.bias.expand(2, -1), atol=1e-6)
    assert torch.equal(replacement(torch.randn(3, 16))[:, 1], linear.bias[1].expand(3))


@torch.inference_mode()
def test_a_token_alone_gives_the_bytes_it_gives_in_company() -> None:
    linear = nn.Linear(130, 65)
    replacement = QuantizedLinear(linear, "int8", torch.float32)
    replacement.allocate(CPU)
    replacement.set_rows(0, linear.weight[:30])
    replacement.set_rows(30, linear.weight[30:])
    x_TI = torch.randn(37, 130)
    together = replacement(x_TI)
    assert all(torch.equal(replacement(x_TI[i : i + 1])[0], together[i]) for i in range(37))
    assert (together - linear(x_TI)).norm() < 0.02 * linear(x_TI).norm()


def make_runner(folder: Path, quantization: str) -> ModelRunner:
    options = EngineOptions("cpu", "float32", 1, 16, 20, None, 320, 4, 64, quantization)
    return ModelRunner.load(folder, read_spec(folder), options)


def test_a_numerical_error_fails_its_row_alone(tmp_path: Path) -> None:
    runner = make_runner(make_checkpoint(SHAPES[3], tmp_path).folder, "int8")
    embedding: Any = runner.decoder.token_embedding
    embedding.set_blocks(7, torch.full((1, embedding.form.row_bytes(embedding.shape[1])), 255, dtype=torch.uint8))  # Scales of NaN.
    sample = Sample(Sampling(temperature=0.0), [1], [])
    broken, fine = runner.run(StepPlan((Row(0, [7, 1], 0, [array("q", [0])], sample), Row(1, [1, 2], 0, [array("q", [1])], sample)))).drawn
    assert isinstance(broken, SampleError) and isinstance(fine, SampledToken)


def test_the_embedded_model_in_int8_takes_a_quarter_and_says_much_the_same() -> None:
    whole, small = (make_runner(EMBEDDED, quantization) for quantization in ("none", "int8"))
    assert small.weight_bytes <= 0.27 * whole.weight_bytes and make_runner(EMBEDDED, "int4").weight_bytes <= 0.16 * whole.weight_bytes
    ids = list(range(300, 340))
    plan = StepPlan((Row(0, ids, 0, [array("q", range(20))], Sample(Sampling(temperature=0.0), ids, [])),))
    (before,), (after,) = whole.run(plan).drawn, small.run(plan).drawn
    assert isinstance(before, SampledToken) and isinstance(after, SampledToken)
    assert before.token == after.token and abs(before.logprob - after.logprob) < 0.1


@pytest.mark.parametrize(("kind", "cost"), [("int8", 0.002), ("int4", 0.15)])
def test_perplexity(kind: str, cost: float) -> None:
    with Progress(disable=True) as progress:
        forms = {"float32": ("float32", "none"), kind: ("float32", kind)}
        perplexity = measure(EMBEDDED, read_spec(EMBEDDED), "cpu", forms, None, progress).perplexity
    assert abs(perplexity[kind] / perplexity["float32"] - 1) < cost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("products", "stored"), [(Products("int8"), torch.int8), (BlockProducts("int4"), torch.uint8)])
def test_no_float_copy_stays(dtype: torch.dtype, products: Products, stored: torch.dtype) -> None:
    decoder = load_decoder(EMBEDDED, read_spec(EMBEDDED), dtype, CPU, products)
    matrices = {name: p.dtype for name, p in decoder.named_parameters() if p.ndim == 2}
    assert set(matrices.values()) == {stored}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torch_and_the_kernels_say_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("no kernels were compiled")
    ids = list(range(300, 340))
    plan = StepPlan((Row(0, ids, 0, [array("q", range(20))], Sample(Sampling(temperature=0.0), ids, [])),))
    (native,) = make_runner(EMBEDDED, kind).run(plan).drawn
    monkeypatch.setattr("model.devices.cpu.device.library", lambda: None)
    runner = make_runner(EMBEDDED, kind)
    (by_torch,) = runner.run(plan).drawn
    assert isinstance(runner.decoder.token_embedding, BlockMatrix) and not runner.deterministic
    assert isinstance(native, SampledToken) and isinstance(by_torch, SampledToken)
    assert native.token == by_torch.token and abs(native.logprob - by_torch.logprob) < 0.02  # Norms differ in their last bits.


def test_a_gpu_refuses_int4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.runner.runner.find_device", lambda name: GpuDevice("cpu"))
    with pytest.raises(OptionError, match=r"engine\.quantization int4 has no kernels on cuda; expected one of none, int8, fp8"):
        make_runner(make_checkpoint(SHAPES[3], tmp_path).folder, "int4")
