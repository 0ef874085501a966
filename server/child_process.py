"""What a child process of ours does first. Knows nothing of what it is for."""

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """Asks Linux for SIGKILL when the parent ends: a child at work would not notice for long, and nobody would take what it makes."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
