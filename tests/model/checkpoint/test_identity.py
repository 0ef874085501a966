"""The digest of a model: the same for the same tensors wherever they lie, another one for any that
differ, none for files that change.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from model.checkpoint.families import read_spec
from model.checkpoint.identity import INDEX, ModelFiles
from model.spec import CheckpointError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def opened(folder: Path) -> ModelFiles:
    return ModelFiles(folder, folder / "tokenizer.json", read_spec(folder))


def digest(folder: Path) -> str:
    return opened(folder).digest()


def test_a_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / WEIGHTS, (1, 1))
    (copy / "README.md").write_text("of no importance")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    assert digest(copy) == digest(folder)


def test_one_bit_of_the_last_weight_makes_another(folder: Path) -> None:
    before = digest(folder)
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    assert digest(folder) != before


def test_a_shard_of_several_counts_and_a_file_that_is_not_read_does_not(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    before = digest(folder)
    (folder / "other.safetensors").write_bytes(b"")
    assert digest(folder) == before
    shutil.copy(folder / "model-0.safetensors", folder / "model-1.safetensors")
    assert digest(folder) != before


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("config.json", "layer_norm_epsilon", 1e-4), ("generation_config.json", "eos_token_id", 7)],
)
def test_a_config_that_changes_answers_makes_another(
    folder: Path, name: str, key: str, value: float
) -> None:
    before = digest(folder)
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {key: value}))
    assert digest(folder) != before


def test_another_tokenizer_makes_another(folder: Path) -> None:
    before = digest(folder)
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert digest(folder) != before


def test_a_file_that_is_replaced_while_it_is_loaded_is_an_error_although_its_bytes_are_the_same(
    folder: Path, tmp_path: Path
) -> None:
    files = opened(folder)
    shutil.copy(folder / WEIGHTS, tmp_path / "other")
    os.replace(tmp_path / "other", folder / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: was replaced while it was loaded"
    ):
        files.digest()


def test_a_file_that_is_deleted_while_it_is_loaded_is_an_error(folder: Path) -> None:
    files = opened(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: cannot be read \(No such file or directory\)"
    ):
        files.digest()


@pytest.mark.parametrize(
    "names", [["../model.safetensors"], ["x" * 5000], ["\ud800"], [{}], ["/dev/zero"], [None]]
)
def test_names_that_are_none_are_refused(folder: Path, names: list[object]) -> None:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}})
    )
    with pytest.raises(CheckpointError, match="is not the plain name of a safetensors file"):
        digest(folder)
