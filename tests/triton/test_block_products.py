"""The GPU's products of weights in blocks under Triton's interpreter: the dequantized matrix's, and
a row's own bits in any company.
"""

import random
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from commands.options import PlanOptions
from commands.plan import make_plan
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.decoder import Decoder
from model.devices.blocks import FORMATS, BlockFormat
from model.devices.cpu.device import CpuDevice
from model.devices.device import Device
from model.devices.gpu.device import GpuDevice
from model.layers import Embedding, Linear
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import OptionError
from model.step import Row, Scoring, StepPlan
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from tests.model.checkpoint.gguf.test_loading import LLAMA, convert
from tests.model.test_decoder import GREEDY, finish
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.gguf_models import make_folder
from tests.support.paths import ROOT
from tests.support.submitting import submit
from tests.support.torch_blocks import BlockMatrix, BlockProducts, dequantize
from tests.triton.test_products import DTYPES, NEAR, near

pytestmark = [
    pytest.mark.usefixtures("interpreter", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FORMS = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["by rows", "fixed"])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shipped_tile(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tile of float32. In its place is a larger one, as the interpreter's time is in the number
    of tiles.
    """
    from model.devices.gpu import block_products

    shipped = block_products.FLOAT32_TILE
    monkeypatch.setattr(
        block_products,
        "FLOAT32_TILE",
        block_products.Tile(64, block_products.OUTPUTS, block_products.INPUTS, 4, 1),
    )
    return shipped


def made(
    form: BlockFormat,
    outputs: int,
    inputs: int,
    *,
    fixed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Tensor]:
    """A layer with a bias, whose scales differ by a factor of 1000; and the matrix that its blocks
    stand for, in x's dtype.
    """
    from model.devices.gpu.block_modules import GpuBlockLinear

    generator = torch.Generator().manual_seed(outputs)
    layer = GpuBlockLinear(Linear(inputs, outputs, dtype=dtype), form, dtype, fixed_tile=fixed)
    layer.requires_grad_(False).allocate(CPU)
    sizes_O1 = torch.logspace(-3, 0, outputs)[torch.randperm(outputs, generator=generator), None]
    blocks = form.quantize(
        (torch.randn(outputs, inputs, generator=generator) + 0.1) * inputs**-0.5 * sizes_O1
    )
    layer.set_blocks(0, blocks)
    weight_OI = dequantize(form, blocks, inputs)
    # The interpreter's products of bfloat16 are of float32.
    return layer, weight_OI.half().float() if dtype is torch.float16 else weight_OI


def rows_of(num_rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(num_rows)).to(
        dtype
    )


SIZES = [(1, 64, 32), (3, 40, 33), (17, 300, 7), (64, 1060, 65), (100, 1568, 130)]
"""(rows, inputs, outputs): whole blocks and tiles and parts of some; sums of one, two and three
parts."""


@DTYPES
@FORMS
@FIXED
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), SIZES)
@torch.inference_mode()
def test_products_are_the_dequantized_matrixs(
    num_rows: int, inputs: int, outputs: int, fixed: bool, form: BlockFormat, dtype: torch.dtype
) -> None:
    layer, weight_OI = made(form, outputs, inputs, fixed=fixed, dtype=dtype)
    x_TI = rows_of(num_rows, inputs, dtype)
    y_TO = layer(x_TI)
    expected_TO = F.linear(x_TI.double(), weight_OI.double(), layer.bias.double())
    assert y_TO.dtype is dtype and near(y_TO, expected_TO, NEAR[dtype])
    assert torch.equal(layer(x_TI[None]), y_TO[None]) and layer(x_TI[:0]).shape == (0, outputs)
    layer.bias = None
    assert near(layer(x_TI), F.linear(x_TI.double(), weight_OI.double()), NEAR[dtype])


@FORMS
@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_products_of_random_shapes(seed: int, form: BlockFormat) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 3, 17, 64, 100])
    inputs = rng.randint(1, 700)
    outputs = rng.randint(1, 150)
    layer, weight_OI = made(form, outputs, inputs, fixed=rng.random() < 0.5)
    x_TI = rows_of(num_rows, inputs)
    assert near(
        layer(x_TI),
        F.linear(x_TI.double(), weight_OI.double(), layer.bias.double()),
        NEAR[torch.float32],
    )


@FORMS
@torch.inference_mode()
def test_the_shipped_tile_of_float32(
    form: BlockFormat, shipped_tile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.devices.gpu import block_products

    assert (
        shipped_tile.outputs < block_products.OUTPUTS
        and shipped_tile.inputs < block_products.INPUTS
    )
    monkeypatch.setattr(block_products, "FLOAT32_TILE", shipped_tile)
    layer, weight_OI = made(form, 70, 130)
    x_TI = rows_of(20, 130)
    assert near(
        layer(x_TI),
        F.linear(x_TI.double(), weight_OI.double(), layer.bias.double()),
        NEAR[torch.float32],
    )


@FORMS
@torch.inference_mode()
def test_every_weight_is_the_definitions_bit_for_bit(form: BlockFormat) -> None:
    """Rows of a unit matrix take the weights out one by one, through the product as through the
    table.
    """
    from model.devices.gpu.block_modules import GpuBlockEmbedding

    layer, weight_OI = made(form, 70, 1100)
    layer.bias = None
    assert torch.equal(layer(torch.eye(1100)).T, weight_OI)
    table = GpuBlockEmbedding(Embedding(70, 1100), form, torch.float32, fixed_tile=False)
    table.stored, ids_T = layer.stored, torch.tensor([69, 0, 3, 3, 64])
    assert torch.equal(table(ids_T), weight_OI[ids_T]) and table(ids_T[:0]).shape == (0, 1100)
    x_SD = rows_of(5, 1100)
    assert torch.equal(table.logits(x_SD), layer(x_SD))


@FORMS
@torch.inference_mode()
def test_many_rows_are_multiplied_by_torch_some_columns_at_a_time(
    form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.devices.gpu import block_products

    monkeypatch.setattr(block_products, "DEQUANTIZED_AT_ONCE", 64 * 100)
    launched = []
    monkeypatch.setattr(block_products, "_multiply", lambda *_: launched.append(1))
    layer, weight_OI = made(form, 150, 100)
    x_TI = rows_of(block_products.MOST_ROWS + 1, 100)
    for bias_O in (layer.bias, None):
        layer.bias = bias_O
        assert (
            near(
                layer(x_TI),
                F.linear(
                    x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double()
                ),
                NEAR[torch.float32],
            )
            and not launched
        )


@DTYPES
@FORMS
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(
    form: BlockFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tiles are fixed, also beyond the rows of a launch; elsewhere within a tile's size."""
    from model.devices.gpu import block_products

    monkeypatch.setattr(block_products, "ROWS_AT_ONCE", 64)
    layer, _ = made(form, 70, 1100, fixed=True, dtype=dtype)
    x_TI = rows_of(130, 1100, dtype)
    together = layer(x_TI)
    for rows in (slice(0, 1), slice(129, 130), slice(5, 22), slice(63, 65), slice(30, 130)):
        assert torch.equal(layer(x_TI[rows]), together[rows])
    layer.fixed_tile = False
    together = layer(x_TI[:16])
    assert all(torch.equal(layer(x_TI[i : i + 1])[0], together[i]) for i in (0, 7, 15))


@FORMS
@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row_and_column(form: BlockFormat) -> None:
    layer, _ = made(form, 70, 200)
    x_TI = rows_of(20, 200)
    before = layer(x_TI)
    x_TI[3, 7] = torch.nan
    # Scales of NaN.
    layer.set_blocks(69, torch.full((1, form.row_bytes(200)), 255, dtype=torch.uint8))
    after = layer(x_TI)
    assert after[3].isnan().all() and after[:, 69].isnan().all()
    kept = [i for i in range(20) if i != 3]
    assert torch.equal(after[kept, :69], before[kept, :69])


@FORMS
def test_a_matrix_is_filled_in_any_pieces(
    form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By floats, which are quantized when there are enough of them, and by blocks between them."""
    from model.devices.gpu import block_modules

    monkeypatch.setattr(block_modules, "QUANTIZED_AT_ONCE", 20 * 100)
    layer, _ = made(form, 70, 100)
    whole, rows = layer.weight.clone(), torch.randn(70, 100)
    layer.set_blocks(0, form.quantize(rows))
    expected = layer.weight.clone()
    assert not torch.equal(whole, expected)
    layer.weight.zero_()
    scratch = torch.empty(13, 100)
    for first in range(0, 70, 13):
        part = rows[first : first + 13]
        if first == 26:
            layer.set_blocks(first, form.quantize(part))
        else:
            layer.set_rows(first, scratch[: len(part)].copy_(part))  # Overwritten by the next.
    assert torch.equal(
        layer.weight, expected
    ) and layer.weight.numel() - layer.num_filling == 70 * form.row_bytes(100)


def test_parts_depend_on_the_matrix_alone_and_give_a_gpu_enough_programs() -> None:
    from model.devices.gpu.block_products import (
        FLOAT32_TILE,
        TILES,
        choose,
        part_of,
    )

    shapes = {
        (6400, 6144): 4,
        (6144, 6144): 4,
        (24576, 6144): 1,
        (6144, 24576): 4,
        (2304, 2048): 4,
        (50257, 2048): 1,
        (8, 8): 1,
    }
    parts = {(outputs, inputs): part_of(inputs, outputs) for outputs, inputs in shapes}
    assert {shape: -(-shape[1] // part) for shape, part in parts.items()} == shapes
    assert {choose(rows, 2, False) for rows in (1, 16, 17, 33, 300)} == set(TILES)
    assert {choose(rows, 2, True) for rows in (1, 300)} == {TILES[-1]} and choose(
        1, 4, False
    ) is choose(300, 4, True) is FLOAT32_TILE


class Dequantized(BlockProducts):
    """The definition: torch's products, in float, of what the blocks stand for."""

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        for module in decoder.modules():
            if isinstance(module, BlockMatrix):
                module.product = partial(self._multiply, module)  # type: ignore[method-assign]

    @staticmethod
    def _multiply(module: BlockMatrix, x: Tensor) -> Tensor:
        return F.linear(x, dequantize(module._form, module.weight, module.shape[1]))


def runner_of(
    folder: Path, device: Device, products: Any, dtype: torch.dtype = torch.float32
) -> ModelRunner:
    decoder = load_decoder(folder, read_spec(folder), dtype, CPU, products)
    fixed = products.batch_invariant
    options = EngineOptions(
        "cpu", str(dtype).removeprefix("torch."), 1, 32, 40, None, 512, 8, 64, deterministic=fixed
    )
    return ModelRunner.over(decoder, device, options)


def scores(runner: ModelRunner, ids: list[int]) -> list[float]:
    return [
        drawn.logprob
        for drawn in runner.run(
            StepPlan((Row(0, ids[:-1], 0, [array("q", range(8))], None, Scoring(0, ids[1:], 0)),))
        ).scored[0]
    ]


def greedy(runner: ModelRunner, ids: list[int]) -> list[int]:
    core = EngineCore(Scheduler(Limits(40, runner.pool.layout, 512, 8, 64)), runner)
    submit(core.scheduler, 0, ids, 4, GREEDY)
    return finish(core)[0]


@FORMS
@FIXED
def test_a_model_is_served_as_its_blocks_say(
    form: BlockFormat, fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the reference attention over dequantized weights: rounding of float32. Beside the
    CPU's products, which round activations.
    """
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(CpuDevice, "backend_for", lambda *_: "reference")
    folder, device = make_checkpoint(SHAPES[4], tmp_path).folder, GpuDevice("cpu")
    ids = list(range(3, 20))
    ours = runner_of(folder, device, device.products(device.dtypes("auto"), form.name, fixed))
    assert (
        ours.kernels == ("triton" if fixed else "triton-fast+cublas")
        and ours.deterministic is fixed
    )
    exact, rounded = (
        runner_of(folder, CpuDevice(), products(form.name))
        for products in (Dequantized, BlockProducts)
    )
    assert ours.weight_bytes == exact.weight_bytes
    found, expected, near_by = (scores(runner, ids) for runner in (ours, exact, rounded))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(found, near_by, strict=True)) < 0.1
    assert greedy(ours, ids) == greedy(exact, ids)


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q8_0", "int4")])
@torch.inference_mode()
def test_a_file_is_held_as_on_a_cpu(kind: str, form: str, tmp_path: Path) -> None:
    """Its blocks as they are stored or, where the format cannot hold them, quantized anew: every
    row of every matrix, bit for bit.
    """
    source, folder, device = tmp_path / "source", tmp_path / "gguf", GpuDevice("cpu")
    folder.mkdir()
    make_folder(source, LLAMA)
    convert(source, folder, kind)
    products = BlockProducts(form), device.products(device.dtypes("auto"), form, False)
    expected, ours = (
        load_decoder(folder, read_spec(folder), torch.float32, CPU, each) for each in products
    )
    matrices = {
        name: module for name, module in expected.named_modules() if isinstance(module, BlockMatrix)
    }
    assert len(matrices) > 8
    for name, matrix in matrices.items():
        ids_T = torch.arange(matrix.shape[0])
        assert torch.equal(ours.get_submodule(name).rows(ids_T), matrix.rows(ids_T)), name  # type: ignore[operator]


@FORMS
def test_a_gpu_serves_them_with_triton_alone(
    form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = GpuDevice("cpu")
    monkeypatch.setattr(device, "_has_kernels", False)
    with pytest.raises(
        OptionError, match=f"engine.quantization {form.name} on cuda needs triton; expected none"
    ):
        device.products(device.dtypes("auto"), form.name, False)


def test_granite_20b_code_fits_a_card_of_24_gb() -> None:
    """In int4 with a cache of 32 sequences of 8,192 tokens in bfloat16, in int8 with one of 4; and
    1.5 GB for steps and graphs.
    """
    plan = make_plan(
        PlanOptions(
            model=ROOT / "configs/models/granite-20b-code", memory=24 * 10**9, device="cuda"
        )
    )
    assert (
        plan.weight_bytes["int4"] == 12_546_738_176 and plan.weight_bytes["int8"] == 21_324_498_944
    )
    for form, sequences in (("int4", 32), ("int8", 4)):
        cache = sequences * 8192 * plan.kv_bytes_per_token["bfloat16"]["multi_query"]
        assert plan.weight_bytes[form] + cache + 1.5e9 < 24e9, form
