"""Reads the small files of a checkpoint folder: regular files, each with a bound on its bytes.

Invariant: nothing is read that could block, like a FIFO, or that is larger than its bound, and every error is a CheckpointError that names
the file. It knows no keys, no torch, and not what a missing file means.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from model.spec import CheckpointError

# Several times what the largest published checkpoints have, and small enough to be parsed in a few hundred MB.
MOST_CONFIG_BYTES = 2**22
MOST_LIST_BYTES = 2**25
"""Of tokenizer_config.json, which may list all added tokens, and of the index, which lists all tensors."""
MOST_TOKENIZER_BYTES = 2**27
"""Of tokenizer.json, and of each file that is converted to one."""


def read_file(path: Path, most: int) -> bytes | None:
    """The bytes of a regular file, None if there is no file of that name. Raises CheckpointError."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            data = file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise CheckpointError(f"{path}: longer than the {most} bytes that are read of this file")
    return data


def open_without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: opening a FIFO would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_exactly(path: Path, begin: int, into: memoryview, what: str) -> None:
    """Fills a buffer from byte `begin` of a file on, which `what` names in messages. Raises CheckpointError."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])
                if not count:
                    raise CheckpointError(f"{path}: ended within {what}: it became shorter while it was read")
                done += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


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
