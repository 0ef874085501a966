"""Folders of control groups by what Linux says of a process, on machines of each kind."""

from pathlib import Path

import pytest

from model.control_groups import control_groups, num_oom_kills
from tests.support.control_groups import write


def folders(tmp_path: Path, groups: str, *mounts: str, controller: str = "memory") -> list[str]:
    """The folders found below /sys/fs/cgroup, written as `fs`."""
    write(tmp_path, {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts) + "\n"})
    found = control_groups(controller, tmp_path / "proc" / "self")
    return [str(folder).replace("/sys/fs/cgroup", "fs") for folder in found]


def mount(point: str = "", root: str = "/", kind: str = "cgroup2", options: str = "rw") -> str:
    return (
        f"31 23 0:27 {root} /sys/fs/cgroup{point} ro,nosuid shared:9 master:1 - {kind} cgroup "
        f"{options}"
    )


SLICE = "/system.slice/onehead.service"
V1 = mount("/memory", kind="cgroup", options="rw,memory")


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        (f"0::{SLICE}\n", [mount()], [f"fs{SLICE}", "fs/system.slice", "fs"]),
        ("0::/\n", [mount()], ["fs"]),
        # Both versions: `memory` may be of either one.
        (
            f"4:memory:/a\n1:name=systemd:{SLICE}\n0::{SLICE}\n",
            [V1, mount("/unified"), mount("/systemd", kind="cgroup", options="rw,xattr,name=systemd")],  # noqa: E501
            ["fs/memory/a", "fs/memory", f"fs/unified{SLICE}", "fs/unified/system.slice", "fs/unified"],  # noqa: E501
        ),
        # Containers: the path is the host's, and the container's own group is mounted, or is the
        # root of a namespace.
        ("4:memory:/docker/12/x\n", [mount("/memory", "/docker/12", "cgroup", "rw,memory")], ["fs/memory/x", "fs/memory"]),  # noqa: E501
        ("4:memory:/docker/12\n", [mount("/memory", "/docker/12", "cgroup", "rw,memory")], ["fs/memory"]),  # noqa: E501
        ("4:memory:/docker/123\n", [mount("/memory", "/docker/12", "cgroup", "rw,memory")], ["fs/memory"]),  # noqa: E501
        ("0::/../../other\n", [mount()], ["fs"]),
        # systemd writes names with backslashes, which mountinfo escapes.
        ("0::/a\\x2db/c\n", [mount(root="/a\\134x2db")], ["fs/c", "fs"]),
        ("0::/a\n", [mount("/my\\040groups")], ["fs/my groups/a", "fs/my groups"]),
        ("0::/a\n", [V1], []),
        ("4:cpu,cpuacct:/a\n", [V1, mount("/cpu", kind="cgroup", options="rw,cpu,cpuacct")], []),
        ("no colon\n\n", ["31 23", "", mount()], []),
    ],
)  # fmt: skip
def test_groups_of_a_process_and_those_above(
    tmp_path: Path, groups: str, mounts: list[str], expected: list[str]
) -> None:
    assert folders(tmp_path, groups, *mounts) == expected


def test_without_proc_there_are_none(tmp_path: Path) -> None:
    assert not list(control_groups("memory", tmp_path / "none")) and not num_oom_kills(
        tmp_path / "none"
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "fs/a/memory.events": "oom 9\noom_kill 3\noom_group_kill 0",
                "fs/memory.events": "oom_kill 8",
            },
            3,
        ),
        (
            {
                "fs/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
                "proc/vmstat": "oom_kill 7",
            },
            2,
        ),
        ({"proc/vmstat": "nr_free_pages 1\noom_kill 7"}, 7),
        ({"fs/a/memory.events": "low 0"}, 0),
    ],
)
def test_processes_that_were_ended_for_lack_of_memory(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": f"3 2 0:1 / {tmp_path}/fs rw - cgroup2 none rw\n",
            **files,
        },
    )
    assert num_oom_kills(tmp_path / "proc" / "self") == expected
