"""Figures of a run's outcomes, and what they were measured with. Plain arithmetic over the standard library, so that a host without the
packages of a server can measure too.
"""

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from commands.bench.client import Outcome


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run; `outcomes` are those of the requests that had ended."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__()
        self.outcomes = [outcome for outcome in outcomes if outcome.end]


def percentile(values: list[float], share: float) -> float:
    """Of sorted values, with straight lines between neighbours."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean, percentiles and largest of a list of seconds; None if it is empty."""
    if not values:
        return None
    values = sorted(values)
    points = {f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": sum(values) / len(values), **points, "max": values[-1]}


def distributions(outcomes: list[Outcome]) -> dict[str, list[float]]:
    """Of each latency that has values, its percentiles from the 0th to the 100th, to the microsecond."""
    found: dict[str, list[float]] = {}
    for name, values in _latencies(outcomes).items():
        values = sorted(values)
        found |= {name: [round(percentile(values, share / 100), 6) for share in range(101)]} if values else {}
    return found


def _latencies(outcomes: list[Outcome]) -> dict[str, list[float]]:
    """The seconds of the requests that did not fail."""
    good = [outcome for outcome in outcomes if outcome.failure is None]
    return {
        "time_to_first_token": [o.token_times[0] - o.intended for o in good],
        "inter_token_latency": [later - earlier for o in good for earlier, later in pairwise(o.token_times)],
        "e2e_latency": [o.end - o.intended for o in good],
    }


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Rates and latencies of a run. Failed requests count as failed and in nothing else but the time they took."""
    good = [outcome for outcome in outcomes if outcome.failure is None]
    wall = max(outcome.end for outcome in outcomes)
    tokens = sum(len(outcome.token_times) for outcome in good)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "seconds": wall,
        "output_tokens_per_second": tokens / wall,
        "requests_per_second": len(good) / wall,
    } | {name: spread(values) for name, values in _latencies(outcomes).items()}


def machine() -> dict[str, Any]:
    """The machine that this runs on."""
    cpu = None
    with suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else None
    return {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count(), "cpu": cpu}


def commit() -> str | None:
    """The git commit of this source tree, marked where files differ from it; where it is no checkout the one that the version names (see
    scripts/gpu-bundle), or None.
    """
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (root / ".git").exists():  # Installed packages may lie inside a checkout of something else.
        with suppress(PackageNotFoundError):
            return version("onehead").partition("+g")[2] or None
        return None
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def circumstances(info: dict[str, Any]) -> dict[str, Any]:
    """What a result was measured with: enough to measure it again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "date": now, "machine": machine(), "commit": commit(), "server": info}
