"""The native CPU kernels, compiled when onehead is installed: the same source for AVX-512 and
AVX2, each with and without VNNI, for NEON with and without dot products and i8mm, and for any
processor.

They are called through ctypes on addresses of tensors, which are integers of 64 bits in their
structs too, and have threads of their own (pool.cpp).
Invariants: `library` returns the fastest version that this processor supports; all versions give
the same bits, except where a processor has no fused multiplication and addition. It knows nothing
of models.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from model.devices.blocks import FORMATS
from model.spec import OptionError

FEATURES = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx512bw": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "i8mm": ("asimddp", "atomics", "i8mm"),
    "dotprod": ("asimddp", "atomics"),
    "portable": (),
}
"""The processor features that each version needs, the fastest first; on Arm `portable` is NEON."""
INTERFACE = 14
"""Version of the kernels' structs, functions and results, the same as in product.cpp."""
NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' NumberType of each dtype."""
NUM_ARGUMENTS = {
    "sum_pages": 7,
    "attend": 2,
    "product": 2,
    "pack": 6,
    "take": 6,
    "normalise_rows": 7,
    "gate": 6,
    "cap_logits": 6,
    "summarise_logits": 7,
    "compute_step": 2,
    "prepared_bytes": 1,
} | {
    f"{name}_{form}": count
    for form in FORMATS
    for name, count in (("pack", 5), ("take", 5), ("quantize", 4))
}
"""Of each function; all are integers of 64 bits, addresses of tensors and structs among them."""


def integers(*names: str) -> list[tuple[str, Any]]:
    """Fields of a struct, of 64 bits each: numbers and addresses."""
    return [(name, ctypes.c_int64) for name in names]


@cache
def library(fastest: str = "avx512") -> ctypes.CDLL:
    """The fastest version of the kernels from `fastest` on. Raises OptionError if there is none."""
    names, flags, reasons = list(FEATURES), _processor_flags(), []
    for name in names[names.index(fastest) :]:
        spec = find_spec(f"model.devices.cpu.native.kernels_{name}")
        if spec is not None and spec.origin is not None and flags.issuperset(FEATURES[name]):
            try:
                return _load(spec.origin)
            except (OSError, AttributeError) as error:
                reasons.append(str(error))
    reason = "; ".join(reasons) or f"none in {Path(__file__).parent} is for this processor"
    raise OptionError(
        f"a CPU needs onehead's kernels: {reason}; install onehead again, from a wheel or where "
        "there is a C++ compiler (g++ or clang++)"
    )


def _load(path: str) -> ctypes.CDLL:
    """Raises OSError or AttributeError."""
    found = ctypes.CDLL(path)
    if found.interface() != INTERFACE:
        raise OSError(f"{path} was compiled from another version")
    found.isa.restype = ctypes.c_char_p
    for counts in (found.prepared_bytes, found.num_phases_computed):
        counts.restype = ctypes.c_int64
    for name, count in NUM_ARGUMENTS.items():
        getattr(found, name).argtypes = [ctypes.c_int64] * count
    return found


def name() -> str:
    """One name for all versions that give the same bits."""
    return "native-unfused" if library().isa() == b"unfused" else "native"


def _processor_flags() -> set[str]:
    """The processor's features by Linux's names; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    named = (line.partition(":") for line in lines)
    return set(
        next((of for name, _, of in named if name.strip() in ("flags", "Features")), "").split()
    )
