"""`--model org/name`: a repository of the Hugging Face hub, as the folder that it is cached in; what is missing there is downloaded.

Invariant: only files that are read here are fetched, weights only of what can be served, and only errors of our tree come out. Where the
hub cannot be asked, what it gave before serves, if that is whole. Blocks; to be called in the main thread, before there is an event loop.
"""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from server.config import EngineSettings
from server.errors import ConfigurationError, OneheadError, ResourceError
from server.hub.tokenizer_file import DESCRIPTIONS, VOCABULARIES, tokenizer_path

REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(.+))?", re.ASCII)
SMALL_FILES = [*DESCRIPTIONS, *VOCABULARIES, "tokenizer.json", "generation_config.json", "conversion.json", "chat_template.*"]
WEIGHTS = ["*.safetensors", "model.safetensors.index.json", "SHA256SUMS"]
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
# Other frameworks' files in folders, and the same weights once more in their makers' own layout.
IGNORED = ["*/*", "consolidated*"]
TIMEOUT_SECONDS = 5.0
Settings = TypeVar("Settings", bound=EngineSettings)
Check = Callable[[Path], object]
log = logging.getLogger("onehead")


def resolved(settings: Settings, check: Check) -> Settings:
    """The settings with a folder for their model, whose tokenizer.json is there or made: once there is an event loop, no signal would be
    heard meanwhile. Raises as `resolve` and `tokenizer_path`.
    """

    def check_all(folder: Path) -> None:
        if folder.is_dir():
            check(folder)  # Before anyone looks for a tokenizer for a model that cannot be served.
        tokenizer_path(folder)

    folder = resolve(settings.model, check=check_all)
    check_all(folder)
    return settings.found_in(folder)


def resolve(model: Path, weights: bool = True, pickles: bool = False, check: Check | None = None) -> Path:
    """The folder that `model` means: itself, or where the files of org/name[@revision] are, without the weights if those are not asked
    for, with `pickles` in those where there are no others. Before weights are downloaded `check` may raise by the small files in the
    folder. Raises ConfigurationError or ResourceError that says what to do.
    """
    match = REPOSITORY.fullmatch(str(model))
    if match is None or os.path.lexists(model):
        return model
    repository = Repository(match[1], match[2])
    folder = repository.fetch(SMALL_FILES)
    if not weights:
        return folder
    if check is not None and not _has_files(folder, WEIGHTS[:1]):  # What has weights here already is checked by whoever reads them.
        try:
            check(folder)
        except ConfigurationError as error:
            raise ConfigurationError(f"{model}: {error}") from None
    folder = repository.fetch(SMALL_FILES + WEIGHTS)
    if _has_files(folder, WEIGHTS[:1]):
        return folder
    if not pickles:
        way_out = f"if it has a pytorch_model.bin, `onehead convert --model {model} --output NEW` makes safetensors of it"
        raise ConfigurationError(f"{model}: has no weights in safetensors files, and others are not served; {way_out}")
    folder = repository.fetch(SMALL_FILES + WEIGHTS + PICKLES)
    if not _has_files(folder, PICKLES[:1]):
        raise ConfigurationError(f"{model}: has neither safetensors files nor a pytorch_model.bin")
    return folder


def _has_files(folder: Path, patterns: list[str]) -> bool:
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def model_id(folder: Path) -> str:
    """A checkpoint's name in replies: the base name of its folder, or org/name where the folder is a snapshot in the hub's cache."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


class Repository:
    """One of the hub, at its newest revision or a given one. A hub that failed to answer is not asked again."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self.revision = revision
        self._failure: Exception | None = None

    def fetch(self, files: list[str]) -> Path:
        """The folder with what the repository has of these patterns. Raises ConfigurationError or ResourceError."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import OfflineModeIsEnabled

        patterns = {"allow_patterns": files, "ignore_patterns": IGNORED}
        get = partial(snapshot_download, self.name, revision=self.revision, etag_timeout=TIMEOUT_SECONDS, **patterns)
        first = self._failure is None
        if self._failure is None:
            try:
                return self._download(get)
            except Exception as error:  # The library's own, its HTTP client's, the system's: no root of theirs is less.
                self._failure = error
        try:
            folder = Path(get(local_files_only=True))
        except Exception:
            name = self.name if self.revision is None else f"{self.name}@{self.revision}"
            raise _translated(name, self._failure) from None
        if first and not isinstance(self._failure, OfflineModeIsEnabled):
            cause = type(self._failure).__name__
            log.warning("%s: taken from the hub's cache, for the hub could not be asked (%s)", self.name, cause)
        return folder

    def _download(self, get: Callable[[], str]) -> Path:
        from huggingface_hub import HfApi

        log.info("%s: looking it up on the Hugging Face hub", self.name)
        for client in ("httpx", "httpx2"):  # It logs every address, those with a right to download among them.
            logging.getLogger(client).setLevel(logging.WARNING)
        with _interruptible():
            # The download asks the same, but waits for the answer without an end.
            HfApi().model_info(self.name, revision=self.revision, timeout=TIMEOUT_SECONDS)
            return Path(get())


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception it would wait for the library's threads to finish their files."""
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _translated(model: str, error: Exception) -> OneheadError:
    """An error of the library's as one of ours: what is the matter and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    advice: list[tuple[type[Exception], str]] = [
        (errors.GatedRepoError, "is gated: accept its conditions on its page, then set HF_TOKEN to a token of yours"),
        (errors.RepositoryNotFoundError, "no such folder, and no such repository on the Hugging Face hub; for a private one set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the repository has no such revision"),
        (errors.OfflineModeIsEnabled, "no such folder, and the hub's cache has no whole copy while HF_HUB_OFFLINE forbids to ask for one"),
    ]
    for kind, text in advice:
        if isinstance(error, kind):
            return ConfigurationError(f"{model}: {text}")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later"
        return ConfigurationError(f"{model}: the Hugging Face hub answers with status {status}; {hint}")
    if isinstance(error, OSError) and error.errno is not None:
        return ResourceError(f"{model}: cannot be kept: {error.strerror}; HF_HOME says in which folder downloads are")
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ConfigurationError(f"{model}: no such folder, and the Hugging Face hub cannot be reached or used ({what}); see HF_ENDPOINT")
