"""Reads the small files of a checkpoint folder: regular files within it, each with a bound on its
bytes.

Invariant: nothing is read that could block, like a FIFO, that is larger than its bound, or that a
link has elsewhere, since clients are shown what such files hold; every error is a CheckpointError
that names the file. It knows no keys, no torch, and not what a missing file means.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.names import Entry
from model.spec import CheckpointError

# Several times what the largest published checkpoints have, and small enough to be parsed in a few
# hundred MB.
MOST_CONFIG_BYTES = 2**22
MOST_LIST_BYTES = 2**25
"""Of tokenizer_config.json, which may list all added tokens, and of the index, which lists all
tensors."""
MOST_TOKENIZER_BYTES = 2**27
"""Of tokenizer.json, and of each file that is converted to one."""
MAX_TENSORS = 2**17
"""Of a checkpoint; the largest published ones have some 90,000."""
LFS = b"version https://git-lfs.github.com/"
KINDS = {
    LFS: "a pointer of git-lfs, which stands for the file: run `git lfs pull` in the folder, or "
    "download the file itself",
    b"GGUF": "a GGUF file; give its own path as --model",
    b"PK\x03\x04": "a zip archive, as PyTorch writes pickles, which may run code when they are "
    "read: `onehead convert --model FOLDER --output NEW` makes safetensors of a pytorch_model.bin",
    b"\x80\x02": "a pickle, which may run code when it is read: `onehead convert` makes "
    "safetensors of a newer pytorch_model.bin",
    b"<": "a web page (HTML or XML), which a server sent in place of the file; download it again",
    b"\x1f\x8b": "a gzip archive; unpack it",
}
"""Formats by the first bytes of their files, and what to do with one where another is expected."""


SAFETENSORS = "a safetensors file; --model takes the folder that it is in, with its config.json"


def other_kind(data: bytes) -> str | None:
    """What a file is that begins with these bytes, with what to do; None if that is not known."""
    if data[8:9] == b"{":
        return SAFETENSORS
    return next((words for begin, words in KINDS.items() if data.startswith(begin)), None)


def read_file(path: Path, most: int) -> bytes | None:
    """The bytes of a regular file, None if there is no file of that name. Raises CheckpointError,
    also for a link out of its folder, but into the blobs of the Hugging Face hub's cache where the
    folder is a snapshot in it.
    """
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            _check_place(path)
            data = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise CheckpointError(f"{path}: longer than the {most} bytes that are read of this file")
    if data.startswith(LFS):
        raise CheckpointError(f"{path}: is {KINDS[LFS]}")
    return data


def _check_place(path: Path) -> None:
    found, folder = (Path(os.path.realpath(each)) for each in (path, path.parent))
    # The files of modules lie in folders within a snapshot.
    snapshot = folder if folder.parent.name == "snapshots" else folder.parent
    in_hub = snapshot.parent.name == "snapshots"
    in_blobs = in_hub and found.parent == snapshot.parent.parent / "blobs"
    if not found.is_relative_to(folder) and not in_blobs:
        raise CheckpointError(
            f"{path}: is a link to {found}, outside of its folder, and clients may be shown what "
            "it holds; copy the file"
        )


def first_bytes(path: Path) -> bytes:
    """As many bytes of a regular file as tell its kind; none of anything else."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            return file.read(len(LFS)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def open_without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: opening a FIFO would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_exactly(path: Path, begin: int, into: memoryview, what: str) -> None:
    """Fills a buffer from byte `begin` of a file on, which `what` names in messages. Raises
    CheckpointError.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            if file.readinto(into) < len(into):
                raise CheckpointError(
                    f"{path}: ended within {what}: it became shorter while it was read"
                )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class Stored(Entry):
    """A tensor called `name` in the file at `path`. `dtype` is the name of its type there, `shape`
    has the outermost axis first, as in torch, `begin` is its first byte in the file.
    """

    begin: int
    path: Path
    name: str

    def read(self, into: memoryview, first: int = 0) -> None:
        """Fills a buffer with the tensor's bytes from number `first` on. Raises CheckpointError."""
        read_exactly(self.path, self.begin + first, into, self.name)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors whose header has been checked. `entries`: the tensors by name;
    `header_bytes`: where their data begin.
    """

    path: Path
    entries: dict[str, Stored]
    header_bytes: int


def read_text(path: Path, most: int) -> str | None:
    """The text of a regular file, None if there is no file of that name. Raises CheckpointError."""
    data = read_file(path, most)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not a text in UTF-8") from None


def read_object(path: Path, most: int) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no file of that name. Raises CheckpointError."""
    text = read_text(path, most)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
