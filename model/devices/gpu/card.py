"""The card as its driver describes it: what it is called, whose memory is taken, why none can be
used, and when one can compute no more.

Everything is in words, for people who read a log or a refusal. It launches nothing and knows no
model.
"""

import os
import re
import sysconfig
from pathlib import Path
from shutil import which

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_CAPABILITY = 8, 0
"""Compute capability of the first GPUs that multiply bfloat16, which Triton needs too."""
DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded, also in containers."""
HIDDEN = "", "-1", "NoDevFiles"
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU on purpose."""


def is_missed() -> bool:
    """Whether a machine on which torch finds no card has a driver, and its cards are not hidden:
    the driver may be too old, or CUDA_VISIBLE_DEVICES names another card. To compute on the CPU
    instead would hide a mistake.
    """
    hidden = os.environ.get(VISIBLE, "all").strip() in HIDDEN
    return not hidden and torch.version.cuda is not None and DRIVER.exists()


def absence() -> str:
    """Why torch can use no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs; install its build for CUDA"
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in HIDDEN:
        return (
            f"{VISIBLE} is {visible!r}, which hides every GPU; leave it out, or name a card, "
            f"as in {VISIBLE}=0"
        )
    try:
        torch.cuda.init()
        reason = "torch finds none"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if visible is not None and DRIVER.exists():
        return (
            f"{VISIBLE} is {visible!r}, and no such card is there ({reason}); `nvidia-smi -L` "
            "lists those that are"
        )
    return reason


def shortcoming(device: torch.device) -> str:
    """Why kernels cannot be compiled for this card, or on this machine; empty where they can."""
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        return (
            f"{found.name} has compute capability {found.major}.{found.minor}, expected {needed} "
            "or newer"
        )
    compilers = os.environ.get("CC") or which("gcc") or which("clang")
    # As Triton looks for them: Debian's own Python names a folder that has none.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if compilers is None or not header.exists():
        missing = "a C compiler" if compilers is None else f"Python's headers ({header})"
        return (
            f"Triton compiles its launchers, and {missing} cannot be found; install gcc and "
            "python3-dev"
        )
    return ""


def description(device: torch.device) -> str:
    """Name, compute capability, and versions of the driver and of CUDA."""
    found = torch.cuda.get_device_properties(device)
    driver = (
        re.search(r"\b\d{3,}\.[\d.]+", DRIVER.read_text(errors="replace"))
        if DRIVER.exists()
        else None
    )
    versions = f"{f'driver {driver[0]}, ' if driver else ''}CUDA {torch.version.cuda}"
    return f"{found.name} (compute capability {found.major}.{found.minor}, {versions})"


def memory_in_words(device: torch.device) -> str:
    """What is free, and who has the rest. Of a MIG slice it is the slice's memory, as CUDA counts
    it.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    sizes = (f"{size / 2**30:.2f} GiB" for size in (free, total, own, max(0, total - free - own)))
    return (
        "of the GPU's memory {} of {} are free; this process has taken {}, other processes and "
        "CUDA itself {}"
    ).format(*sizes)


def failure(error: torch.AcceleratorError) -> str:
    """The log line for a card that can compute no more in this process."""
    return (
        f"the GPU can compute no more in this process ({str(error).splitlines()[0]}); lines with "
        "Xid in the kernel's log, and `nvidia-smi -q`, say whether the card is at fault"
    )
