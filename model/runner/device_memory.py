"""How much memory a device has left, and what it says when there is none. It knows nothing of what the memory is for."""

import os
from contextlib import suppress
from pathlib import Path

import torch

GROUP = Path("/sys/fs/cgroup")
LACKS = "out of memory", "ALLOC_FAILED", "can't allocate memory"


def lack_of_memory(error: RuntimeError) -> str:
    """What a device says that lacks memory. Raises every other error."""
    if not _is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0]


def memory_error(reason: str, device: torch.device) -> MemoryError:
    """To be raised when the device's own error is gone: it keeps alive what the step had made, and its parts need the room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return MemoryError(reason)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The allocator's has a type of its own; a graph's, a library's, Triton's and a CPU's have texts."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in LACKS)


def total_bytes(device: torch.device) -> int:
    """All memory that there can be: the device's, or the machine's within the limit of this control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _group_limit()
    return total if limit is None else min(total, limit)


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now: the device's, or the machine's within the limit of this control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration):  # No /proc: the C library's figure stands.
        meminfo = Path("/proc/meminfo").read_text()
        free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    limit = _group_limit()
    return free if limit is None else min(free, limit - int((GROUP / "memory.current").read_text()))


def _group_limit() -> int | None:
    """Bytes that this control group may take; None where there is no limit, or no control group version 2."""
    try:
        limit = (GROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)
