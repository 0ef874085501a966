"""Kernels of our own for the CPU, compiled when onehead is installed: the same source for AVX-512, for AVX2 and for any processor.

They are reached through ctypes, on the addresses of torch's tensors, and share torch's OpenMP threads. Invariant: `library` gives the
widest that this processor runs, or None where none was compiled; the torch path takes over then. It knows nothing of models.
"""

import ctypes
import logging
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime is the one that the kernels find)

log = logging.getLogger("onehead.engine")

FEATURES = {"avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"), "avx2": ("avx2", "fma"), "portable": ()}
"""What a processor must have for each, widest first."""
INTERFACE = 4
"""Of the kernels' structs and functions, as product.cpp has it."""


@cache
def library(widest: str = "avx512") -> ctypes.CDLL | None:
    """The kernels, none wider than `widest`."""
    names = list(FEATURES)
    flags = _processor_flags()
    for name in names[names.index(widest) :]:
        spec = find_spec(f"model.devices.cpu.native.kernels_{name}")
        if spec is not None and spec.origin is not None and flags.issuperset(FEATURES[name]):
            found = _load(spec.origin)
            if found is not None:
                return found
    return None


def _load(path: str) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(path)
        if found.interface() != INTERFACE:
            log.warning("%s was compiled from another version; install onehead again (torch's operations take its place)", path)
            return None
    except (OSError, AttributeError) as error:
        log.warning("kernels cannot be used, and torch's operations take their place: %s", error)
        return None
    found.isa.restype = ctypes.c_char_p
    found.panel.restype = ctypes.c_int64
    found.attend.argtypes = found.product.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


def _processor_flags() -> set[str]:
    """As Linux names them; none are known elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def name_of(kernels: ctypes.CDLL) -> str:
    """What an answer's last bits depend on: their width of vectors."""
    return f"native-{kernels.isa().decode()}"
