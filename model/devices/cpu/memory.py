"""Memory of this machine, within the limits that hold for this process: its control groups' and its
own.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from model.control_groups import PROC, control_groups, lines

LIMITS = "memory.max", "memory.high", "memory.limit_in_bytes"
USED = "memory.current", "memory.usage_in_bytes"
OWN_LIMITS = (resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)
"""Limits of a process, as `ulimit -v` and `-d` set them, and the column of /proc/self/statm that
counts against each."""


def free_and_total_bytes(proc: Path = PROC) -> tuple[int, int]:
    """Bytes that can be taken now without swapping, and all there are."""
    free, total = (
        os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
        for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    )
    available = [
        int(line.split()[1]) * 1024
        for line in lines(proc.parent / "meminfo")
        if line.startswith("MemAvailable:")
    ]
    found = (
        [(*available, free)[0], total],
        *_own_limits(proc),
        *map(_of_group, control_groups("memory", proc)),
    )
    return max(0, int(min(free for free, _ in found))), int(min(total for _, total in found))


def _own_limits(proc: Path) -> Iterator[tuple[int, int]]:
    for name, column in OWN_LIMITS:
        limit, pages = resource.getrlimit(name)[0], " ".join(lines(proc / "statm")).split()
        if limit != resource.RLIM_INFINITY:
            yield limit - sum(map(int, pages[column : column + 1])) * resource.getpagesize(), limit


def _of_group(group: Path) -> tuple[float, float]:
    """Free bytes and the limit of a control group; infinite where it has none. Cached pages of
    files that were not used for a while count as free: the kernel takes them back first.
    """
    stat = dict(line.split(" ", 1) for line in lines(group / "memory.stat") if " " in line)
    limits = [
        *(text for name in LIMITS for text in lines(group / name)),
        stat.get("hierarchical_memory_limit", "max"),
    ]
    limit = min((int(text) for text in limits if text.isdigit()), default=float("inf"))
    used = sum(int(text) for name in USED for text in lines(group / name))
    return limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))), limit
