"""What a soak shows: the slopes of its series, a table of them, and a picture of everything on one
page.

It knows the samples and when each engine lived, and nothing of how they came about.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Any

from commands.bench.figures import percentile
from tests.support.report import picture, show
from tests.trials.slopes import SMALL, Slope, medians, slope

MIB, HOUR = 2**20, 3600.0
AGE_BIN = 15.0
"""Seconds of an engine's age that make one point, at most."""


@dataclass(slots=True)
class Series:
    """A run in numbers. Times are seconds of the run."""

    samples: list[dict[str, float]]
    lives: list[tuple[float, float | None]]
    first_tokens: dict[int, list[float]]
    """By window: seconds from when a request was due to its first token."""
    gaps: dict[int, list[float]]
    window: float
    warmup: float
    loaded: float
    """When the kills ended."""
    same_age: float
    """Age at which engines are compared with each other."""
    settled: float
    """Age from which one engine's memory is looked at: before, it loads and touches its cache for
    the first time."""

    @property
    def times(self) -> list[float]:
        return [sample["time"] for sample in self.samples]

    def values(self, name: str) -> list[float]:
        return [sample.get(name, nan) for sample in self.samples]

    def told(self) -> dict[str, Any]:
        latencies = {"first_token": windows_of(self.first_tokens), "gap": windows_of(self.gaps)}
        rest = {
            key: value for key, value in asdict(self).items() if key not in ("first_tokens", "gaps")
        }
        return rest | {"latencies": latencies}


def windows_of(values: Mapping[int, Sequence[float]]) -> dict[int, dict[str, float]]:
    """Median and 99th percentile of each window."""
    found = {}
    for number, group in sorted(values.items()):
        ordered = sorted(group)
        if ordered:
            found[number] = {
                "count": len(ordered),
                "p50": percentile(ordered, 0.5),
                "p99": percentile(ordered, 0.99),
            }
    return found


def slopes_of(series: Series) -> list[Slope]:
    """Of everything that must not grow, on medians of windows after the warm-up."""
    found = []
    for name, label, unit in (
        ("api_rss", "API process, MiB", MIB),
        ("api_fds", "API process, descriptors", 1),
        ("api_threads", "API process, threads", 1),
        ("pages", "pages used", 1),
        ("open", "requests open", 1),
    ):
        times, values = medians(
            series.times, [value / unit for value in series.values(name)], series.window
        )
        found.append(behind_warmup(label, times, values, series.warmup))
    for label, groups in (
        ("first token p99, ms", series.first_tokens),
        ("between tokens p99, ms", series.gaps),
    ):
        windows = windows_of(groups)
        times = [(number + 0.5) * series.window for number in windows]
        found.append(
            behind_warmup(
                label, times, [window["p99"] * 1e3 for window in windows.values()], series.warmup
            )
        )
    return found + engines_of(series)


def behind_warmup(name: str, times: list[float], values: list[float], warmup: float) -> Slope:
    kept = [
        (time / HOUR, value) for time, value in zip(times, values, strict=True) if time >= warmup
    ]
    return slope(name, [time for time, _ in kept], [value for _, value in kept])


