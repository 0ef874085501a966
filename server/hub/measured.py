"""What `onehead plan --quantization all` has measured of a model on this machine, kept in the cache folder for `GET /plan`.

Invariant: a record is of the model whose digest (model/checkpoint/identity.py) is its name; one that cannot be read is none. It measures
nothing.
"""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from model.checkpoint.files import MOST_CONFIG_BYTES, read_object
from model.spec import CheckpointError
from server.config import cache_folder
from server.errors import ConfigurationError


def recall(digest: str) -> dict[str, Any] | None:
    """The record of a model; None where there is none."""
    with suppress(CheckpointError, ConfigurationError, OSError):
        return read_object(_path(digest), MOST_CONFIG_BYTES)
    return None


def keep(digest: str, record: dict[str, Any]) -> None:
    """Writes the record of a model, also in the place of an earlier one. Raises OSError, and ConfigurationError without a cache folder."""
    path = _path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(record, file)
    Path(file.name).replace(path)


def _path(digest: str) -> Path:
    return cache_folder() / "measured" / f"{digest}.json"
