"""`--model FILE.gguf`: makes a checkpoint folder of a GGUF file, once, in the cache, so that
everything else sees a folder.

The folder has a link to the file, and the config.json and the tokenizer's files that are made of
its header. Invariant: its name covers the state of the file, so that another file under the same
path gets another folder. It knows nothing of what a header holds.
"""

import hashlib
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from model.checkpoint.gguf.folder import write
from model.checkpoint.gguf.header import MAX_LISTED, SUFFIX, gguf_in
from server.config import cache_folder
from server.errors import ConfigurationError, ResourceError

HINT = "what is made of GGUF files is cached in XDG_CACHE_HOME, or in ~/.cache"
CONVERSION = "2"
"""Part of the folder's name: to be raised with every change of what the conversion makes or
refuses.
"""
log = logging.getLogger("onehead")


def checkpoint_folder(model: Path) -> Path:
    """The folder made of a GGUF file, or of a folder whose only weights are one; any other folder
    as it is. Raises ConfigurationError where there is no such file, CheckpointError for one that
    cannot be used and a folder of several, and ResourceError if the folder cannot be cached.
    """
    try:
        file = _gguf_file(model)
        if file is None:
            return model
        file = file.absolute()
        folder = cache_folder() / "gguf" / _digest(file) / file.name.removesuffix(SUFFIX)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from None
    try:
        if not folder.is_dir():
            _make(file, folder)
    except OSError as error:
        raise ResourceError(f"{error.filename or folder}: {error.strerror}; {HINT}") from None
    return folder


def gguf_names(files: list[str]) -> list[str]:
    """Of some names of files those of GGUF files."""
    return sorted(name for name in files if name.endswith(SUFFIX))


def listed(names: list[str]) -> str:
    """Words that name the GGUF files there are to choose from."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}" if names else f"no {SUFFIX} file"


def _gguf_file(model: Path) -> Path | None:
    """The GGUF file that a model is, or has as its only weights; None for other folders, and for
    what is neither folder nor file.
    """
    if model.is_dir():
        return gguf_in(model)
    if model.suffix == SUFFIX and not os.path.lexists(model):
        here = model.absolute().parent
        found = sorted(path.name for path in here.glob(f"*{SUFFIX}"))
        raise ConfigurationError(f"{model}: no such file; {here} has {listed(found)}")
    return model if model.is_file() or model.suffix == SUFFIX else None


def _digest(file: Path) -> str:
    """The cache key: the file's place, and what changes when it is replaced or written to. Raises
    OSError.
    """
    found = file.stat()
    state = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    key = f"{CONVERSION}\0{file.name}\0{file.resolve()}\0{state}"
    return hashlib.sha256(key.encode()).hexdigest()


def _make(file: Path, folder: Path) -> None:
    """Makes the folder with a link to the file and what is written from its header, atomically.
    Raises CheckpointError or OSError.
    """
    log.info("%s: reading its header", file)
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent.parent, ignore_cleanup_errors=True) as work:
        made = Path(work, "whole", folder.name)
        made.mkdir(parents=True)
        (made / f"{made.name}{SUFFIX}").symlink_to(file.resolve())
        write(file, made)
        try:
            made.parent.rename(folder.parent)
        except OSError:
            if not folder.is_dir():  # Another process has made the same folder meanwhile.
                raise
