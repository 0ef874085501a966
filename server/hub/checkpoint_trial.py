"""Has a checkpoint's settings and tokenizer loaded by a child process with limits, before any other
process loads them.

That work cannot be bounded beforehand: a few MB of tokenizer.json can take gigabytes. That files
with these contents passed is remembered in the cache. Invariant: a folder that passes was loaded
within the limits; another is refused in a line that names the file. It knows nothing of what is
loaded.
"""

import contextlib
import hashlib
import subprocess
from importlib.metadata import version
from pathlib import Path

from model.checkpoint.files import MOST_TOKENIZER_BYTES, read_file
from server.child_process import WORKING_DIRECTORY, child_command
from server.config import cache_folder
from server.errors import ConfigurationError, ResourceError
from server.hub.tokenizer_file import tokenizer_path

MODULE = "server.text.checkpoint_loading"
SETTINGS = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
TRIAL = "1"
"""To be raised with every change of what is loaded, or refused."""


def try_checkpoint(folder: Path) -> None:
    """Has the folder loaded by a child process, unless its files have passed before. Raises
    ConfigurationError, CheckpointError, or ResourceError if no process can be started.
    """
    passed = None
    # Without a cache it is tried at every start.
    with contextlib.suppress(OSError, ConfigurationError):
        passed = cache_folder() / "passed" / _digest(folder)
        if passed.exists():
            return
        passed.parent.mkdir(parents=True, exist_ok=True)
    _try(folder)
    if passed is not None:
        with contextlib.suppress(OSError):
            passed.touch()


def _digest(folder: Path) -> str:
    whole = hashlib.sha256(f"{TRIAL} {version('tokenizers')}".encode())
    for path in (tokenizer_path(folder), *(folder / name for name in SETTINGS)):
        data = read_file(path, MOST_TOKENIZER_BYTES)
        whole.update(b"-" if data is None else hashlib.sha256(data).digest())
    return whole.hexdigest()


def _try(folder: Path) -> None:
    command = child_command(MODULE, str(folder.resolve()))
    null = subprocess.DEVNULL
    try:
        # In a process group of its own: Ctrl-C ends this process, and the child with it.
        child = subprocess.Popen(
            command,
            stdin=null,
            stdout=subprocess.PIPE,
            stderr=null,
            cwd=WORKING_DIRECTORY,
            process_group=0,
        )
    except OSError as error:
        raise ResourceError(
            f"no process can be started to load the checkpoint: {error.strerror}"
        ) from None
    with child:
        try:
            output = child.communicate()[0].decode(errors="replace")
        finally:
            child.kill()
    if child.returncode:
        reason = output.splitlines()[-1:] or [
            f"{folder}: the process that loads it ended with status {child.returncode}"
        ]
        raise ConfigurationError(reason[0])
