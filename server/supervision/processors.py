"""Processors that this process may use, and how the engine's OpenMP threads share them with other processes.

Invariant: an OpenMP variable that the user set is left as it is. It knows nothing of models or requests.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SPIN_ITERATIONS = 14_000
"""Iterations that an OpenMP thread spins at a barrier before it sleeps (about 0.2 ms; libgomp's default is 300,000). Measured in
docs/decisions/0033-short-spins.md."""
WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_processors(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> float:
    """Processors that this process may use: its affinity mask, limited by the CPU quotas of its control groups."""
    processors = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    return min([processors, *_quotas(root, own)])


def engine_threads(configured: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Threads of the engine on a CPU: as configured, else OMP_NUM_THREADS, else one for each whole processor that may be used."""
    if configured is not None:
        return configured
    omp = environment.get("OMP_NUM_THREADS", "")
    if omp.isdigit() and int(omp) > 0:
        return int(omp)
    return max(1, int(available_processors()))


def engine_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a process that runs the engine.

    By default libgomp's threads spin for milliseconds at every barrier. Where another process has taken the processor of the thread that
    they wait for, that is time in which the barrier cannot be passed, and a step of some hundred barriers takes 10 to 40 times as long.
    """
    if WAIT_VARIABLES & environment.keys():
        return dict(environment)
    return {**environment, "GOMP_SPINCOUNT": str(SPIN_ITERATIONS)}


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """The CPU quota, in processors, of every control group that this process is in, of both versions of the interface."""
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
    except OSError:  # No control groups: nothing limits this process.
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if controllers and "cpu" not in controllers.split(","):
            continue
        hierarchy = root / controllers if controllers else root
        group = hierarchy / path.lstrip("/")
        # The limit of any group above holds too. In a container the path may be the host's, and only the root is to be seen.
        for folder in {group, *group.parents, hierarchy} - {*hierarchy.parents}:
            yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    for read in (_unified_quota, _legacy_quota):
        try:
            quota, period = read(folder)
            if quota > 0 and period > 0:
                yield quota / period
        except (OSError, ValueError):  # Not an interface of this group, or no limit ("max").
            continue


def _unified_quota(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _legacy_quota(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
