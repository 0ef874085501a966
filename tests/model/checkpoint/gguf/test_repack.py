"""GGUF's blocks in the kernels' formats hold the numbers that the file holds, and a model is loaded
from them without floats.
"""

from pathlib import Path

import pytest
import torch

from model.checkpoint.families import read_spec
from model.checkpoint.gguf.dequantize import dequantize
from model.checkpoint.gguf.repack import REPACKED, repack, repacks
from model.checkpoint.gguf.types import BY_NAME
from model.checkpoint.names import Part
from model.checkpoint.weights import Checkpoint, load_decoder
from model.devices.blocks import FORMATS
from model.spec import CheckpointError
from tests.model.checkpoint.gguf.test_loading import LLAMA, convert
from tests.support import torch_blocks
from tests.support.gguf_models import SCALES, make_folder
from tests.support.torch_blocks import BlockMatrix, BlockProducts


def some_rows(kind: str, scale: float) -> torch.Tensor:
    """40 rows of two blocks of random bytes, with scales of this size."""
    data = torch.randint(0, 256, (40, 2, BY_NAME[kind].block_bytes), dtype=torch.uint8)
    for begin in SCALES[kind]:
        data[:, :, begin : begin + 2] = (
            ((torch.rand(40, 2, 1) * 2 - 1) * scale).half().view(torch.uint8)
        )
    return data.flatten(1)


@pytest.mark.parametrize(("kind", "form"), sorted(REPACKED))
def test_numbers_are_those_of_the_file(kind: str, form: str) -> None:
    data = some_rows(kind, 0.01)
    expected = torch.empty(40, 2 * BY_NAME[kind].block_elements)
    dequantize(kind, data, expected)
    found = torch_blocks.dequantize(FORMATS[form], repack(kind, form, data), expected.shape[1])
    if kind == "Q4_K":
        assert 0 < (found - expected).abs().max() < 2**-11 * 0.01 * 63 * 16
    else:
        assert torch.equal(found, expected)


def test_what_float16_cannot_hold_is_refused() -> None:
    for kind in ("Q4_0", "Q4_K"):
        with pytest.raises(
            CheckpointError, match=r"beyond float16: .* expected engine\.quantization none"
        ):
            repack(kind, "int4", some_rows(kind, 3e4))
    assert not repacks("Q6_K", "int8") and not repacks("Q8_0", "int4")


@pytest.mark.parametrize(
    ("kind", "form"),
    [("Q8_0", "int8"), ("Q5_0", "int8"), ("Q4_0", "int4"), ("Q5_1", "int8"), ("Q8_0", "int4")],
)
def test_a_model_is_loaded_from_blocks(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "source", tmp_path / "gguf"
    folder.mkdir()
    make_folder(source, LLAMA)
    convert(source, folder, kind)
    monkeypatch.setattr("model.checkpoint.gguf.weights.BLOCK_ELEMENTS", 2**10)
    decoder = load_decoder(
        folder, read_spec(folder), torch.float32, torch.device("cpu"), BlockProducts(form)
    )
    checkpoint = Checkpoint(folder)
    down = decoder.get_submodule("blocks.1.mlp.down")
    part = Part("model.layers.1.mlp.down_proj.weight")
    raw = checkpoint.raw_blocks(part)
    assert isinstance(down, BlockMatrix) and raw is not None and raw[0] == kind
    expected = checkpoint.read(part)
    steps = 0 if repacks(kind, form) else 0.01 if form == "int8" else 0.2
    assert (
        down.rows(torch.arange(len(expected))) - expected
    ).abs().max() <= steps * expected.abs().max()
