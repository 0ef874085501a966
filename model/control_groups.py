"""Control groups (cgroups) of this process, of version 1 and 2, as folders that can be read.

It knows where they are, and how often the kernel has ended a process there; it knows no limits.
"""

import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def control_groups(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """The folders of this process's own group and of all above it, as far as they are mounted, in
    each hierarchy that may limit by this controller (`cpu`, `memory`).
    """
    own = [line.split(":", 2)[1:] for line in lines(proc / "cgroup") if line.count(":") > 1]
    for mount in lines(proc / "mountinfo"):
        place, _, rest = mount.partition(" - ")
        kind, _, options = rest.partition(" ")
        first = kind == "cgroup" and controller in options.split(" ")[-1].split(",")
        if not first and kind != "cgroup2":
            continue
        root, point = (
            _ESCAPED.sub(lambda code: chr(int(code[1], 8)), text) for text in place.split()[3:5]
        )
        for controllers, path in own:
            if controller in controllers.split(",") if first else not controllers:
                yield from _folders(Path(point), path, root)


def _folders(point: Path, path: str, root: str) -> Iterator[Path]:
    """The folders of a group and of those above it. In a container the path may be the host's, of
    which the container sees its own group alone, as the root of what is mounted.
    """
    group = Path(path)
    if group.is_relative_to(root) and ".." not in group.parts:
        for folder in (group, *group.parents)[: len(group.parts) - len(Path(root).parts)]:
            yield point / folder.relative_to(root)
    yield point


def num_oom_kills(proc: Path = PROC) -> int:
    """Processes of this process's own group that the kernel has ended for lack of memory; of the
    whole machine, where its group does not count them.
    """
    groups = control_groups("memory", proc)
    counts = [
        folder / name for folder in groups for name in ("memory.events", "memory.oom_control")
    ]
    for file in (*counts, proc.parent / "vmstat"):
        for line in lines(file):
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


def lines(path: Path) -> list[str]:
    """The lines of a file, none if it cannot be read: a system without it sets no limits by it."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
