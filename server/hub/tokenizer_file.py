"""Which tokenizer.json the text of a checkpoint folder is read by: the folder's own, or one made once of the files that it has instead.

Invariant: what is made depends on nothing but the files and versions that its place in the cache is named by. `transformers` makes it, in
a process of its own that ends with it and with this one. Blocks; before there is an event loop. It knows nothing of what a tokenizer does.
"""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from server.config import cache_folder
from server.errors import ConfigurationError, ResourceError
from server.hub.tokenizer_conversion import NOT_WRITTEN, description, is_sentencepiece

VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
DESCRIPTIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CONVERSION = "2"
"""To be raised with every change of what the conversion makes or refuses: what was cached before is then not found."""
CONVERSION_SECONDS = 300.0
HINT = "what is made in place of a tokenizer.json is kept in XDG_CACHE_HOME, or in ~/.cache"
log = logging.getLogger("onehead")


def tokenizer_path(folder: Path) -> Path:
    """The file to read; the first time for a folder that has none of its own this may take a minute. Raises ConfigurationError where
    there is nothing to make one of, or none can be made, and ResourceError where it cannot be cached.
    """
    try:
        own, vocabularies, descriptions = _files(folder)
        if own is not None:
            return own
        sources = vocabularies + descriptions
        digest = _digest(sources)
    except OSError as error:
        raise ConfigurationError(f"{error.filename or folder}: {error.strerror}") from None
    cached = cache_folder() / "tokenizers" / digest / "tokenizer.json"
    try:
        if not cached.is_file():
            _check_packages(vocabularies)
            log.info("%s: making a tokenizer.json of %s", folder, _names(vocabularies))
            _convert(folder, sources, cached)
    except OSError as error:
        raise ResourceError(f"{error.filename or cached.parent}: {error.strerror}; {HINT}") from None
    return cached


def _files(folder: Path) -> tuple[Path | None, list[Path], list[Path]]:
    """The folder's own tokenizer.json; if there is none, its vocabularies and descriptions. Raises ConfigurationError if nor these."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; --model takes a checkpoint folder, or org/name of the Hugging Face hub")
    path = folder / "tokenizer.json"
    if path.is_file():
        return path, [], []
    vocabularies = _present(folder, VOCABULARIES)
    if not vocabularies:
        raise ConfigurationError(f"{path}: no such file, nor a tokenizer.model, or a vocab.json with its merges.txt, to make it of")
    return None, vocabularies, _present(folder, DESCRIPTIONS)


def _present(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def _names(paths: list[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _digest(sources: list[Path]) -> str:
    """One for the names and contents of all of them, and for what reads them. Raises ConfigurationError where one cannot be read."""
    whole = hashlib.sha256(f"{CONVERSION} {_version('transformers')}".encode() + b"\0")
    for path in sources:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from None
        whole.update(path.name.encode() + b"\0" + hashlib.sha256(data).digest())
    return whole.hexdigest()


def _check_packages(vocabularies: list[Path]) -> None:
    """Raises ConfigurationError naming what is not installed: the library's own messages name what it tried last."""
    needed = ["transformers"]
    for path in vocabularies:
        if path.suffix in (".model", ".tiktoken"):
            needed += ["sentencepiece", "protobuf"] if is_sentencepiece(path) else ["tiktoken"]
    lacking = [name for name in dict.fromkeys(needed) if not _version(name)]
    if lacking:
        packages = " ".join(lacking)
        raise ConfigurationError(
            f"{vocabularies[0].parent}: there is no tokenizer.json, and to make one of {_names(vocabularies)} takes {packages}: "
            f"{sys.executable} -m pip install {packages}"
        )


def _version(package: str) -> str:
    """Nothing where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _convert(folder: Path, sources: list[Path], cached: Path) -> None:
    """Puts a tokenizer.json at `cached`, whole or not at all. The child sees the sources and nothing else of the folder."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _terminable(), TemporaryDirectory(dir=cached.parent) as seen:
        for path in sources:
            _copy_visible(path, Path(seen))
        made = Path(seen) / "made.json"
        reason = _run(seen, str(made))
        if reason:
            raise ConfigurationError(f"{folder}: there is no tokenizer.json, and none can be made of {_names(sources)}: {reason}")
        os.replace(made, cached)


def _copy_visible(path: Path, seen: Path) -> None:
    values = description(path)
    if values is None:
        (seen / path.name).symlink_to(path.resolve())
    else:
        (seen / path.name).write_text(json.dumps(values), encoding="utf-8")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process in its usual order: the child is killed, and its folder removed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(seen: str, made: str) -> str:
    """Runs the child; why it failed for the folder's sake, or nothing. Raises ResourceError where it could not write."""
    command = [sys.executable, "-P", "-m", "server.hub.tokenizer_conversion", seen, made]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CONVERSION_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it was not done in {CONVERSION_SECONDS:g} s"
    if done.returncode == -signal.SIGINT:
        raise KeyboardInterrupt  # It went to the child, and may have been taken from us: by an event loop, or by a shell.
    said = done.stdout.strip()
    if done.returncode == NOT_WRITTEN:
        raise ResourceError(f"{Path(made).parent.parent}: {said}; {HINT}")
    return "" if done.returncode == 0 else said or f"the conversion ended with status {done.returncode}"
