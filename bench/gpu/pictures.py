"""The run as tables of plain text, for hosts without packages that draw any, and as one picture. It
measures and judges nothing.
"""

import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.bars import COPY_SHARE, at, attention_rows, rates, step_rows
from tests.support.checks import Found

WIDEST = 90
"""Characters of the last column."""
HOST_PARTS = "plan", "launch", "wait", "commit", "send"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: bool = True) -> str:
    """Columns under their headings; `right`: all but the first are set to the right."""
    cells = [list(headings)]
    for row in rows:
        *words, last = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row)
        first, *more = textwrap.wrap(last, WIDEST) or [""]
        cells += [[*words, first], *([""] * len(words) + [line] for line in more)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    set_right = [right and number > 0 for number in range(len(widths))]
    lines = [
        "  ".join(
            f"{c:>{w}}" if r else f"{c:<{w}}"
            for c, w, r in zip(row, widths, set_right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines) + "\n\n"


def tables(found: Found) -> str:
    """Every table that there are figures for."""
    text, rows = "", list[Sequence[object]]()
    for r in attention_rows(found):
        name = f"{r['kernel']} {r['heads']} {r['case']}" + ("" if r["graph"] else ", no graph")
        shares = (f"{r[share]:.1%}" if r[share] else "-" for share in ("share", "read_share"))
        with_write = r["seconds_with_write"] * 1e6 if "seconds_with_write" in r else "-"
        rows.append(
            (name, r["bytes"] / 1e6, r["seconds"] * 1e6, with_write, r["rate"] / 1e12, *shares)
        )
    if rows:
        text += table(
            (
                "attention: heads x columns, sequences x keys",
                "MB",
                "us",
                "writing too",
                "TB/s",
                "of a copy",
                "of a read",
            ),
            rows,
        )
    steps = [
        (r["case"], r["seconds"] * 1e3, r["floor"] * 1e3, f"{r['share']:.1%}")
        for r in step_rows(found)
    ]
    if steps:
        text += table(("step: sequences x context", "ms", "floor, ms", "of the floor"), steps)
    text += "".join(kernel_tables(found))
    if host := at(found, "serve/host"):
        parts = [
            (name, f"{host['parts'][name] * 1e6:.0f}")
            for name in HOST_PARTS
            if name in host.get("parts", {})
        ]
        text += table(
            (f"the host's step, {host['sequences']} sequences", "us"),
            [*parts, ("the whole step", f"{host['step'] * 1e6:.0f}")],
        )
    if rates(found):
        text += table(
            ("the workload", "output tokens/s"),
            [(name, f"{rate:,.0f}") for name, rate in rates(found).items()],
        )
    return text


def kernel_tables(found: Found) -> list[str]:
    """The device's time of a step by kernel, for each case of the profile and for the workload's
    steps.
    """
    profiles: Found = {}
    for case, by_name in (at(found, "profile") or {}).items():
        if isinstance(by_name, dict):
            profiles |= {
                f"{case}, {name}": each for name, each in by_name.items() if isinstance(each, dict)
            }
    profiles["the workload's steps, by kernel"] = at(found, "serve/gpu") or {}
    texts = []
    for name, profile in profiles.items():
        if kernels := profile.get("kernels"):
            rows = [
                (kernel, each["seconds"] * 1e6, each["calls"]) for kernel, each in kernels.items()
            ]
            texts.append(
                table(
                    (name, "us a step", "calls"),
                    [*rows, ("in all", profile["seconds"] * 1e6, profile["calls"])],
                )
            )
    return texts


def draw(found: Found) -> bytes:
    """The picture, as a PNG file."""
    from tests.support.report import picture

    def panels(figure: Any) -> None:
        (ours, beside), (steps, service) = figure.subplots(2, 2)
        _ours(ours, found)
        _beside(beside, found)
        _steps(steps, found)
        _service(service, found)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu.png"
        picture(path, (13, 9), panels)
        return path.read_bytes()


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
    cases = list(
        dict.fromkeys((row["heads"], row["case"]) for row in rows if row["kernel"] != "onehead")
    )
    if not _titled(axes, "attention: us a call, beside others", bool(cases)):
        return
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for number, kernel in enumerate(kernels):
        of_kernel = {
            (row["heads"], row["case"]): row["seconds"] * 1e6
            for row in rows
            if row["kernel"] == kernel
        }
        bars = [(place, of_kernel[case]) for place, case in enumerate(cases) if case in of_kernel]
        width = 0.8 / len(kernels)
        axes.bar(
            [place + (number - (len(kernels) - 1) / 2) * width for place, _ in bars],
            [y for _, y in bars],
            width,
            label=kernel,
        )
    axes.set_xticks(
        range(len(cases)),
        ["\n".join(case) for case in cases],
        fontsize=7,
        rotation=45 if len(cases) > 6 else 0,
    )
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _steps(axes: Any, found: Found) -> None:
    rows = list(step_rows(found))
    if not _titled(axes, "a step: ms, by sequences x context", bool(rows)):
        return
    for offset, name, label in ((-0.2, "seconds", "onehead"), (0.2, "floor", "floor")):
        axes.bar(
            [place + offset for place in range(len(rows))],
            [row[name] * 1e3 for row in rows],
            0.4,
            label=label,
        )
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
