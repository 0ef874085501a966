"""Has a checkpoint's settings and tokenizer loaded by a child process with limits, before any other process loads them.

That work cannot be bounded beforehand: a few MB of tokenizer.json can take gigabytes. Invariant: a folder that passes was loaded within the
limits; another is refused in a line that names the file. It knows nothing of what is loaded.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from server.child_process import WORKING_DIRECTORY, child_command
from server.errors import ConfigurationError, ResourceError

MODULE = "server.text.checkpoint_loading"


def try_checkpoint(folder: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Has the folder loaded by a child process, and calls `meanwhile` in this one. Raises ConfigurationError, or ResourceError if no
    process can be started.
    """
    command = child_command(MODULE, str(folder.resolve()))
    null = subprocess.DEVNULL
    try:
        # In a process group of its own: Ctrl-C ends this process, and the child with it.
        child = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, cwd=WORKING_DIRECTORY, process_group=0)
    except OSError as error:
        raise ResourceError(f"no process can be started to load the checkpoint: {error.strerror}") from None
    with child:
        try:
            meanwhile()
            output = child.communicate()[0].decode(errors="replace")
        finally:
            child.kill()
    if child.returncode:
        reason = output.splitlines()[-1:] or [f"{folder}: the process that loads it ended with status {child.returncode}"]
        raise ConfigurationError(reason[0])
