"""Which tokenizer.json a folder is served with, and what is said where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from server.errors import ConfigurationError
from server.hub.tokenizer_file import tokenizer_path
from tests.support.checkpoints import make_tokenizer


def test_a_folders_own_is_found(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    make_tokenizer().model.save(str(tmp_path))
    assert tokenizer_path(tmp_path) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["merges.txt", "vocab.json"], "makes it of merges.txt and vocab.json"),
        (["tokenizer.model"], "makes it of tokenizer.model"),
    ],
)
def test_older_files_are_refused_with_the_command(
    files: list[str], said: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    command = f"`onehead convert --model {tmp_path}` {said}"
    with pytest.raises(ConfigurationError, match=f"tokenizer.json: no such file; {command}$"):
        tokenizer_path(tmp_path)


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ConfigurationError, match=r"tokenizer\.json: no such file, nor a tokenizer\.model"
    ):
        tokenizer_path(tmp_path)
    with pytest.raises(ConfigurationError, match="no such folder; --model takes"):
        tokenizer_path(tmp_path / "nowhere")


def test_serve_refuses_it_with_its_exit_status(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "old")
    (folder / "tokenizer.json").unlink()
    make_tokenizer().model.save(str(folder))
    command = [sys.executable, "-m", "commands.cli", "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 78
        and f"onehead convert --model {folder}` makes it" in done.stderr.splitlines()[-1]
    )
