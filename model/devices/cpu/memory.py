"""Memory of this machine, within the limit of its control group (version 2)."""

import os
from contextlib import suppress
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def free_and_total_bytes() -> tuple[int, int]:
    """Bytes that can be taken now, and all there are."""
    free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    with suppress(OSError, StopIteration):  # Without /proc, sysconf's figure stands.
        meminfo = Path("/proc/meminfo").read_text()
        free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # No control group of version 2, or no limit: `max` is no number.
        limit = int((GROUP / "memory.max").read_text())
        free, total = min(free, limit - int((GROUP / "memory.current").read_text())), min(total, limit)
    return free, total
