"""Loading is strict: every tensor that is missing, unexpected, misshapen or of the wrong kind is named; so is every bad config key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.families import gpt_bigcode, read_spec
from model.spec import CheckpointError
from model.weights import load_decoder, save_decoder

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
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v != "remove"}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("transformer.h.1.ln_2.bias", None, r"missing tensor transformer\.h\.1\.ln_2\.bias"),
        ("transformer.h.9.ln_2.bias", torch.zeros(64), r"unexpected tensor transformer\.h\.9\.ln_2\.bias"),
        ("transformer.h.0.attn.c_attn.weight", torch.zeros(192, 64), r"c_attn\.weight has shape \[192, 64\], expected \[96, 64\]"),
        ("transformer.ln_f.bias", torch.zeros(64, dtype=torch.int32), r"ln_f\.bias has dtype I32, expected one of F64, F32, F16, BF16"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    edit_weights(folder, **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_old_mask_buffers_and_a_second_copy_of_the_tied_head_are_fine(folder: Path) -> None:
    edit_weights(folder, **{"transformer.h.0.attn.bias": torch.ones(8, 8), "lm_head.weight": torch.zeros(300, 64)})
    load(folder)


def test_shards_equal_the_single_file(folder: Path, tiny_folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    for (_, ours), (_, single) in zip(load(folder).named_parameters(), load(tiny_folder).named_parameters(), strict=True):
        assert torch.equal(ours, single)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: no such file"):
        load(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {"x": "../../etc/passwd"}}, {"weight_map": []}])
def test_a_bad_index_is_refused(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def test_a_truncated_file_and_other_formats_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="file is 100 B shorter than its header says"):
        load(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin, .*onehead convert --model"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; supported: deepseek_v2, .*gpt_bigcode"),
        ({"multi_query": False}, "multi_query is False, so there are 4 key/value heads"),
        ({"n_head": 5}, "n_embd 64 is not a multiple of n_head 5"),
        ({"n_layer": "3"}, "n_layer must be an integer of at least 1, found '3'"),
        ({"n_embd": "remove"}, "n_embd must be an integer of at least 1, found None"),
        ({"n_positions": True}, "n_positions must be an integer"),
        ({"activation_function": "mish"}, "activation_function must be one of gelu, .*, found 'mish'"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"eos_token_id": 300}, "eos_token_id 300 is not below vocab_size 300"),
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
    save_decoder(tmp_path / "saved", decoder, torch.float32, gpt_bigcode.config_from_spec(decoder.spec))
    assert read_spec(tmp_path / "saved") == decoder.spec
    for (_, before), (_, after) in zip(decoder.named_parameters(), load(tmp_path / "saved").named_parameters(), strict=True):
        assert torch.equal(before, after)
