"""Weights packed to 4 bits load as the numbers that they stand for; what is not read of the format
is refused by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands.held_out import decoder_logits
from commands.options import PlanOptions
from commands.plan import make_plan
from commands.saving import save_decoder
from model.checkpoint.families import read_spec
from model.checkpoint.names import Part
from model.checkpoint.weights import Checkpoint, load_decoder
from model.decoder import Decoder
from model.devices.products import Products
from model.spec import CheckpointError
from tests.model.devices.cpu.test_dtypes import computed, make_runner
from tests.support.compressed_folders import CONFIG, TABLE, described, make_compressed
from tests.support.torch_blocks import BlockMatrix, BlockProducts

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "packed", tmp_path / "plain"


def load(folder: Path, products: Products | None = None) -> Decoder:
    return load_decoder(folder, read_spec(folder), torch.float32, CPU, products)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("size", "dtype"), [(32, torch.bfloat16), (64, torch.float16), (128, torch.float32)]
)
def test_weights_are_exact_in_float32(
    size: int,
    dtype: torch.dtype,
    symmetric: bool,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, twin = folders
    make_compressed(folder, twin, size, symmetric, dtype, packs_table=size == 64)
    # Blocks that begin within a word of zero points.
    monkeypatch.setattr("model.checkpoint.weights.BLOCK_ELEMENTS", 3 * 128)
    ours, theirs = load(folder).state_dict(), load(twin).state_dict()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize(
    ("form", "symmetric", "share"),
    [("int4", True, 0), ("int4", False, 2**-10), ("int8", True, 0), ("int8", False, 0.01)],
)
def test_blocks_hold_the_numbers_of_the_file(
    form: str,
    symmetric: bool,
    share: float,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, twin = folders
    make_compressed(folder, twin, 64, symmetric, packs_table=True)
    monkeypatch.setattr("model.checkpoint.compressed.BLOCK_ELEMENTS", 3 * 128)
    decoder, plain = load(folder, BlockProducts(form)), load(twin)
    for name, expected in (
        ("blocks.1.mlp.down", Checkpoint(twin).read(Part(DOWN))),
        ("blocks.0.attention.qkv", None),
    ):
        module = decoder.get_submodule(name)
        expected = plain.get_parameter(f"{name}.weight") if expected is None else expected
        assert isinstance(module, BlockMatrix)
        assert (
            module.rows(torch.arange(len(expected))) - expected
        ).abs().max() <= share * expected.abs().max()
    ids_T = torch.arange(5, 45)
    logits = [decoder_logits(each)(ids_T) for each in (decoder, plain)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()


def test_kernels_compute_a_request_alone_as_among_others_and_the_plan_counts_the_bytes(
    folders: tuple[Path, Path],
) -> None:
    folder, twin = folders
    make_compressed(folder, twin)
    runner, plain = make_runner(folder, "auto", "int4"), make_runner(twin, "auto")
    assert computed(runner).scored[0] == computed(runner, 1).scored[0] and runner.deterministic
    plan = make_plan(PlanOptions(model=folder, memory=10**9, device="cpu"))
    assert plan.weight_bytes["int4"] == runner.weight_bytes and plan.dtype == "mixed"
    mixed = make_runner(folder, "auto")  # The table is stored in bfloat16.
    assert plan.weight_bytes["mixed"] == mixed.weight_bytes and computed(mixed) == computed(plain)
    assert plan.weight_bytes["float32"] == plain.weight_bytes


def test_what_is_trained_from_packed_weights_is_an_ordinary_checkpoint(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, twin = folders
    make_compressed(folder, twin)
    save_decoder(
        tmp_path / "saved",
        load(folder),
        torch.float32,
        json.loads((folder / "config.json").read_text()),
    )
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    assert torch.equal(
        Checkpoint(tmp_path / "saved").read(Part(DOWN)), Checkpoint(twin).read(Part(DOWN))
    )


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A quantization_config with one key changed."""
    config: dict[str, Any] = described(32, True)
    place = config
    for key in path[:-1]:
        place = place[key]
    place |= {path[-1]: value}
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("quant_method",),
            "gptq",
            "quant_method is 'gptq'; of quantised checkpoints onehead reads compressed-tensors",
        ),
        (("format",), "marlin-24", "format is 'marlin-24'"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is {'num_bits': 8}"),
        (
            ("sparsity_config",),
            {"format": "sparse-bitmask"},
            "sparsity_config is {'format': 'sparse-bitmask'}",
        ),
        (("config_groups",), {}, "config_groups must be an object of groups, found {}"),
        (GROUP, None, "config_groups: group_0 must be an object with weights, found None"),
        (
            (*GROUP, "input_activations"),
            {"num_bits": 8},
            "group_0: input_activations is {'num_bits': 8}",
        ),
        ((*WEIGHTS, "num_bits"), 8, "weights: num_bits is 8"),
        ((*WEIGHTS, "type"), "float", "weights: type is 'float'"),
        ((*WEIGHTS, "strategy"), "channel", "weights: strategy is 'channel'"),
        (
            (*WEIGHTS, "actorder"),
            "group",
            r"weights: actorder is 'group'; inputs in another order .*\(g_idx\) are not read",
        ),
        ((*WEIGHTS, "group_size"), 48, "weights: group_size must be a multiple of 32, found 48"),
        ((*WEIGHTS, "symmetric"), 1, "weights: symmetric must be true or false, found 1"),
    ],
)
def test_what_is_not_read_of_the_config_is_named(
    path: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": changed(path, value)})
    )
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path}/config.json: quantization_config: .*{message}"
    ):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"_scale": None},
            r"down_proj\.weight of 128 rows and 256 columns has tensors {'packed': \['I32', 128, "
            r"32\]}, expected .*'scale'",
        ),
        (
            {"_shape": None},
            r"down_proj\.weight_shape must be two numbers of dtype I64, of rows and columns",
        ),
        (
            {"_shape": torch.tensor([128, 1024])},
            r"of 128 rows and 1024 columns .* expected {'packed': \['I32', 128, 128\]",
        ),
        ({"_shape": torch.tensor([-128, -256])}, r"of -128 rows and -256 columns"),
        (
            {"_packed": torch.zeros(128, 32)},
            r"has tensors {'packed': \['F32', 128, 32\],.* expected {'packed': \['I32', 128, 32\]",
        ),
        (
            {"_scale": torch.zeros(128, 4)},
            r"'scale': \['F32', 128, 4\].* expected .*'scale': \['F32', 128, 8\]",
        ),
        (
            {"_scale": torch.full((128, 8), torch.nan)},
            r"down_proj\.weight_scale holds NaN or infinity",
        ),
        ({"_scale": torch.full((128, 8), 3e38)}, r"down_proj\.weight holds NaN or infinity"),
        ({"_zero_point": torch.zeros(16, 8, dtype=torch.int32)}, r"'zero_point': \['I32', 16, 8\]"),
        (
            {"_g_idx": torch.zeros(256, dtype=torch.int32)},
            r"unexpected tensor .*down_proj\.weight_g_idx",
        ),
        (
            {"": torch.zeros(128, 256)},
            r"down_proj\.weight occurs beside .*down_proj\.weight_packed",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    changes: dict[str, Any], message: str, folders: tuple[Path, Path]
) -> None:
    folder, twin = folders
    make_compressed(folder, twin)
    tensors = load_file(folder / "model.safetensors") | {
        f"{DOWN}{part}": value for part, value in changes.items()
    }
    save_file(
        {name: value for name, value in tensors.items() if value is not None},
        folder / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_scales_beyond_float16_and_packed_weights_that_nothing_describes_are_refused(
    folders: tuple[Path, Path],
) -> None:
    folder, twin = folders
    make_compressed(folder, twin)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{DOWN}_scale": torch.full((128, 8), 1e4)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"down_proj\.weight has a block whose scale or minimum is .*beyond float16: .*"
        r"engine\.",
    ):
        load(folder, BlockProducts("int4"))
    assert load(folder).get_parameter("blocks.1.mlp.down.weight").abs().max() == 8e4
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        CheckpointError,
        match=r"quantization_config must be an object that describes .*_packed, and is missing",
    ):
        load(folder)
    assert TABLE in tensors
