"""Which tokenizer.json the text of a checkpoint folder is read by: the folder's own, or one made once of the files that it has instead.

Invariant: what is made depends on nothing but the files that its place in the cache is named by. `transformers` makes it, in a process of
its own that ends with it. It knows nothing of what a tokenizer does.
"""

import hashlib
import logging
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from server.config import cache_folder
from server.errors import ConfigurationError, ResourceError
from server.tokenizer_conversion import is_sentencepiece

VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
DESCRIPTIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
SECONDS = 300.0
log = logging.getLogger("onehead")


def tokenizer_path(folder: Path) -> Path:
    """The file to read; the first time for a folder that has none of its own this may take a minute. Raises ConfigurationError where
    there is nothing to make one of, or none can be made, and ResourceError where it cannot be kept.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; --model takes a checkpoint folder, or org/name of the Hugging Face hub")
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    vocabularies = _present(folder, VOCABULARIES)
    if not vocabularies:
        raise ConfigurationError(f"{path}: no such file; text cannot be served without a tokenizer")
    sources = vocabularies + _present(folder, DESCRIPTIONS)
    try:
        kept = cache_folder() / "tokenizers" / _digest(sources) / "tokenizer.json"
        if not kept.is_file():
            _check_packages(vocabularies)
            log.info("%s: making a tokenizer.json of %s", folder, _names(vocabularies))
            _make(folder, sources, kept)
    except OSError as error:
        hint = "what is made in place of a tokenizer.json is kept in XDG_CACHE_HOME, or in ~/.cache"
        raise ResourceError(f"{error.filename}: {error.strerror}; {hint}") from None
    return kept


def _present(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def _names(paths: list[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _digest(sources: list[Path]) -> str:
    """One for the names and contents of all of them."""
    whole = hashlib.sha256()
    for path in sources:
        whole.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _check_packages(vocabularies: list[Path]) -> None:
    """Raises ConfigurationError naming what is not installed: the library's own messages name what it tried last."""
    needed = ["transformers"]
    for path in vocabularies:
        if path.suffix in (".model", ".tiktoken"):
            needed += ["sentencepiece", "protobuf"] if is_sentencepiece(path) else ["tiktoken"]
    lacking = [name for name in dict.fromkeys(needed) if not _installed(name)]
    if lacking:
        packages = " ".join(lacking)
        raise ConfigurationError(
            f"{vocabularies[0].parent}: there is no tokenizer.json, and to make one of {_names(vocabularies)} takes {packages}: "
            f"{sys.executable} -m pip install {packages}"
        )


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _make(folder: Path, sources: list[Path], kept: Path) -> None:
    """Puts a tokenizer.json at `kept`, whole or not at all. The child sees the sources and nothing else of the folder."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent) as seen:
        for path in sources:
            (Path(seen) / path.name).symlink_to(path.resolve())
        made = Path(seen) / "made.json"
        reason = _run(seen, str(made))
        if reason:
            raise ConfigurationError(f"{folder}: there is no tokenizer.json, and none can be made of {_names(sources)}: {reason}")
        os.replace(made, kept)


def _run(seen: str, made: str) -> str:
    """Runs the child; why it failed, or nothing."""
    command = [sys.executable, "-P", "-m", "server.tokenizer_conversion", seen, made]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it was not done in {SECONDS:g} s"
    return "" if done.returncode == 0 else done.stdout.strip() or f"the conversion ended with status {done.returncode}"
