"""Finds the tokenizer.json of a checkpoint folder: its own, or one that is converted once from older tokenizer files or from a GGUF file
and cached.

Invariant: the cache key covers every file and version that the conversion depends on. `transformers` converts in a child process, which
ends with this one. A conversion blocks for up to a minute: `server.hub.download.resolved` does it before the event loop starts, and later
calls find the result in the cache. It knows nothing of what a tokenizer does.
"""

import hashlib
import json
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from model.checkpoint.files import MOST_TOKENIZER_BYTES, read_file
from server.errors import ConfigurationError, ResourceError
from server.hub.conversion import HINT, new_folder, run
from server.hub.gguf_file import GGUF_FILES, gguf_tokenizer
from server.hub.tokenizer_conversion import description, is_sentencepiece

VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
DESCRIPTIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CONVERSION = "2"
"""Part of the cache key: to be raised with every change of what the conversion makes or refuses."""
log = logging.getLogger("onehead")


def tokenizer_path(folder: Path) -> Path:
    """The path of the tokenizer.json; a first conversion may take a minute. Raises ConfigurationError if there are no files to convert or
    their conversion fails, and ResourceError if the result cannot be cached.
    """
    try:
        own, vocabularies, descriptions = _files(folder)
        if own is not None:
            return own
        if not vocabularies:
            return gguf_tokenizer(folder)
        from server.config import cache_folder  # It imports pydantic, which would double the time that checkpoint_loading takes.

        sources = vocabularies + descriptions
        digest = _digest(sources)
    except OSError as error:
        raise ConfigurationError(f"{error.filename or folder}: {error.strerror}") from None
    cached = cache_folder() / "tokenizers" / digest / "tokenizer.json"
    try:
        if not cached.is_file():
            _check_packages(vocabularies)
            log.info("%s: converting %s to a tokenizer.json", folder, _names(vocabularies))
            _convert(folder, sources, cached)
    except OSError as error:
        raise ResourceError(f"{error.filename or cached.parent}: {error.strerror}; {HINT}") from None
    return cached


def _files(folder: Path) -> tuple[Path | None, list[Path], list[Path]]:
    """(tokenizer.json or None, vocabulary files, configuration files) of a folder. Raises ConfigurationError if it has no tokenizer."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: no such folder; --model takes a checkpoint folder, a GGUF file, or org/name of the Hugging Face hub"
        )
    path = folder / "tokenizer.json"
    if path.exists():
        return path, [], []
    vocabularies = _present(folder, VOCABULARIES)
    if not vocabularies and not any(folder.glob(GGUF_FILES)):
        raise ConfigurationError(f"{path}: no such file, nor a tokenizer.model, or a vocab.json with its merges.txt, to convert to it")
    return None, vocabularies, _present(folder, DESCRIPTIONS)


def _present(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def _names(paths: list[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _digest(sources: list[Path]) -> str:
    """The cache key: a digest of the files' names and contents and of the converter's version. Raises ConfigurationError."""
    whole = hashlib.sha256(f"{CONVERSION} {_version('transformers')}".encode() + b"\0")
    for path in sources:
        data = read_file(path, MOST_TOKENIZER_BYTES) or b""
        whole.update(path.name.encode() + b"\0" + hashlib.sha256(data).digest())
    return whole.hexdigest()


def _check_packages(vocabularies: list[Path]) -> None:
    """Raises ConfigurationError that names missing packages: the library's own messages name only the one it tried last."""
    needed = ["transformers"]
    for path in vocabularies:
        if path.suffix in (".model", ".tiktoken"):
            needed += ["sentencepiece", "protobuf"] if is_sentencepiece(path) else ["tiktoken"]
    lacking = [name for name in dict.fromkeys(needed) if not _version(name)]
    if lacking:
        packages = " ".join(lacking)
        raise ConfigurationError(
            f"{vocabularies[0].parent}: there is no tokenizer.json, and converting {_names(vocabularies)} to one needs {packages}: "
            f"{sys.executable} -m pip install {packages}"
        )


def _version(package: str) -> str:
    """The version of an installed package, else an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _convert(folder: Path, sources: list[Path], cached: Path) -> None:
    """Writes a tokenizer.json to `cached`, atomically. The child process sees only the source files of the folder."""
    with new_folder(cached.parent) as seen:
        for path in sources:
            _copy_visible(path, seen)
        made = seen / "made.json"
        reason = run("server.hub.tokenizer_conversion", str(seen), str(made))
        if reason:
            raise ConfigurationError(f"{folder}: there is no tokenizer.json, and {_names(sources)} cannot be converted to one: {reason}")
        os.replace(made, cached)


def _copy_visible(path: Path, seen: Path) -> None:
    values = description(path)
    if values is None:
        (seen / path.name).symlink_to(path.resolve())
    else:
        (seen / path.name).write_text(json.dumps(values), encoding="utf-8")
