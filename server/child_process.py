"""Child processes of the server: each ends at once when its parent does, and depends on no working
directory.

`child_command` gives the command line of a new program; this file, run as a script, then asks Linux
for the signal at the parent's death before it imports anything large, and runs the module. `fork`
copies this process instead, with all that it has read. It knows nothing of what they do.
"""

import contextlib
import fcntl
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

WORKING_DIRECTORY = "/"
"""The working directory of child processes: the parent's may be deleted while it runs, and
libraries fail to load without one."""
_SCRIPT = Path(__file__).resolve()
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line of a child process that runs a module with these arguments."""
    return [sys.executable, "-P", str(_SCRIPT), str(os.getpid()), module, *arguments]


@cache
def _c_library() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Has Linux kill this process when its parent ends, or ends it if that has happened already.
    While it computes, it would see the closed pipe only later.
    """
    if sys.platform == "linux":
        _c_library().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork(work: Callable[[], object], *descriptors: int, most_bytes: int | None = None) -> int:
    """Runs `work` in a copy of this process, which then ends; it keeps standard input, output and
    error and these descriptors alone, and may allocate `most_bytes` more. Returns its process id.
    Nothing waits for it: its end is seen in what it closes. Raises OSError.
    """
    _c_library()  # Another thread may hold the lock for loading it when the copy is made.
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        end_with_parent(parent)
        ignore_signals()
        for last, following in pairwise((2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(last + 1, following)
        if most_bytes is not None:
            limit_memory(most_bytes)
        work()
    finally:
        os._exit(0)


def ignore_signals() -> None:
    """For a child that serves others: signals that a process group gets are the API process's,
    which drains first; children that have ended are forgotten; and no core is written.
    """
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(num_bytes: int) -> None:
    """Lets this process allocate so many more bytes; Linux only."""
    import resource

    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(
            resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )


def allow_files(wanted: int) -> int:
    """Raises this process's limit of open files to so many, as far as it may be raised. Returns the
    limit.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def release_freed_memory() -> None:
    """Returns memory that this process has freed to the system; with glibc only."""
    with contextlib.suppress(AttributeError):
        _c_library().malloc_trim(0)


def main() -> None:
    """Runs the module that the command line names."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # A service manager may send it to every process.
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    packages = str(_SCRIPT.parent.parent)
    if packages not in sys.path:  # It was found through a relative entry of PYTHONPATH.
        sys.path.insert(0, packages)
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()


@contextlib.contextmanager
def ended_by_close(descriptor: int) -> Iterator[None]:
    """Meanwhile, has Linux end this process as soon as the other end of a socket is closed, from
    which nothing is to come: SIGIO ends a process that does not handle it.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # It has been closed already.
        os._exit(0)
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
