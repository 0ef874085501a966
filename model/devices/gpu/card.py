"""The card as its driver describes it: what it is called, whose memory is taken, why none can be
used, and when one can compute no more.

Everything is in words, for people who read a log or a refusal. It launches nothing and knows no
model.
"""

import os
import re
from pathlib import Path

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded, also in containers."""
HIDDEN = "", "-1", "NoDevFiles"
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU on purpose."""


def is_missed() -> bool:
    """Whether CUDA_VISIBLE_DEVICES names a card of a machine with a driver, and torch finds none.
    To compute on the CPU instead would hide a mistake.
    """
    named = os.environ.get(VISIBLE, "").strip() not in HIDDEN
    return (
        named
        and torch.version.cuda is not None
        and DRIVER.exists()
        and not torch.cuda.is_available()
    )


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