def engines_of(series: Series) -> list[Slope]:
    """Memory from engine to engine at the same age, and within the last one, which was left
    alone.
    """
    began, at_age, around = [], [], min(2 * AGE_BIN, series.same_age / 2)
    # The first is as old as the calibration before the run.
    for number, (start, end) in list(enumerate(series.lives))[1:]:
        ages = [
            sample["engine_rss"] / MIB
            for sample in series.samples
            if sample["life"] == number
            and "engine_rss" in sample
            and abs(sample["time"] - start - series.same_age) <= around
        ]
        if ages and (end is None or end - start >= series.same_age):
            began.append(start / HOUR)
            at_age.append(sorted(ages)[len(ages) // 2])
    among = slope(f"engines at the age of {series.same_age:.0f} s, MiB", began, at_age)
    last, start = len(series.lives) - 1, series.lives[-1][0]
    of_last: list[tuple[float, float]] = [
        (s["time"] - start, s["engine_rss"] / MIB)
        for s in series.samples
        if s["life"] == last and "engine_rss" in s
    ]
    settled = [(age, rss) for age, rss in of_last if age >= series.settled]
    times, values = medians(
        [age for age, _ in settled], [rss for _, rss in settled], min(AGE_BIN, series.settled / 2)
    )
    return [among, slope("the last engine, MiB", [age / HOUR for age in times], values)]


def tell(
    slopes: list[Slope], rate: float, capacity: float | None, outcomes: Counter[str], tokens: int
) -> None:
    """Tables on standard output."""
    rows = [
        (word.split(": ")[0], word.split(": ")[1], count)
        for word, count in sorted(outcomes.items())
    ]
    half = "" if capacity is None else f", half of the {capacity:.2f} that were found possible"
    show(
        ("client", "outcome", "requests"),
        rows,
        f"{rate:.2f} requests/s{half}; {tokens} tokens streamed",
    )
    headings = "series", "points", "level", "slope per hour", "95 % interval", "drift", "grows"
    told = []
    for each in slopes:
        grows = "no" if each.is_none else "YES" if each.enough else "too few points"
        interval = f"{each.low:+.3g} to {each.high:+.3g}"
        told.append(
            (
                each.name,
                each.points,
                f"{each.level:.4g}",
                f"{each.per_hour:+.3g}",
                interval,
                f"{each.drift:+.2%}",
                grows,
            )
        )
    show(
        headings,
        told,
        f"grows: the interval does not hold zero, and the drift is {SMALL:.0%} of the level or more",  # noqa: E501
    )


# --- the picture


def draw_soak(series: Series, path: Path) -> None:
    picture(path, (13, 11), lambda figure: _panels(figure, series))


def _panels(figure: Any, series: Series) -> None:
    grid = figure.subplots(4, 2, sharex=True).ravel()
    minutes = [time / 60 for time in series.times]
    lines = (
        ("API process: resident memory, MiB", [("api_rss", MIB)]),
        ("engine: resident memory, MiB (while it loads it is below)", [("engine_rss", MIB)]),
        ("descriptors", [("api_fds", 1), ("engine_fds", 1)]),
        ("threads", [("api_threads", 1), ("engine_threads", 1)]),
        ("cache pages used", [("pages", 1)]),
        (
            "requests: open at the clients, running, waiting",
            [("open", 1), ("running", 1), ("waiting", 1)],
        ),
    )
    for axes, (title, names) in zip(grid, lines, strict=False):
        for name, unit in names:
            axes.plot(
                minutes,
                [value / unit for value in series.values(name)],
                ".",
                markersize=2,
                label=name,
            )
        axes.set_title(title, fontsize=10, loc="left")
        if len(names) > 1:
            axes.legend(fontsize=8, markerscale=4)
    _latencies(grid[6], "first token after it was due, ms", series.first_tokens, series.window)
    _latencies(grid[7], "between tokens, ms", series.gaps, series.window)
    for axes in grid:
        axes.axvspan(0, series.warmup / 60, color="0.92")
        for _, end in series.lives:
            if end is not None:
                axes.axvline(end / 60, color="C3", linewidth=0.6, alpha=0.6)
        axes.grid(alpha=0.25)
    for axes, name in zip(grid[:2], ("api_rss", "engine_rss"), strict=True):
        level = sorted(value / MIB for value in series.values(name) if value == value)
        axes.set_ylim(level[len(level) // 2] * 0.95, level[-1] * 1.02)
    for axes in grid[2:6]:
        axes.set_ylim(bottom=0)
    for axes in grid[6:]:
        axes.set_xlabel("minutes (grey: warm-up; red: engine killed)")


def _latencies(axes: Any, title: str, groups: Mapping[int, Sequence[float]], width: float) -> None:
    windows = windows_of(groups)
    middles = [(number + 0.5) * width / 60 for number in windows]
    for point in ("p50", "p99"):
        axes.plot(
            middles,
            [window[point] * 1e3 for window in windows.values()],
            ".-",
            linewidth=0.8,
            markersize=4,
            label=point,
        )
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
