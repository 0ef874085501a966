"""`--model org/name`, `--model org/name:FILE.gguf`: downloads from a repository of the Hugging Face
hub into its cache; gives the folder.

Invariant: only files that are read are downloaded, weights only of models that can be served, and
only errors of server/errors.py are raised. If the hub cannot be reached, a complete cached copy is
used. Blocks: to be called in the main thread before the event loop starts.
"""

import glob
import logging
import os
import re
import signal
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TypeVar

from model.checkpoint.gguf.header import check_whole
from model.spec import CheckpointError
from server.config import EngineSettings
from server.errors import ConfigurationError, OneheadError, ResourceError
from server.hub.gguf_file import checkpoint_folder, gguf_names, listed
from server.hub.tokenizer_file import DESCRIPTIONS, VOCABULARIES, tokenizer_path

REPOSITORY = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([^:]+))?(?::(.+\.gguf))?", re.ASCII
)
SMALL_FILES = [
    *DESCRIPTIONS,
    *VOCABULARIES,
    "tokenizer.json",
    "generation_config.json",
    "conversion.json",
    "chat_template.*",
    "modules.json",
    "config_sentence_transformers.json",
]
POOLED = ["[0-9]*_Pooling/config.json", "[0-9]*_Dense/config.json", "[0-9]*_Dense/*.safetensors"]
"""Of a model that makes vectors of texts, which has a modules.json."""
WEIGHTS = ["*.safetensors", "model.safetensors.index.json", "SHA256SUMS"]
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
# Subfolders with files for other frameworks, and second copies of the weights in the authors' own
# format.
IGNORED = ["*/*", "consolidated*"]
TIMEOUT_SECONDS = 5.0
Settings = TypeVar("Settings", bound=EngineSettings)
Check = Callable[..., object]
"""(folder), and for a model that drafts tokens drafts=True"""
log = logging.getLogger("onehead")


def resolved(settings: Settings, check: Check) -> Settings:
    """The settings with the model's folder, after its tokenizer.json has been found, or made of a
    GGUF file. All that blocks, and so must come before the event loop, which handles signals.
    Raises the errors of `resolve` and `tokenizer_path`.
    """

    def check_all(folder: Path) -> None:
        if folder.is_dir():
            # Before the tokenizer: a model that cannot be served should be refused first.
            check(folder)
        tokenizer_path(folder)

    folder = resolve(settings.model, check=check_all)
    check_all(folder)
    # An engine that is started later, after a crash, must find the same folder: whatever the
    # working directory, and a link, is by then.
    named = settings.engine.draft if settings.engine.speculation == "draft" else None
    draft = named and resolve(named, check=partial(check, drafts=True)).resolve()
    return settings.found_in(folder.resolve(), draft)


def resolve(
    model: Path, weights: bool = True, pickles: bool = False, check: Check | None = None
) -> Path:
    """The folder of a model: `model` itself, the cache folder of the repository org/name[@revision]
    after a download, or the folder made of a GGUF file: FILE.gguf, a folder's only one, or
    org/name[@revision]:FILE.gguf.

    `weights`: download the weights too; `pickles`: weights in pickles where there are no others;
    `check`: called with the folder before weights are downloaded, may refuse the model. Raises
    ConfigurationError, CheckpointError or ResourceError that says what to do.
    """
    match = REPOSITORY.fullmatch(str(model))
    if match is None or os.path.lexists(model):
        return checkpoint_folder(model)
    repository = Repository(match[1], match[2])
    if match[3] is not None:
        return checkpoint_folder(repository.fetch_gguf(match[3]))
    folder = repository.fetch_small()
    if file := repository.only_gguf(folder):
        return checkpoint_folder(repository.fetch_gguf(file))
    if not weights:
        return folder
    # With cached weights nothing is saved: the caller checks then.
    if check is not None and not _has_files(folder, WEIGHTS[0]):
        try:
            check(folder)
        except (ConfigurationError, CheckpointError) as error:
            raise ConfigurationError(f"{model}: {error}") from None
    folder = repository.fetch(SMALL_FILES + WEIGHTS)
    if _has_files(folder, WEIGHTS[0]):
        return folder
    if not pickles:
        way_out = (
            f"if it has a pytorch_model.bin, `onehead convert --model {model} --output NEW` "
            "converts it to safetensors"
        )
        raise ConfigurationError(
            f"{model}: has no weights in safetensors files, and others are not served; {way_out}"
        )
    folder = repository.fetch(SMALL_FILES + WEIGHTS + PICKLES)
    if not _has_files(folder, PICKLES[0]):
        raise ConfigurationError(f"{model}: has neither safetensors files nor a pytorch_model.bin")
    return folder


