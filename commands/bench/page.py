"""`onehead bench --html`: a result as one page that needs no other file: charts, and every number in tables.

Invariant: the page has no script and asks for nothing; every text of a result, which may be another machine's, is escaped. It knows result
files, and nothing of how they come about.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from commands.bench.charts import NARROW, Axis, Series, line_chart, linear, logarithmic, ordinal
from commands.bench.comparison import FIGURES, Earlier, cell, figure, leaves

LATENCIES = {"time_to_first_token": "TTFT", "inter_token_latency": "Inter-token latency", "e2e_latency": "End-to-end latency"}
PERCENTILES = "p50", "p90", "p99"
ROWS = (
    *(each for each in FIGURES if len(each[1]) == 1),
    *((f"{name} {part}, ms", (key, part), 1e3) for key, name in LATENCIES.items() for part in ("mean", *PERCENTILES, "max")),
    *(each for each in FIGURES if each[1][0] == "step"),
)
"""What the table of figures has: words, where the figure stands in a run, and its unit in seconds."""
Runs = Sequence[dict[str, Any]]
Chart = tuple[str, Markup, Sequence[Series]]
"""A title, a picture, and what its legend names."""


def page(result: dict[str, Any], earlier: Earlier | None) -> str:
    """The page of a result, beside an earlier one if there is one."""
    runs = result["runs"]
    labels = {run["load"] for run in runs}
    before = [run for run in earlier.result["runs"] if run["load"] in labels] if earlier is not None else []
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        result=result,
        earlier=earlier,
        differences=earlier.differences(result) if earlier is not None else [],
        groups=list(_groups(runs, before)),
        distributions=list(_distributions(runs, before)),
        columns=[run["load"] + ("*" if run.get("partial") else "") for run in runs],
        rows=list(_rows(runs, before)),
        facts=[
            (name, "none" if value is None else value)
            for part in ("server", "machine", "settings")
            for name, value in leaves(part, result.get(part))
        ],
    )


def seconds_in_words(value: float) -> str:
    """A time on an axis."""
    return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"


def _groups(runs: Runs, before: Runs) -> Iterator[tuple[str, list[Chart]]]:
    """The charts over the load, for closed and for open loops."""
    for kind, title, unit in (
        ("closed", "Closed loop: clients that send one request after the other", "clients"),
        ("open", "Open loop: requests at random times", "requests/s offered"),
    ):
        chosen = [run for run in runs if run["load"].split(" ")[0] == kind]
        if chosen:
            x = ordinal(unit, [run["load"].split(" ")[1].removesuffix("/s") for run in chosen])
            places = {run["load"]: float(number) for number, run in enumerate(chosen)}
            earlier = [run for run in before if run["load"] in places]
            yield title, [_throughput(chosen, earlier, places, x), *_latencies(chosen, earlier, places, x)]


def _line(name: str, runs: Runs, keys: tuple[str, ...], places: dict[str, float], style: int, is_earlier: bool = False) -> Series:
    """A figure of each run over its load."""
    values = [(places[run["load"]], figure(run["figures"], keys)) for run in runs]
    return Series(name, tuple((place, value) for place, value in values if value is not None), style, is_earlier)


def _throughput(runs: Runs, before: Runs, places: dict[str, float], x: Axis) -> Chart:
    keys = ("output_tokens_per_second",)
    series = [_line("now", runs, keys, places, 0)] + ([_line("earlier", before, keys, places, 0, is_earlier=True)] if before else [])
    y = linear("output tokens/s", _heights(series), lambda value: f"{value:,g}")
    return "Throughput", line_chart("Output tokens per second over the load", series, x, y), series if before else []


def _latencies(runs: Runs, before: Runs, places: dict[str, float], x: Axis) -> Iterator[Chart]:
    """A chart for each latency, with a line for each percentile."""
    for key, name in LATENCIES.items():
        series = []
        for style, share in enumerate(PERCENTILES):
            series.append(_line(share, runs, (key, share), places, style))
            if before:
                series.append(_line(f"{share}, earlier", before, (key, share), places, style, is_earlier=True))
        if heights := list(_heights(series)):
            y = logarithmic("", heights, seconds_in_words)
            yield name, line_chart(f"Percentiles of {name} over the load", series, x, y), series


def _distributions(runs: Runs, before: Runs) -> Iterator[Chart]:
    """A chart for each latency: which share of its values is below a time."""
    for key, name in LATENCIES.items():
        series = []
        for style, run in enumerate(runs):
            series += _curve(run["load"], run, key, style, is_earlier=False)
            for other in before:
                if other["load"] == run["load"]:
                    series += _curve(f"{run['load']}, earlier", other, key, style, is_earlier=True)
        if series:
            x = logarithmic("", [value for each in series for value, _ in each.points], seconds_in_words)
            y = linear("share of values below", [1.0], lambda value: f"{value:.0%}")
            yield name, line_chart(f"Distribution of {name}", series, x, y, NARROW), series


def _curve(name: str, run: dict[str, Any], key: str, style: int, is_earlier: bool) -> list[Series]:
    """The distribution of one run; none where the result has none, as those of older versions."""
    values = (run.get("distributions") or {}).get(key)
    if not values:
        return []
    points = tuple((value, number / (len(values) - 1)) for number, value in enumerate(values))
    return [Series(name, points, style, is_earlier, has_marks=False)]


def _heights(series: Sequence[Series]) -> Iterator[float]:
    return (height for each in series for _, height in each.points)


def _rows(runs: Runs, before: Runs) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Every figure: its name, and for each run the value now, the earlier one and the ratio, the last two empty where there are none."""
    earlier = {run["load"]: run["figures"] for run in before}
    for words, keys, unit in ROWS:
        cells = []
        for run in runs:
            now, then = figure(run["figures"], keys), figure(earlier.get(run["load"]), keys)
            cells.append((cell(now, unit), cell(then, unit) if before else "", f"{now / then:.3f}" if now and then else ""))
        if any(value != "-" for value, *_ in cells):
            yield words, cells
