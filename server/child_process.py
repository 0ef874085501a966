"""Set-up that every child process of the server does first."""

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends; a busy child would notice that only later."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
