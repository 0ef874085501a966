"""Reports of live tests and benches: figures of a process from /proc, tables, checks, pictures, and
one JSON file for each run.

Invariant: the exit status is 0 exactly if every check holds, and the file agrees with the table. It
knows nothing of servers.
"""

import json
import os
import resource
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commands.bench.bench import PLAIN_WIDTH
from commands.bench.figures import circumstances
from tests.support.checks import Check as Check
from tests.support.checks import Found as Found


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process: resident bytes, file descriptors, threads."""

    rss: int
    fds: int
    threads: int


def usage(pid: int) -> Usage | None:
    """The resources of a running process; None if it has ended."""
    with suppress(OSError, KeyError):
        lines = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return Usage(
            int(lines["VmRSS"].split()[0]) * 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            int(lines["Threads"]),
        )
    return None


class Memory:
    """The resident memory of a process over a time, sampled by a thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before = self.now
        self.peak = self.before

    @property
    def now(self) -> int:
        found = usage(self._pid)
        return 0 if found is None else found.rss

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, self.now)


def raise_file_limit() -> int:
    """Raises the limit of open files of this process and its children as far as allowed; returns
    it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=4)


def show(
    headings: Iterable[str], rows: Iterable[Iterable[object]], caption: str | None = None
) -> None:
    """A table on standard output."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)


def conclude(
    name: str, output: Path | None, info: Found, result: Found, checks: list[Check]
) -> int:
    """Prints the checks, writes NAME.json and returns the exit status."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("requirement", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.what, "holds" if check.holds else "MISSED", check.found)
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        whole = circumstances(info) | {"checks": [asdict(check) for check in checks]} | result
        (output / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0 if all(check.holds for check in checks) else 1


def picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """A matplotlib figure as a PNG file; `draw` gets the figure."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained", dpi=120)
    draw(figure)
    figure.savefig(path)
    plt.close(figure)
