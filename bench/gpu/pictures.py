"""The run as tables and one picture. It measures and judges nothing."""

from pathlib import Path
from typing import Any

from bench.gpu.bars import COPY_SHARE, attention_rows, rates, step_rows
from tests.support.report import Found, picture, show


def tables(found: Found) -> None:
    rows = []
    for r in attention_rows(found):
        name = f"{r['kernel']} {r['heads']} {r['case']}" + ("" if r["graph"] else ", no graph")
        shares = (f"{r[share]:.1%}" if r[share] else "-" for share in ("share", "read_share"))
        with_write = r["seconds_with_write"] * 1e6 if "seconds_with_write" in r else "-"
        rows.append((name, r["bytes"] / 1e6, r["seconds"] * 1e6, with_write, r["rate"] / 1e12, *shares))
    if rows:
        show(("attention, heads x columns, sequences x keys", "MB", "us", "writing too", "TB/s", "of the copy", "of the read"), rows)
    steps = [(r["case"], r["seconds"] * 1e3, r["floor"] * 1e3, f"{r['share']:.1%}") for r in step_rows(found)]
    if steps:
        show(("step: sequences x context", "ms", "floor, ms", "of the floor"), steps)
    if rates(found):
        show(("the workload", "output tokens/s"), [(name, f"{rate:,.0f}") for name, rate in rates(found).items()])


def draw(found: Found, path: Path) -> None:
    def panels(figure: Any) -> None:
        (ours, beside), (steps, service) = figure.subplots(2, 2)
        _ours(ours, found)
        _beside(beside, found)
        _steps(steps, found)
        _service(service, found)

    picture(path, (13, 9), panels)


def _titled(axes: Any, title: str, anything: bool) -> bool:
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    if not anything:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    return anything


def _ours(axes: Any, found: Found) -> None:
    rows = [row for row in attention_rows(found) if row["kernel"] == "onehead" and row["share"]]
    if not _titled(axes, "attention: share of the copy's bandwidth, by MB of K and V", bool(rows)):
        return
    for heads in dict.fromkeys(row["heads"] for row in rows):
        points = sorted((row["bytes"] / 1e6, row["share"]) for row in rows if row["heads"] == heads)
        axes.plot(*zip(*points, strict=True), ".-", linewidth=1.0, label=heads)
    axes.axhline(COPY_SHARE, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_ylim(0, None)
    axes.legend(fontsize=8, title="heads x columns", title_fontsize=8)


def _beside(axes: Any, found: Found) -> None:
    rows = list(attention_rows(found))
    cases = list(dict.fromkeys((row["heads"], row["case"]) for row in rows if row["kernel"] != "onehead"))
    if not _titled(axes, "attention: us a call, beside others", bool(cases)):
        return
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for number, kernel in enumerate(kernels):
        of_kernel = {(row["heads"], row["case"]): row["seconds"] * 1e6 for row in rows if row["kernel"] == kernel}
        bars = [(place, of_kernel[case]) for place, case in enumerate(cases) if case in of_kernel]
        width = 0.8 / len(kernels)
        axes.bar([place + (number - (len(kernels) - 1) / 2) * width for place, _ in bars], [y for _, y in bars], width, label=kernel)
    axes.set_xticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=7, rotation=45 if len(cases) > 6 else 0)
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _steps(axes: Any, found: Found) -> None:
    rows = list(step_rows(found))
    if not _titled(axes, "a step: ms, by sequences x context", bool(rows)):
        return
    for offset, name, label in ((-0.2, "seconds", "onehead"), (0.2, "floor", "floor")):
        axes.bar([place + offset for place in range(len(rows))], [row[name] * 1e3 for row in rows], 0.4, label=label)
    axes.set_xticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
    axes.legend(fontsize=8)


def _service(axes: Any, found: Found) -> None:
    rate = rates(found)
    if not _titled(axes, "the workload: output tokens/s", bool(rate)):
        return
    names = list(rate)[::-1]
    drawn = axes.barh([name.replace(", ", ",\n") for name in names], [rate[name] for name in names])
    axes.bar_label(drawn, [f"{rate[name]:,.0f}" for name in names], padding=3, fontsize=8)
    axes.set_xscale("log" if max(rate.values()) > 100 * min(rate.values()) else "linear")
    axes.margins(x=0.15)
