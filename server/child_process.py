"""Child processes of the server: each ends at once when its parent does, and depends on no working directory.

`child_command` gives the command line; this file, run as a script, then asks Linux for the signal at the parent's death before it imports
anything large, and runs the module. It knows nothing of what the modules do.
"""

import os
import signal
import sys
from pathlib import Path

WORKING_DIRECTORY = "/"
"""The working directory of child processes: the parent's may be deleted while it runs, and libraries fail to load without one."""
_SCRIPT = Path(__file__).resolve()
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line of a child process that runs a module with these arguments."""
    return [sys.executable, "-P", str(_SCRIPT), str(os.getpid()), module, *arguments]


def end_with_parent(parent: int) -> None:
    """Has Linux kill this process when its parent ends, or ends it if that has happened already. While it computes, it would see the
    closed pipe only later.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Runs the module that the command line names."""
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    packages = str(_SCRIPT.parent.parent)
    if packages not in sys.path:  # It was found through a relative entry of PYTHONPATH.
        sys.path.insert(0, packages)
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
