"""A GGUF file loads as the safetensors from which llama.cpp's converter makes it: the same spec,
the same float32 weights, bit for bit.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from model.checkpoint.families import read_spec
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.dequantize import dequantize
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.identity import ModelFiles
from model.checkpoint.names import Part
from model.checkpoint.weights import Checkpoint, load_decoder
from model.decoder import Decoder
from model.spec import CheckpointError
from tests.support.families import CONFIGS
from tests.support.gguf_models import make_folder, write_gguf
from tests.support.torch_blocks import BlockProducts

CPU = torch.device("cpu")
CONVERTIBLE = [
    *(("llama", number) for number in range(5)),
    *(("falcon", number) for number in (0, 3)),
    *(("gemma", number) for number in range(3)),
    *(("gemma3_text", number) for number in (0, 3)),
    *(("gemma4_text", number) for number in range(5)),
    *(("santacoder", number) for number in (0, 2, 3)),
]
"""Of tests.support.families.CONFIGS those that the format can express: gemma's has no rotary base,
falcon's no separate MLP width, ..."""


def convertible(family: str, number: int) -> dict[str, Any]:
    """One of CONFIGS, with those of its values changed that llama.cpp knows by heart."""
    config = dict(CONFIGS[family][number])
    if family == "gemma3_text":
        config |= {"query_pre_attn_scalar": config["head_dim"]}
        config.pop("layer_types", None)
    return config


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of safetensors and one that is to have a GGUF file."""
    (tmp_path / "gguf").mkdir()
    return tmp_path / "safetensors", tmp_path / "gguf"


def convert(source: Path, folder: Path, kind: str = "F32", **metadata: Any) -> None:
    write_gguf(source, folder / "m.gguf", kind, **metadata)
    (folder / "config.json").write_text(json.dumps(config_of(GGUFFile.open(folder / "m.gguf"))))


def load(folder: Path) -> Decoder:
    return load_decoder(folder, read_spec(folder), torch.float32, CPU)


def assert_same(ours: Decoder, theirs: Decoder, but_for: str = "none") -> None:
    for (name, found), (other, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        if but_for not in name:
            assert torch.equal(found, expected), name


@pytest.mark.parametrize(("family", "number"), CONVERTIBLE)
def test_every_architecture_loads_as_its_safetensors(
    family: str, number: int, folders: tuple[Path, Path]
) -> None:
    source, folder = folders
    make_folder(source, convertible(family, number))
    convert(source, folder)
    ours = read_spec(folder)
    theirs = replace(read_spec(source), end_token_ids=(), num_unread_layers=0)
    assert replace(ours, rotary=theirs.rotary, attention_scale=theirs.attention_scale) == theirs
    assert ours.attention_scale == pytest.approx(theirs.attention_scale, rel=1e-6)
    if ours.rotary is not None and theirs.rotary is not None:
        assert ours.rotary.interleaved == theirs.rotary.interleaved
        assert ours.rotary.scale == pytest.approx(theirs.rotary.scale, rel=1e-6)
        assert ours.rotary.inverse_frequencies == pytest.approx(
            theirs.rotary.inverse_frequencies, rel=1e-6
        )
    loaded = load(folder)
    if family in (
        "gemma",
        "gemma3_text",
    ):  # The converter adds 1 to the norms' weights, which rounds them.
        for (name, found), expected in zip(
            loaded.named_parameters(), load(source).parameters(), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-7 if "norm" in name else 0)
    else:
        assert_same(loaded, load(source))


LLAMA = CONFIGS["llama"][0] | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "head_dim": 16,
}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_are_dequantized_as_gguf_does_with_rows_in_place(
    kind: str, folders: tuple[Path, Path]
) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder, kind)
    checkpoint, original = Checkpoint(folder), Checkpoint(source)
    found = gguf.GGMLQuantizationType[kind]
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    for name in original.tensors:
        expected = original.read(Part(name)).numpy()
        if expected.ndim == 2 and expected.shape[-1] % gguf.GGML_QUANT_SIZES[found][0] == 0:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, found), found)
        assert torch.equal(checkpoint.read(Part(name)).float(), torch.from_numpy(expected)), name
    load(folder)


def test_raw_blocks_are_the_rows_that_are_read(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder, "Q4_1")
    monkeypatch.setattr("model.checkpoint.gguf.weights.BLOCK_ELEMENTS", 2**10)
    monkeypatch.setattr("model.checkpoint.weights.BLOCK_ELEMENTS", 3 * 64)
    checkpoint = Checkpoint(folder)
    for name in ("q_proj", "k_proj", "v_proj"):
        part = Part(f"model.layers.1.self_attn.{name}.weight")
        raw = checkpoint.raw_blocks(part)
        assert raw is not None and raw[0] == "Q4_1"
        data = torch.cat([block.clone() for block in raw[1]])
        rows = torch.empty(len(data), 64)
        dequantize(raw[0], data, rows)
        assert torch.equal(rows, checkpoint.read(part))
        assert torch.equal(rows, torch.cat([block.clone() for block in checkpoint.blocks(part)]))
    assert checkpoint.raw_blocks(Part("model.norm.weight")) is None
    assert Checkpoint(source).raw_blocks(part) is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"attention.head_count_kv": 2},
            r"m\.gguf: llama\.attention\.head_count_kv is 2, expected 1: onehead serves one "
            r"key/value head",
        ),
        ({"attention.head_count_kv": [1, 1]}, "attention.head_count_kv must be an integer"),
        (
            {"attention.value_length": 8},
            "llama.attention.value_length must be attention.key_length, 16",
        ),
        (
            {"rope.dimension_count": 8},
            "llama.rope.dimension_count must be attention.key_length, 16",
        ),
        (
            {"rope.scaling.type": "longrope"},
            "llama.rope.scaling.type must be one of none, linear, yarn",
        ),
        (
            {"rope.scaling.type": "linear"},
            "llama.rope.scaling.factor must be a number above 0, and is missing",
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.yarn_ext_factor": 0.5,
            },
            "yarn_ext_factor must be 1",
        ),
        ({"rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor must be 1"),
        (
            {"rope.scale_linear": 2.0},
            "llama.rope.scale_linear must be 1: onehead serves no other, found 2.0",
        ),
        (
            {"attention.causal": False},
            "llama.attention.causal must be 1: onehead serves no other, found False",
        ),
        ({"expert_count": 8}, "llama.expert_count must be 0"),
        ({"block_count": 0}, "llama.block_count must be an integer from 1 to 1024, found 0"),
        ({"logit_scale": 2.0}, "llama.logit_scale must be 0: onehead serves no other, found 2.0"),
    ],
)
def test_metadata_that_is_not_served_is_refused_by_name(
    metadata: dict[str, Any], message: str, folders: tuple[Path, Path]
) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    with pytest.raises(CheckpointError, match=message) as error:
        convert(source, folder, **metadata)
    assert str(error.value).startswith(str(folder / "m.gguf"))


def test_the_width_of_a_head_is_that_of_config_json(folders: tuple[Path, Path]) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"head_dim": 24}))
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: blk\.0\.attn_\S+ has \d+ rows, expected heads of 24 rows"
    ):
        Checkpoint(folder)
    del config["head_dim"]
    path.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=rf"^{path}: head_dim must be an integer .*, and is missing"
    ):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
def test_a_damaged_scale_is_named_by_its_file_and_tensor(
    kind: str, folders: tuple[Path, Path]
) -> None:
    """Also where blocks are taken as they are."""
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder, kind)
    tensor = GGUFFile.open(folder / "m.gguf").entries["blk.1.ffn_down.weight"]
    with open(folder / "m.gguf", "r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\xff\x7f")
    name = r"(blk\.1\.ffn_down|model\.layers\.1\.mlp\.down_proj)\.weight"
    for products in (None, BlockProducts("int4" if kind == "Q4_1" else "int8")):
        with pytest.raises(
            CheckpointError,
            match=rf"m\.gguf: {name} (holds NaN or|has a block whose scale or minimum is NaN)",
        ):
            load_decoder(folder, read_spec(folder), torch.float32, CPU, products)


def test_keys_that_are_not_known_are_reported(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    unknown: dict[str, Any] = {"attention.sinks": 4}
    convert(source, folder, **unknown)
    read_spec(folder)
    assert "llama.attention.sinks" in caplog.text


def test_an_unknown_architecture_is_refused_with_those_there_are(tmp_path: Path) -> None:
    gguf_writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for write in (
        gguf_writer.write_header_to_file,
        gguf_writer.write_kv_data_to_file,
        gguf_writer.write_tensors_to_file,
    ):
        write()
    gguf_writer.close()
    with pytest.raises(
        CheckpointError,
        match=r"general\.architecture is 'qwen3'; supported: falcon, gemma, gemma-embedding, "
        r"gemma3, gemma4, llama, starcoder",
    ):
        config_of(GGUFFile.open(tmp_path / "m.gguf"))


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def test_a_wrong_tensor_is_named(folders: tuple[Path, Path]) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder)
    path = folder / "m.gguf"
    whole = path.read_bytes()
    for old, new, message in (
        (b"blk.0.ffn_norm", b"blk.0.ffn_nurm", r"unexpected tensor blk\.0\.ffn_nurm\.weight"),
        (
            b"blk.0.ffn_norm",
            b"blk.7.ffn_norm",
            r"unexpected tensor model\.layers\.7\.post_attention_layernorm\.weight",
        ),
        (
            b"blk.0.attn_q.weight",
            b"blk.0.attn_k.bias.x",
            r"unexpected tensor blk\.0\.attn_k\.bias\.x",
        ),
    ):
        edit(path, old, new)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        path.write_bytes(whole)
    path.write_bytes(whole[:-64] + b"\xff\xff\xff\x7f" * 16)
    with pytest.raises(CheckpointError, match=r"m\.gguf: \S+ holds NaN or infinity"):
        load(folder)


def test_the_digest_covers_every_part(folders: tuple[Path, Path]) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder)
    spec = read_spec(folder)
    before = ModelFiles(folder, folder / "tokenizer.json", spec).digest()
    data = bytearray((folder / "m.gguf").read_bytes())
    data[-4] ^= 1
    (folder / "m.gguf").write_bytes(data)
    assert ModelFiles(folder, folder / "tokenizer.json", spec).digest() != before


def test_two_checkpoints_in_a_folder_are_refused_and_safetensors_come_first(
    folders: tuple[Path, Path],
) -> None:
    source, folder = folders
    make_folder(source, LLAMA)
    convert(source, folder)
    (folder / "n.gguf").write_bytes((folder / "m.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files; .* m\.gguf, n\.gguf"):
        load(folder)
    (source / "m.gguf").write_bytes(b"")
    load(source)
