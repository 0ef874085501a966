"""What a new folder takes over from the one that it was made of."""

from pathlib import Path

import pytest

from commands.record import copy_companions
from model.spec import CheckpointError


def test_files_about_text_are_copied_and_no_link_out_of_the_folder_is_followed(
    tmp_path: Path,
) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"x")
    (source / "generation_config.json").symlink_to("tokenizer.json")
    copy_companions(source, output)
    assert {path.name: path.read_text() for path in output.iterdir()} == {
        "tokenizer.json": "{}",
        "generation_config.json": "{}",
    }
    (tmp_path / "secret").write_text("secret")
    (source / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(
        CheckpointError, match=r"chat_template\.jinja: is a link to .*outside of its folder"
    ):
        copy_companions(source, output)
