"""ModelFiles: the digest of a model, by which another one under the same path is recognised.

It covers the spec that was read from config.json and generation_config.json, and every byte of
tokenizer.json and of the weight files. They are hashed in threads while the rest of the engine is
loaded. Invariant: models whose tensors differ have different digests, and files that are replaced
while they are loaded are an error. It imports no torch.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from model.checkpoint.config import read_json, short
from model.checkpoint.files import MAX_TENSORS, MOST_LIST_BYTES
from model.checkpoint.gguf.header import gguf_in
from model.checkpoint.pooling import pooled_files
from model.spec import CheckpointError, ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_NAME_BYTES = 255
"""The longest file name that Linux allows."""
THREADS = 4
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, of which some may be missing, and its index: tensor ->
    file. Without an index they are model.safetensors or, where there is none, the shards of one
    checkpoint by their names. Raises CheckpointError for an index that is none.
    """
    if (folder / INDEX).exists():
        index = _index(folder / INDEX)
        return sorted(set(index.values())), index
    matches = map(_SHARD.fullmatch, os.listdir(folder))
    checkpoints = {(match[1], int(match[2])) for match in matches if match}
    if (folder / SINGLE).exists() or len(checkpoints) != 1:
        return [SINGLE], {}
    ((stem, count),) = checkpoints
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)], {}


def _index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, MOST_LIST_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= MAX_TENSORS:
        raise CheckpointError(
            f"{path}: weight_map must map up to {MAX_TENSORS} tensor names to file names"
        )
    for name in weight_map.values():
        plain = (
            isinstance(name, str)
            and name.isprintable()
            and Path(name).name == name
            and name.endswith(".safetensors")
        )
        if not plain or len(name.encode()) > MAX_NAME_BYTES:
            raise CheckpointError(
                f"{path}: {short(name)} is not the plain name of a safetensors file"
            )
    if path.with_name(SINGLE).exists() and {*weight_map.values()} != {SINGLE}:
        raise CheckpointError(
            f"{path}: there is a {SINGLE} too, and readers differ about which is meant; "
            "remove one of them"
        )
    return weight_map


class ModelFiles:
    """The tokenizer and the weight files of a folder with this spec, being hashed. Files that are
    missing are left to their readers to report. Raises CheckpointError.
    """

    def __init__(self, folder: Path, tokenizer: Path, spec: ModelSpec) -> None:
        self._spec = spec
        if (path := gguf_in(folder)) is not None:
            weights = [path]
        else:
            names = [*weight_files(folder)[0], *pooled_files(spec.pooling)]
            weights = [folder / name for name in names]
        index = folder / INDEX
        self._found = {
            path: _state(path) for path in (tokenizer, index, *weights) if path.is_file()
        }
        pool = ThreadPoolExecutor(THREADS)
        self._digests = [pool.submit(file_digest, path) for path in self._found if path != index]
        pool.shutdown(wait=False)

    def digest(self) -> str:
        """The digest of the model, once its files have been hashed. Raises CheckpointError where
        one was replaced meanwhile.
        """
        try:
            parts = [repr(self._spec), *(hashed.result() for hashed in self._digests)]
            changed = [path for path, state in self._found.items() if _state(path) != state]
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from None
        if changed:
            raise CheckpointError(f"{changed[0]}: was replaced while it was loaded")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