def _has_files(folder: Path, pattern: str) -> bool:
    return any(path.is_file() for path in folder.glob(pattern))


def model_id(folder: Path) -> str:
    """A checkpoint's name in replies: the base name of its folder, or org/name if the folder is a
    snapshot in the hub's cache.
    """
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


class Repository:
    """A repository of the hub, at its newest revision or a given one. After a failed request the
    hub is not asked again.
    """

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self.revision = revision
        self._full_name = name if revision is None else f"{name}@{revision}"
        self._failure: Exception | None = None
        self._files: list[str] | None = None
        """The names of the repository's files, once the hub has answered."""

    def only_gguf(self, folder: Path) -> str | None:
        """The repository's GGUF file if its weights are that one alone, None if there are others.
        Raises ConfigurationError for several.
        """
        names = self._names(folder)
        found = gguf_names([name for name in names if "/" not in name])
        if not found or any(
            fnmatch(name, pattern) for name in names for pattern in (WEIGHTS[0], PICKLES[0])
        ):
            return None
        if len(found) > 1:
            raise ConfigurationError(
                f"{self._full_name}: has several GGUF files; name one as {self._full_name}:FILE, "
                f"of {listed(found)}"
            )
        return found[0]

    def fetch_small(self) -> Path:
        """The cache folder with the files that say what the model is, and with the layers after
        pooling of one that makes vectors of texts. Raises the errors of `fetch`.
        """
        folder = self.fetch(SMALL_FILES)
        return self.fetch(POOLED, []) if (folder / "modules.json").is_file() else folder

    def fetch_gguf(self, name: str) -> Path:
        """The cached path of a GGUF file after a download of it. Raises ConfigurationError,
        ResourceError or CheckpointError.
        """
        check_whole(Path(name))
        folder = self.fetch([glob.escape(name)], [])
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"{self._full_name}:{name}: no such file; there is "
                f"{listed(gguf_names(self._names(folder)))}"
            )
        return folder / name

    def _names(self, folder: Path) -> list[str]:
        """The names of the repository's files; of those in its cache folder if the hub has not
        answered.
        """
        return (
            [str(path.relative_to(folder)) for path in folder.rglob("*")]
            if self._files is None
            else self._files
        )

    def fetch(self, files: list[str], ignored: list[str] = IGNORED) -> Path:
        """The cache folder with the repository's files of these patterns. Raises ConfigurationError
        or ResourceError.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import OfflineModeIsEnabled

        get = partial(
            snapshot_download,
            self.name,
            revision=self.revision,
            etag_timeout=TIMEOUT_SECONDS,
            allow_patterns=files,
            ignore_patterns=ignored,
        )
        first = self._failure is None
        if self._failure is None:
            try:
                return self._download(get)
            # Of the library, its HTTP client or the system, which have no closer common base.
            except Exception as error:
                self._failure = error
        try:
            folder = Path(get(local_files_only=True))
        except Exception:
            raise _translated(self._full_name, self._failure) from None
        if first and not isinstance(self._failure, OfflineModeIsEnabled):
            cause = type(self._failure).__name__
            log.warning(
                "%s: using the copy in the hub's cache, because the hub could not be reached (%s)",
                self.name,
                cause,
            )
        return folder

    def _download(self, get: Callable[[], str]) -> Path:
        from huggingface_hub import HfApi

        log.info("%s: looking it up on the Hugging Face hub", self.name)
        # The HTTP client logs all URLs, also signed ones that permit a download.
        for client in ("httpx", "httpx2"):
            logging.getLogger(client).setLevel(logging.WARNING)
        # Ctrl-C ends the process at once: KeyboardInterrupt would wait until the library's threads
        # have finished their files.
        previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            # snapshot_download sends the same request, but without a timeout.
            found = HfApi().model_info(self.name, revision=self.revision, timeout=TIMEOUT_SECONDS)
            self._files = [file.rfilename for file in found.siblings or ()]
            return Path(get())
        finally:
            signal.signal(signal.SIGINT, previous)


def _translated(model: str, error: Exception) -> OneheadError:
    """An error of the library as one of server/errors.py, with what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return ConfigurationError(
            f"{model}: is gated: accept its conditions on its page, then set HF_TOKEN to a token "
            "of yours"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigurationError(
            f"{model}: no such folder, and no such repository on the Hugging Face hub; for a "
            "private one set HF_TOKEN"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return ResourceError(
            f"{model}: cannot be stored: {error.strerror}; HF_HOME sets the folder of downloads"
        )
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ConfigurationError(
        f"{model}: no such folder, and the Hugging Face hub cannot be reached or used ({what}), "
        "and there is no complete copy in its cache; HF_ENDPOINT is its address, HF_TOKEN your "
        "token, and HF_HUB_OFFLINE forbids downloads"
    )
