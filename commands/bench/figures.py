"""Figures of a run's outcomes, and what they were measured with. Plain arithmetic over the standard
library, so that a host without the packages of a server can measure too.
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


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Rates and latencies of a run. Failed requests count as failed and in nothing else but the
    time they took.
    """
    good = [outcome for outcome in outcomes if outcome.failure is None]
    wall = max(outcome.end for outcome in outcomes)
    tokens = sum(len(outcome.token_times) for outcome in good)
    gaps = [later - earlier for o in good for earlier, later in pairwise(o.token_times)]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "seconds": wall,
        "output_tokens_per_second": tokens / wall,
        "requests_per_second": len(good) / wall,
        "time_to_first_token": spread([o.token_times[0] - o.intended for o in good]),
        "inter_token_latency": spread(gaps),
        "e2e_latency": spread([o.end - o.intended for o in good]),
    }


def machine() -> dict[str, Any]:
    """The machine that this runs on."""
    cpu = None
    with suppress(OSError):
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0].partition(":")[2].strip() if names else None
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "cpu": cpu,
    }


def commit() -> str | None:
    """The git commit of this source tree, marked where files differ from it; where it is no
    checkout the one that the version names (see scripts/gpu-bundle), or None.
    """
    root = Path(__file__).resolve().parents[2]
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    if not (
        root / ".git"
    ).exists():  # Installed packages may lie inside a checkout of something else.
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
    return {
        "command": command,
        "date": now,
        "machine": machine(),
        "commit": commit(),
        "server": info,
    }
