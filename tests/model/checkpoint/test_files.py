"""Files of a checkpoint folder are read within bounds, and only regular ones."""

import os
from pathlib import Path

import pytest

from model.checkpoint import files
from model.spec import CheckpointError


def test_a_file_may_be_as_long_as_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert files.read_file(path, 3) is None
    path.write_bytes(b"abc")
    assert files.read_file(path, 3) == b"abc"
    with pytest.raises(CheckpointError, match=r"/a: longer than the 2 bytes"):
        files.read_file(path, 2)


def test_links_to_regular_files_are_followed_and_all_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert files.read_file(tmp_path / "link", 9) == b"x"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "device"):
        with pytest.raises(CheckpointError, match=f"/{name}: not a regular file"):
            files.read_file(tmp_path / name, 9)
    for name in ("folder", "loop", "x" * 300):
        with pytest.raises(CheckpointError, match=f"/{name}: cannot be read"):
            files.read_file(tmp_path / name, 9)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "not a text in UTF-8"),
        (b"{", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"[1]", "expected a JSON object, found list"),
    ],
)
def test_what_is_no_json_object_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"/a\.json: {words}"):
        files.read_object(tmp_path / "a.json", 2**20)
