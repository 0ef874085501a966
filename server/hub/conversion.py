"""Conversions of a GGUF file's header in a child process, whose results are cached.

Invariant: the child process ends with this one, and an unfinished result is removed, also after
SIGTERM. It knows nothing of what is converted. Blocks: to be called before the event loop starts.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from server.child_process import WORKING_DIRECTORY, child_command
from server.errors import ResourceError

SECONDS = 300.0
HINT = "converted files are cached in XDG_CACHE_HOME, or in ~/.cache"


@contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, which is made if there is none; it is removed at exit, also after
    SIGTERM, which becomes SystemExit. Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    here = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if here:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        if here:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(module: str, *arguments: str) -> str:
    """Runs a module in a child process. Returns why it refused, empty on success. Raises
    ResourceError if it could not write a file.
    """
    try:
        done = subprocess.run(
            child_command(module, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            cwd=WORKING_DIRECTORY,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS:g} s"
    if done.returncode == -signal.SIGINT:
        # Ctrl-C reached the child, but an event loop or a shell may have kept it from this process.
        raise KeyboardInterrupt
    reason = (
        done.stdout.strip().splitlines() or [f"the conversion ended with status {done.returncode}"]
    )[-1]
    if done.returncode == ResourceError.exit_code:
        raise ResourceError(f"{reason}; {HINT}")
    return "" if done.returncode == 0 else reason
