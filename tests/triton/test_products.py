"""A GPU's products and summaries over torch's CPU and Triton's interpreter: torch's numbers, and a
row's own bits wherever it lies.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices.gpu.device import GpuDevice, order
from model.layers import ACTIVATIONS, Embedding, Linear, Router
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import OptionError

# An exponential that is too large, and NaN's arithmetic: numpy warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.usefixtures("interpreter", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}
DTYPES = pytest.mark.parametrize("dtype", NEAR, ids=lambda dtype: str(dtype).removeprefix("torch."))


def near(actual: Tensor, expected: Tensor, relative: float) -> bool:
    return bool(((actual.float() - expected).abs() <= relative * (1 + expected.abs())).all())


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


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 700])
def test_rows_in_slabs_are_products_of_one_shape(num_rows: int) -> None:
    from model.devices.gpu.modules import SLAB, CublasLinear, in_slabs, multiply_in_slabs

    seen = []
    x = torch.randn(num_rows, 3, 4)
    y = in_slabs(lambda slab: seen.append(slab.shape) or slab.sum(dim=-1), x)
    assert torch.equal(y, x.sum(dim=-1)) and set(seen) <= {torch.Size([SLAB, 3, 4]), x.shape}
    # A library may take another way for rows that do not lie next to each other.
    apart = torch.randn(num_rows, 4, 3).transpose(1, 2)
    assert in_slabs(lambda slab: slab.new_full([len(slab)], slab.is_contiguous()), apart).all()
    linear, router, table = (
        CublasLinear(Linear(40, 24)),
        Router(40, 24, bias=False),
        Embedding(24, 40),
    )
    x = torch.randn(num_rows, 40)
    expected = linear(x), router(x), table.logits(x)
    for module in (linear, router, table):
        multiply_in_slabs(module)
        assert {"forward", "logits"} & vars(module).keys()
    for actual, right in zip((linear(x), router(x), table.logits(x)), expected, strict=True):
        assert near(actual, right, 1e-5)


def test_products_that_depend_on_a_rows_place_are_refused(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.devices.gpu.modules import CublasLinear, SlabProducts

    spec = read_spec(tiny_folder)
    forward, logits = CublasLinear.forward, Embedding.logits

    def of_tokens(table: Embedding, x: Tensor) -> Tensor:
        assert len(table.weight) == spec.vocab_size, "nothing is multiplied by positions"
        return logits(table, x)

    monkeypatch.setattr(Embedding, "logits", of_tokens)
    load_decoder(tiny_folder, spec, torch.float32, torch.device("cpu"), SlabProducts())

    def by_place(module: CublasLinear, x: Tensor) -> Tensor:
        y = forward(module, x)
        return y + 1e-6 * torch.arange(len(y))[:, None]

    monkeypatch.setattr(CublasLinear, "forward", by_place)
    with pytest.raises(OptionError, match=r"engine\.deterministic"):
        load_decoder(tiny_folder, spec, torch.float32, torch.device("cpu"), SlabProducts())


def test_an_activation_at_its_ends() -> None:
    from model.devices.gpu.launches import gate

    x = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30])[:, None]
    for name, activation in ACTIVATIONS.items():
        assert torch.equal(gate(torch.cat([x, torch.ones_like(x)], 1), name), activation(x)), name
        assert gate(torch.tensor([[torch.nan, 1.0]]), name).isnan().all()


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
    assert near(softmax(logits), logits.double().softmax(dim=-1), 2e-6)
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_gets_them_when_it_is_asked_to(
    deterministic: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's device over the CPU."""
    from model.devices.gpu.modules import GpuNorm

    monkeypatch.setattr("model.runner.runner.find_device", lambda *_: GpuDevice("cpu"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(ModelRunner, "warm_up", lambda *_: None)
    options = EngineOptions("cuda", "auto", 1, 64, 20, None, 256, 4, 64, "none", deterministic)
    runner = ModelRunner.load(tiny_folder, read_spec(tiny_folder), options)
    assert isinstance(runner.decoder.final_norm, GpuNorm)
    assert (
        ("forward" in vars(runner.decoder.get_submodule("blocks.0.mlp.down")))
        is deterministic
        is runner.deterministic
    )
    assert (
        runner.kernels == ("triton+cublas" if deterministic else "triton-fast+cublas")
        and runner.pool.compute_dtype is torch.bfloat16
    )
