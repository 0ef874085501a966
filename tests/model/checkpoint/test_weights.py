"""Loading is strict: every tensor that is missing, unexpected, misshapen or of the wrong kind is
named; so is every bad config key.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands.saving import config_from_spec, save_decoder
from model.checkpoint import safetensors_file, weights
from model.checkpoint.families import read_spec
from model.checkpoint.identity import ModelFiles, file_digest
from model.checkpoint.weights import Checkpoint, load_decoder
from model.spec import CheckpointError
from tests.model.checkpoint.test_files import POINTER

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be broken."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "checkpoint"))


def load(folder: Path) -> Any:
    return load_decoder(folder, read_spec(folder), torch.float32, CPU)


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in (config | changes).items() if v != "remove"})
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("transformer.h.1.ln_2.bias", None, r"missing tensor transformer\.h\.1\.ln_2\.bias"),
        (
            "transformer.h.9.ln_2.bias",
            torch.zeros(64),
            r"unexpected tensor transformer\.h\.9\.ln_2\.bias",
        ),
        (
            "transformer.h.0.attn.c_attn.weight",
            torch.zeros(192, 64),
            r"c_attn\.weight has shape \[192, 64\], expected \[96, 64\]",
        ),
        (
            "transformer.ln_f.bias",
            torch.zeros(64, dtype=torch.int32),
            r"ln_f\.bias has dtype I32, expected one of F64, F32, F16, BF16",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    folder: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    edit_weights(folder, **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_old_mask_buffers_and_a_second_copy_of_the_tied_head_are_fine(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    edit_weights(
        folder,
        **{"transformer.h.0.attn.bias": torch.ones(8, 8), "lm_head.weight": embedding.clone()},
    )
    load(folder)


def test_a_tied_head_that_differs_is_refused(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    embedding[17, 3] += 1e-3
    edit_weights(folder, **{"lm_head.weight": embedding})
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight differs from transformer\.wte\.weight.*tie_word_embeddings false",
    ):
        load(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(folder: Path, value: float) -> None:
    weight = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    weight[-1, -1] = value
    edit_weights(folder, **{"transformer.h.1.mlp.c_fc.weight": weight})
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.weight holds NaN or infinity"):
        load(folder)


def test_values_beyond_the_range_of_the_dtype_are_refused(folder: Path) -> None:
    edit_weights(folder, **{"transformer.ln_f.bias": torch.full((64,), 1e5)})
    load(folder)
    with pytest.raises(CheckpointError, match=r"ln_f\.bias is beyond the range of torch\.float16"):
        load_decoder(folder, read_spec(folder), torch.float16, CPU)


def test_a_manifest_is_held_to(folder: Path) -> None:
    path = folder / "model.safetensors"
    (folder / "SHA256SUMS").write_text(f"{file_digest(path)} *model.safetensors\n")
    load(folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="its contents are not what SHA256SUMS says"):
        load(folder)
    (folder / "SHA256SUMS").write_text("")
    with pytest.raises(CheckpointError, match=r"says nothing of model\.safetensors"):
        load(folder)


def rewrite_header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = change(data[8 : 8 + length].decode()).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_headers_that_loaders_disagree_about_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    empty = '"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    overlap = empty.replace("[0]", "[1]").replace("[0, 0]", "[0, 4]")
    for change, message in (
        (
            lambda text: text.rstrip()[:-1] + f", {empty}, {empty}" + "}",
            "'x' occurs twice in the header",
        ),
        (
            lambda text: text.rstrip()[:-1] + f", {overlap}" + "}",
            "invalid offset for tensor .*damaged",
        ),
        (lambda text: "[" * 10**6, "invalid JSON in header.*not a safetensors file"),
        (lambda text: '{"a": ' + "[" * 10**6, "invalid JSON in header.*not a safetensors file"),
        (
            lambda text: text.replace('"dtype"', f'"unknown": {"1" * 5000}, "dtype"', 1),
            "number out of range.*damaged",
        ),
        (lambda text: text.replace('"F32"', '"Q4"', 1), "unknown variant `Q4`"),
    ):
        rewrite_header(path, change)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        path.write_bytes(whole)
    for length in (0, 2**63, len(whole)):
        path.write_bytes(struct.pack("<Q", length) + whole[8:])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            load(folder)


def test_many_names_with_one_twice_are_refused_at_once(folder: Path) -> None:
    entry = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    names = ", ".join(f'"n{number}": {entry}' for number in range(20_000))
    rewrite_header(
        folder / "model.safetensors",
        lambda text: text.rstrip()[:-1] + f', {names}, "n19999": {entry}' + "}",
    )
    with pytest.raises(CheckpointError, match="'n19999' occurs twice"):
        load(folder)


def test_shards_equal_the_single_file(folder: Path, tiny_folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"there is a model\.safetensors too"):
        load(folder)
    (folder / "model.safetensors").unlink()
    for (_, ours), (_, single) in zip(
        load(folder).named_parameters(), load(tiny_folder).named_parameters(), strict=True
    ):
        assert torch.equal(ours, single)
    index["weight_map"][names[0]] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"should be in b\.safetensors, and is not"):
        load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: no such file"):
        load(folder)


def test_shards_without_an_index_are_read_by_their_headers(folder: Path, tiny_folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for number in range(3):
        save_file(
            {name: tensors[name] for name in names[number::3]},
            folder / f"model-0000{number + 1}-of-00003.safetensors",
        )
    before = ModelFiles(folder, folder / "tokenizer.json", read_spec(folder)).digest()
    load(folder)  # Of model.safetensors, which comes first.
    (folder / "model.safetensors").unlink()
    for (_, ours), (_, single) in zip(
        load(folder).named_parameters(), load(tiny_folder).named_parameters(), strict=True
    ):
        assert torch.equal(ours, single)
    found = ModelFiles(folder, folder / "tokenizer.json", read_spec(folder)).digest()
    assert found != before
    save_file(
        {name: tensors[name] + 1 for name in names[1::3]},
        folder / "model-00002-of-00003.safetensors",
    )
    assert ModelFiles(folder, folder / "tokenizer.json", read_spec(folder)).digest() != found
    (folder / "model-00002-of-00003.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"model-00002-of-00003\.safetensors: no such file; the folder has "
        r"model-00001-of-00003",
    ):
        load(folder)


@pytest.mark.parametrize(
    "names",
    [["other.safetensors"], ["a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors"]],
)
def test_weights_under_other_names_are_listed(folder: Path, names: list[str]) -> None:
    for name in names:
        shutil.copy(folder / "model.safetensors", folder / name)
    (folder / "model.safetensors").unlink()
    listed = ", ".join(names).replace(".", r"\.")
    with pytest.raises(
        CheckpointError,
        match=rf"model\.safetensors: no such file; the folder has {listed}: expected "
        r"model\.safetensors",
    ):
        load(folder)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("model.safetensors", POINTER, "is a pointer of git-lfs.*git lfs pull"),
        ("model.safetensors", b"PK\x03\x04" + bytes(100), "is a zip archive.*onehead convert"),
        ("model.safetensors", b"<html>404</html>" + bytes(100), "is a web page"),
        ("model.safetensors.index.json", POINTER, "is a pointer of git-lfs"),
        ("pytorch_model.bin", POINTER, "found pytorch_model.bin, a pointer of git-lfs"),
        (
            "pytorch_model.bin",
            b"PK\x03\x04",
            "found pytorch_model.bin, which may run code.*: `onehead convert --model",
        ),
        (
            "model.bin",
            b"PK\x03\x04",
            "found model.bin, which may run code.*: named pytorch_model.bin, `onehead convert "
            "--model",
        ),
        ("weights.pt", b"\x80\x02", "found weights.pt, which may run code.*onehead convert"),
    ],
)
def test_what_lies_in_place_of_weights_is_said(
    folder: Path, name: str, data: bytes, words: str
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


def test_weights_may_be_linked_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "disk")
    (folder / "model.safetensors").symlink_to(tmp_path / "disk")
    load(folder)


def test_more_tensors_than_any_checkpoint_has_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    num_tensors = len(Checkpoint(folder).tensors)
    monkeypatch.setattr(weights, "MAX_TENSORS", num_tensors - 1)
    with pytest.raises(
        CheckpointError, match=rf"{path}: .*more than the {num_tensors - 1} tensors"
    ):
        load(folder)
    monkeypatch.setattr(weights, "MAX_TENSORS", num_tensors)
    monkeypatch.setattr(weights, "MAX_HEADERS_BYTES", 99)
    with pytest.raises(CheckpointError, match="99 bytes of headers"):
        load(folder)
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 99)
    with pytest.raises(CheckpointError, match=rf"{path}: its header says .* at most 99 are read"):
        load(folder)


BAD_NAMES = [
    "../../etc/passwd",
    "x" * 5000 + ".safetensors",
    "\ud800.safetensors",
    "a\n.safetensors",
    "é" * 125 + ".safetensors",
]


@pytest.mark.parametrize(
    "index", [{}, *({"weight_map": {"x": name}} for name in BAD_NAMES), {"weight_map": []}]
)
def test_a_bad_index_is_refused(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def test_a_truncated_file_and_other_formats_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"not fully covered; its \d+ bytes are truncated"):
        load(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"found pytorch_model\.bin, .*onehead convert --model"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; supported: deepseek_v2, .*gpt_bigcode"),
        ({"multi_query": False}, "multi_query is False, so there are 4 key/value heads"),
        ({"n_head": 5}, "n_embd 64 is not a multiple of n_head 5"),
        ({"n_layer": "3"}, "n_layer must be an integer from 1 to 1024, found '3'"),
        ({"n_embd": "remove"}, "n_embd must be an integer of at least 1, and is missing"),
        ({"n_positions": True}, "n_positions must be an integer"),
        (
            {"activation_function": "mish"},
            "activation_function must be one of gelu, .*, found 'mish'",
        ),
        ({"add_cross_attention": True}, "add_cross_attention"),
        (
            {"eos_token_id": 300},
            "eos_token_id 300 of config.json or generation_config.json, expected below vocab_size "
            "300",
        ),
        ({"eos_token_id": "x"}, "eos_token_id must be an id"),
    ],
)
def test_a_wrong_config_key_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_spec(folder)


def test_a_missing_or_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_spec(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_spec(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_spec(folder / "nowhere")


def test_end_tokens_are_the_union_of_both_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert read_spec(folder).end_token_ids == (0, 7)


def test_saving_and_loading_is_the_identity(folder: Path, tmp_path: Path) -> None:
    decoder = load(folder)
    save_decoder(tmp_path / "saved", decoder, torch.float32, config_from_spec(decoder.spec))
    assert read_spec(tmp_path / "saved") == decoder.spec
    for (_, before), (_, after) in zip(
        decoder.named_parameters(), load(tmp_path / "saved").named_parameters(), strict=True
    ):
        assert torch.equal(before, after)
