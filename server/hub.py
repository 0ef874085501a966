"""`--model org/name`: a repository of the Hugging Face hub, as the folder that it is cached in; what is missing there is downloaded.

Invariant: only files that are read here are fetched, and only errors of our tree come out. Where the hub cannot be asked, what it gave
before serves, if that is whole. Blocks; to be called in the main thread, before there is an event loop.
"""

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from server.config import EngineSettings
from server.errors import ConfigurationError, OneheadError, ResourceError
from server.tokenizer_file import DESCRIPTIONS, VOCABULARIES

REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(.+))?", re.ASCII)
SMALL = [*DESCRIPTIONS, *VOCABULARIES, "tokenizer.json", "generation_config.json", "conversion.json", "chat_template.*"]
WEIGHTS = ["*.safetensors", "model.safetensors.index.json", "SHA256SUMS"]
# Other frameworks' files in folders, and the same weights once more in their makers' own layout.
IGNORED = ["*/*", "consolidated*"]
PATIENCE = 5.0
Settings = TypeVar("Settings", bound=EngineSettings)
log = logging.getLogger("onehead")


def resolved(settings: Settings) -> Settings:
    """The settings with a folder for their model. Raises as `resolve`."""
    return settings.model_copy(update={"model": resolve(settings.model)})


def resolve(model: Path, weights: bool = True) -> Path:
    """The folder that `model` means: itself, or where the files of org/name[@revision] are, without the weights if those are not asked
    for. Raises ConfigurationError or ResourceError that says what to do.
    """
    match = REPOSITORY.fullmatch(str(model))
    if match is None or os.path.lexists(model):
        return model
    folder = _fetch(match[1], match[2], SMALL + WEIGHTS if weights else SMALL)
    if weights and not any(folder.glob("*.safetensors")):
        raise ConfigurationError(f"{model}: has no weights in safetensors files, and others are not served")
    return folder


def model_id(folder: Path) -> str:
    """What a checkpoint is called in replies: its folder's name, or its repository's where the folder is a snapshot in the hub's cache."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rsplit("--", 1)[1]
    return folder.name


def _fetch(repository: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    get = partial(snapshot_download, repository, revision=revision, allow_patterns=files, ignore_patterns=IGNORED, etag_timeout=PATIENCE)
    log.info("%s: looking it up on the Hugging Face hub", repository)
    for client in ("httpx", "httpx2"):  # It logs every address, those with a right to download among them.
        logging.getLogger(client).setLevel(logging.WARNING)
    try:
        with _interruptible():
            # The download asks the same, but waits for the answer without an end.
            HfApi().model_info(repository, revision=revision, timeout=PATIENCE)
            return Path(get())
    except Exception as error:  # The library's own, its HTTP client's, the system's: no root of theirs is less.
        reason = error
    try:
        folder = Path(get(local_files_only=True))
    except Exception:
        raise _explained(repository if revision is None else f"{repository}@{revision}", reason) from None
    if not isinstance(reason, OfflineModeIsEnabled):
        log.warning("%s: taken from the hub's cache, for the hub could not be asked (%s)", repository, type(reason).__name__)
    return folder


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception it would wait for the library's threads to finish their files."""
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _explained(model: str, error: Exception) -> OneheadError:
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
