"""Memory within the limits of control groups, of both versions, and of the process."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from model.devices.cpu.memory import free_and_total_bytes
from tests.support.control_groups import write
from tests.support.paths import ROOT

MIB = 2**20
UNLIMITED = 9223372036854771712
HOST = {
    "proc/meminfo": f"MemTotal: {8 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {4 * MIB} "
    f"kB\nSwapFree: {9 * MIB} kB\n"
}
V2 = {
    "proc/self/cgroup": "0::/s/a.service\n",
    "proc/self/mountinfo": "3 2 0:1 / FS rw - cgroup2 none rw\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/12\n0::/\n",
    "proc/self/mountinfo": "3 2 0:1 / FS rw - cgroup none rw,memory\n",
}
OWN, ABOVE = "fs/s/a.service/memory.", "fs/s/memory."
FIRST = "fs/docker/12/memory."
LEGACY = {"fs/memory.limit_in_bytes": f"{UNLIMITED}\n", "fs/memory.usage_in_bytes": f"{7 * MIB}\n"}

CASES: dict[str, tuple[dict[str, str], int, int]] = {
    "none": (V2, 4096, 8192),
    "no limit": (V2 | {f"{OWN}max": "max\n", f"{OWN}high": "max\n", f"{OWN}current": f"{5 * MIB}\n"}, 4096, 8192),  # noqa: E501
    "own": (V2 | {f"{OWN}max": f"{400 * MIB}\n", f"{OWN}current": f"{100 * MIB}\n"}, 300, 400),
    "high": (V2 | {f"{OWN}max": f"{400 * MIB}\n", f"{OWN}high": f"{350 * MIB}\n", f"{OWN}current": f"{100 * MIB}\n"}, 250, 350),  # noqa: E501
    # Of a slice, in which other services have taken some.
    "above": (
        V2 | {f"{OWN}max": "max\n", f"{OWN}current": "1\n", f"{ABOVE}max": f"{500 * MIB}\n", f"{ABOVE}current": f"{450 * MIB}\n"},  # noqa: E501
        50,
        500,
    ),
    "files": (
        V2 | {f"{OWN}max": f"{400 * MIB}\n", f"{OWN}current": f"{390 * MIB}\n", f"{OWN}stat": f"anon 5\ninactive_file {200 * MIB}\n"},  # noqa: E501
        210,
        400,
    ),
    "over it": (V2 | {f"{OWN}high": f"{400 * MIB}\n", f"{OWN}current": f"{500 * MIB}\n"}, 0, 400),
    "first version": (
        V1 | LEGACY | {
            f"{FIRST}limit_in_bytes": f"{400 * MIB}\n",
            f"{FIRST}usage_in_bytes": f"{300 * MIB}\n",
            f"{FIRST}stat": "inactive_file 0\ntotal_inactive_file "
                            f"{50 * MIB}\nhierarchical_memory_limit {UNLIMITED}\n",
        },
        150,
        400,
    ),
    # The limit of a group that the container does not see.
    "first version, above": (
        V1 | LEGACY | {
            f"{FIRST}limit_in_bytes": f"{UNLIMITED}\n",
            f"{FIRST}usage_in_bytes": f"{100 * MIB}\n",
            f"{FIRST}stat": f"hierarchical_memory_limit {300 * MIB}\n",
        },
        200,
        300,
    ),
    "first version, no limit": (V1 | LEGACY | {f"{FIRST}limit_in_bytes": f"{UNLIMITED}\n", f"{FIRST}usage_in_bytes": "5\n"}, 4096, 8192),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_memory_within_the_limits_of_control_groups(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, free, total = CASES[name]
    write(
        tmp_path,
        {path: text.replace(" FS ", f" {tmp_path}/fs ") for path, text in (HOST | files).items()},
    )
    monkeypatch.setattr(
        os,
        "sysconf",
        lambda what: {"SC_PHYS_PAGES": 8192, "SC_AVPHYS_PAGES": 1, "SC_PAGE_SIZE": MIB}[what],
    )
    found = free_and_total_bytes(tmp_path / "proc" / "self")
    assert [round(size / MIB) for size in found] == [free, total]


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_memory_within_the_limits_of_this_process(limit: int) -> None:
    """As `ulimit -v` and `ulimit -d` set them, with all that the process has taken already."""
    code = (
        f"import resource; resource.setrlimit({limit}, (2**32, 2**32)); from "
        "model.devices.cpu.memory import free_and_total_bytes as f"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*f())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    free, total = map(int, done.stdout.split())
    assert total <= 2**32 and 0 < free < total
