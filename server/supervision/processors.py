"""Number of processors this process may use, and the OpenMP environment of the engine process.

Invariant: an OpenMP variable that the user set is left as it is. It knows nothing of models or
requests.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from model.control_groups import PROC, control_groups

SPIN_ITERATIONS = 14_000
"""Iterations that an OpenMP thread spins at a barrier before it sleeps (about 0.2 ms; the default
of libgomp is 300,000); see docs/why.md#short-spins."""
WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
DEVICES = Path("/dev")
STEP_SIZES = {False: (64, 512), True: (256, 4096)}
"""Sequences and tokens of a step by default, on a CPU and on a GPU."""


def available_processors() -> float:
    """Processors that this process may use: its affinity mask, limited by the CPU quotas of its
    control groups.
    """
    processors = float(
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    )
    return min(
        [processors, *(quota for folder in control_groups("cpu", PROC) for quota in _quota(folder))]
    )


def engine_threads(configured: int | None) -> int:
    """CPU threads of the engine: as configured, else OMP_NUM_THREADS, else the usable processors
    rounded down.
    """
    if configured is not None:
        return configured
    omp = os.environ.get("OMP_NUM_THREADS", "")
    if omp.isdigit() and int(omp) > 0:
        return int(omp)
    return max(1, int(available_processors()))


def on_gpu(device: str) -> bool:
    """Whether an engine with this engine.device will be on a GPU, as far as that can be told
    without torch.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return device == "cuda" or (
        device == "auto" and not hidden and any(DEVICES.glob("nvidia[0-9]*"))
    )


def step_sizes(max_running: int | None, step_tokens: int | None, device: str) -> tuple[int, int]:
    """engine.max_running and engine.step_tokens: as configured, else by the device, and so that a
    step has a token for each sequence.
    """
    most_running, most_tokens = STEP_SIZES[on_gpu(device)]
    if max_running is None:
        max_running = most_running if step_tokens is None else min(most_running, step_tokens)
    return max_running, step_tokens or max(most_tokens, max_running)


def engine_environment() -> dict[str, str]:
    """Environment of the engine process: this one's, with short OpenMP spins unless the user
    configured them.

    By default libgomp threads spin for milliseconds at every barrier. If another process occupies
    the processor of a thread that has not reached the barrier, the spinning delays it further: a
    step of a few hundred barriers then takes 10 to 40 times as long.
    """
    if WAIT_VARIABLES & os.environ.keys():
        return dict(os.environ)
    return {**os.environ, "GOMP_SPINCOUNT": str(SPIN_ITERATIONS)}


def _quota(folder: Path) -> Iterator[float]:
    """The processors of a control group's quota, of either version, if it has any."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        # The group may have no such file, or no limit ("max").
        with suppress(OSError, ValueError):
            text = " ".join((folder / name).read_text() for name in names)
            quota, period = map(int, text.split())
            if quota > 0 and period > 0:
                yield quota / period
