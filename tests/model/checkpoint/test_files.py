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
    assert files.read_file(path / "b", 3) is None  # In a file there is none.
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


def test_a_link_out_of_the_folder_is_refused_and_a_folder_may_be_one(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    outside.write_bytes(b"secret")
    (folder / "inner" / "file").write_bytes(b"x")
    # As Kubernetes mounts files: each a link to one in a folder that is exchanged as a whole.
    (folder / "..data").symlink_to("inner")
    (folder / "mounted").symlink_to("..data/file")
    (tmp_path / "link").symlink_to(folder)
    for path in (
        folder / "mounted",
        tmp_path / "link" / "mounted",
        tmp_path / "link" / "inner" / "file",
    ):
        assert files.read_file(path, 9) == b"x"
    (folder / "absolute").symlink_to(outside)
    (folder / "relative").symlink_to("../outside")
    (folder / "again").symlink_to("relative")
    (folder / "through").symlink_to(tmp_path / "link" / ".." / "outside")
    (folder / "missing").symlink_to(tmp_path / "none")
    (tmp_path / "folder2").mkdir()
    (folder / "sibling").symlink_to("../folder2/file")
    (tmp_path / "folder2" / "file").write_bytes(b"secret")
    for name in ("absolute", "relative", "again", "through", "sibling"):
        with pytest.raises(
            CheckpointError, match=f"/{name}: is a link to {tmp_path}.*, outside of its folder"
        ) as refused:
            files.read_file(folder / name, 9)
        assert "secret" not in str(refused.value)
    assert files.read_file(folder / "missing", 9) is None


def test_a_snapshot_of_the_hub_links_to_its_blobs_alone(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "hash").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    assert files.read_file(snapshot / "config.json", 9) == b"{}"
    (tmp_path / "outside").write_bytes(b"secret")
    (repository / "blobs" / "link").symlink_to(tmp_path / "outside")
    (repository / "refs").write_bytes(b"secret")
    for number, target in enumerate(("../../blobs/link", "../../refs", "../../../outside")):
        (snapshot / str(number)).symlink_to(target)
        with pytest.raises(CheckpointError, match="outside of its folder"):
            files.read_file(snapshot / str(number), 9)
    # Blobs that are elsewhere are no blobs of this repository.
    other = tmp_path / "models--other"
    (other / "snapshots" / "0").mkdir(parents=True)
    (other / "blobs").symlink_to(tmp_path)
    (other / "snapshots" / "0" / "a").symlink_to("../../blobs/outside")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        files.read_file(other / "snapshots" / "0" / "a", 9)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"]
)
def test_a_pointer_of_git_lfs_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"/{name}: is a pointer of git-lfs.*`git lfs pull`"):
        files.read_file(tmp_path / name, 2**20)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (POINTER, "pointer of git-lfs"),
        (b"GGUF\x03\0\0\0", "GGUF file"),
        (b"PK\x03\x04", "onehead convert"),
        (b"\x80\x02}q", "pickle"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x10\0\0\0\0\0\0\0{}", "safetensors"),
        (b"", None),
        (b"version 1", None),
        (b"abcdefgh", None),
    ],
)
def test_kinds_by_their_first_bytes(data: bytes, words: str | None) -> None:
    found = files.other_kind(data)
    assert found is None if words is None else found and words in found


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
