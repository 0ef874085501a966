"""The tables of `onehead bench`, none of which is wider than 80 columns."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table


def _table(headings: tuple[str, ...], rows: list[list[str]], caption: str) -> Table:
    """One row for each run."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "load" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _pairs(*spreads: tuple[dict[str, float] | None, float]) -> list[str]:
    """Median and 99th percentile of each, in its unit."""
    return [
        f"{_number(s['p50'] * unit)} / {_number(s['p99'] * unit)}" if s else "-"
        for s, unit in spreads
    ]


def _number(value: float) -> str:
    """Two decimals where they can mean something: every figure of a table has to fit into 80
    columns.
    """
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def tables(runs: list[dict[str, Any]]) -> Iterator[Table]:
    """Rates, then latencies as clients saw them, then for runs that know their steps the time of
    the host and of the model in each.
    """
    rates, latencies, steps = [], [], []
    for each in runs:
        f, label = each["figures"], each["load"]
        per_second = [f"{f['output_tokens_per_second']:.1f}", f"{f['requests_per_second']:.2f}"]
        rates.append([label, str(f["requests"]), str(f["failed"]), *per_second])
        latencies.append(
            [
                label,
                *_pairs(
                    (f["time_to_first_token"], 1e3),
                    (f["inter_token_latency"], 1e3),
                    (f["e2e_latency"], 1),
                ),
            ]
        )
        if step := f.get("step"):
            parts = _pairs((step["host"], 1e3), (step["compute"], 1e3))
            steps.append([label, str(step["count"]), *parts, f"{step['host_share']:.2%}"])
    yield _table(("load", "requests", "failed", "tokens/s", "requests/s"), rates, "")
    yield _table(
        ("load", "TTFT, ms", "inter-token latency, ms", "end-to-end, s"),
        latencies,
        "latencies: p50 / p99",
    )
    if steps:
        yield _table(
            ("load", "steps", "host ms", "compute ms", "host's share"),
            steps,
            "parts of a step: p50 / p99; share of all seconds",
        )
