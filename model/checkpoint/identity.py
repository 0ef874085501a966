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

from model.checkpoint.config import read_json
from model.checkpoint.files import MOST_LIST_BYTES
from model.checkpoint.gguf.split import gguf_in, part_paths
from model.checkpoint.pooling import pooled_files
from model.spec import CheckpointError, ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
THREADS = 4
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_names(folder: Path) -> list[str]:
    """The safetensors files of a folder without an index: model.safetensors or, where there is
    none, the shards of one checkpoint by their names, of which some may be missing.
    """
    found = [match for name in sorted(os.listdir(folder)) if (match := _SHARD.fullmatch(name))]
    checkpoints = {(match[1], int(match[2])) for match in found}
    if (folder / SINGLE).exists() or len(checkpoints) != 1:
        return [SINGLE]
    ((stem, count),) = checkpoints
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


class ModelFiles:
    """The tokenizer and the weight files of a folder with this spec, being hashed. Files that are
    missing are left to their readers to report.
    """

    def __init__(self, folder: Path, tokenizer: Path, spec: ModelSpec) -> None:
        self._spec = spec
        index = folder / INDEX
        if index.exists():
            names = read_json(index, MOST_LIST_BYTES).get("weight_map")
            wanted = {str(name) for name in names.values()} if isinstance(names, dict) else set()
        else:
            wanted = {*weight_names(folder)}
        weights = [folder / name for name in sorted(wanted & {*os.listdir(folder)})]
        weights += [folder / name for name in pooled_files(spec.pooling)]
        if not weights and (path := gguf_in(folder)) is not None:
            weights = part_paths(path)
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
