"""A pytest plugin that says where the time of a run went: the slowest tests and the time of each
folder.

tests/conftest.py loads it. Durations are of the wall clock and include setup and teardown, so that
those of parallel processes add up to more than the run took.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

NUM_SLOWEST = 10
FEW_SECONDS = 60.0
"""A shorter run is told nothing: one waits for no part of it."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        r for kind in terminalreporter.stats.values() for r in kind if hasattr(r, "duration")
    ]
    if sum(report.duration for report in reports) < FEW_SECONDS:
        return
    terminalreporter.section(
        f"where the time went: seconds of the {NUM_SLOWEST} slowest tests, and of folders"
    )
    for lines in (tests(reports).most_common(NUM_SLOWEST), folders(reports).most_common()):
        for name, seconds in lines:
            terminalreporter.write_line(f"{seconds:8.1f} {name}")
        terminalreporter.write_line("")


def tests(reports: Iterable[Any]) -> Counter[str]:
    """Seconds of each test."""
    seconds = Counter[str]()
    for report in reports:
        seconds[report.nodeid] += report.duration
    return seconds


def folders(reports: Iterable[Any]) -> Counter[str]:
    """Seconds of the tests in each folder."""
    seconds = Counter[str]()
    for report in reports:
        seconds[str(PurePosixPath(report.nodeid.partition("::")[0]).parent)] += report.duration
    return seconds
