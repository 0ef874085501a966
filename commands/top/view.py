"""One frame of `onehead top`, made of what a Monitor knows, for a terminal of any size from 80 columns on.

Texts of clients and servers are shown without control characters. It knows nothing of connections and keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commands.top.monitor import QUANTILE_SECONDS, RATE_SECONDS, Monitor, Row, Stats, quantiles
from server.protocol import CACHED, FREE, OWNED, SHARED

GLYPHS, ASCII_GLYPHS = "·░█▓", ".:#@"
"""How a page is drawn, by its kind."""
OWNER_STYLES = (
    "green",
    "cyan",
    "magenta",
    "yellow",
    "blue",
    "bright_green",
    "bright_cyan",
    "bright_magenta",
    "bright_yellow",
    "bright_blue",
)
STYLES = {FREE: "dim", CACHED: "", SHARED: "white"}
STATE_STYLES = {"running": "green", "waiting": "yellow", "preempted": "red"}
WIDE, WIDEST = 120, 160
"""Columns from which on the names of requests are shown, and a bar of their tokens too."""
BARS, ASCII_BARS = "╌━═─", "~=#."
"""How tokens are drawn: from the prefix cache, computed of the prompt, computed of the output, not computed."""
BAR_WORDS = "cached", "prompt", "output", "not computed"
MAX_NAME, BESIDE_BAR, TABLE_LINES, MIN_ROWS = 36, 115, 5, 3
SORTS: dict[str, tuple[str, Callable[[Monitor, Row], float]]] = {
    "i": ("id", lambda _, row: row.id),
    "s": ("state", lambda _, row: ("preempted", "waiting", "running").index(row.state) if row.state in STATE_STYLES else 3),
    "o": ("output", lambda _, row: -row.num_output),
    "t": ("tokens/s", lambda monitor, row: -(monitor.tokens_per_second(row) or 0.0)),
    "p": ("pages", lambda _, row: -row.num_pages),
    "x": ("preemptions", lambda _, row: -row.num_preemptions),
}
"""By key: the word for it, and what rows are sorted by, the first first."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a frame is drawn for. `height` None shows all rows, and no keys; latencies are then those since the server's start."""

    url: str
    width: int
    height: int | None = None
    sort: str = "i"
    is_reversed: bool = False
    notice: str = ""
    """What is wrong with the connection."""
    ascii_only: bool = False


def frame(monitor: Monitor, look: Look) -> RenderableType:
    """Everything that is shown."""
    if not monitor.has_engine:
        waiting = f"status: {monitor.status}; waiting for the state of the KV cache"
        return Group(Text(f"onehead top  {look.url}", "bold"), Text(printable(look.notice or waiting), "yellow"))
    parts = [_heading(monitor, look), *_figures(monitor, look), Text(), *_pages(monitor, look)]
    room = None if look.height is None else max(MIN_ROWS, look.height - len(parts) - TABLE_LINES)
    return Group(*parts, _table(monitor, look, room), *([] if look.height is None else [_keys(look)]))


def _line(*parts: tuple[str, str] | str) -> Text:
    """One line, which is cut where it is too long."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def printable(text: str) -> str:
    """A text from elsewhere, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _heading(monitor: Monitor, look: Look) -> Text:
    stats = monitor.history[-1]
    if look.notice:
        return _line(("onehead top", "bold"), f"  {look.url}  ", (printable(look.notice), "bold red"))
    status = (printable(stats.status), "green" if stats.status == "ready" else "bold yellow")
    restarts = (f"{stats.restarts} engine restarts", "bold yellow" if stats.restarts else "dim")
    model = (printable(stats.model), "bold")
    return _line(("onehead top", "bold"), f"  {look.url}  ", model, f" on {printable(stats.device)}  ", status, "  ", restarts)


def _figures(monitor: Monitor, look: Look) -> Iterator[Text]:
    """Counts, rates and latencies."""
    before, now = monitor.span(RATE_SECONDS)
    seconds = now.time - before.time

    def rate(count: Callable[[Stats], int]) -> str:
        return f"{_number((count(now) - count(before)) / seconds)}/s" if seconds else "-"

    queries = now.totals.prefix_queries - before.totals.prefix_queries
    hits = f"{(now.totals.prefix_hits - before.totals.prefix_hits) / queries:.0%}" if queries else "-"
    bad = {outcome: now.totals.requests.get(outcome, 0) for outcome in ("failed", "refused")}
    figures = [
        ("running", str(now.running)),
        ("waiting", str(now.waiting)),
        ("ended", rate(lambda stats: sum(stats.totals.requests.values()))),
    ]
    yield _named("requests", [*figures, *((outcome, str(count)) for outcome, count in bad.items())])
    generated, prompt = rate(lambda stats: stats.totals.generation_tokens), rate(lambda stats: stats.totals.prompt_tokens)
    preempted = rate(lambda stats: stats.totals.preemptions)
    yield _named("tokens", [("generated", generated), ("prompt", prompt), ("prefix hits", hits), ("preempted", preempted)])
    yield _latencies(monitor, look)


def _latencies(monitor: Monitor, look: Look) -> Text:
    before, now = monitor.span(QUANTILE_SECONDS)
    base = before if look.height else None
    found = []
    for words, name in (("TTFT", "time_to_first_token"), ("ITL", "inter_token_latency"), ("step", "step_time")):
        values = quantiles(getattr(base, name) if base else None, getattr(now, name), (0.5, 0.95))
        found.append((words, _pair(values)))
    span = ("since", "start") if base is None else ("in", f"{now.time - before.time:.0f} s")
    return _named("p50 / p95", [*found, span])


def _named(title: str, figures: list[tuple[str, str]]) -> Text:
    """A line of figures after their names."""
    parts: list[tuple[str, str] | str] = [(f"{title:<10}", "bold")]
    for number, (words, value) in enumerate(figures):
        parts += ["  " if number else "", (f"{words} ", "dim"), value]
    return _line(*parts)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _pair(values: list[float] | None) -> str:
    """Two numbers of seconds, with a unit after the first only where it is another one."""
    if values is None:
        return "-"
    (low, low_unit), (high, high_unit) = ((f"{v:.2f}", "s") if v >= 1 else (f"{v * 1e3:.{int(v < 0.01)}f}", "ms") for v in values)
    return f"{low} / {high} {high_unit}" if low_unit == high_unit else f"{low} {low_unit} / {high} {high_unit}"


def _pages(monitor: Monitor, look: Look) -> Iterator[Text]:
    """How many pages are of each kind, and where: a cell stands for the kind that most of its pages have."""
    total = len(monitor.kinds)
    counts = [monitor.kinds.count(kind) for kind in (FREE, CACHED, OWNED, SHARED)]
    glyphs = ASCII_GLYPHS if look.ascii_only else GLYPHS
    used = counts[OWNED] + counts[SHARED]
    words = f"{used:,} of {total:,} pages in use ({used / max(1, total):.0%})  "
    ratio = f"multi-head: {monitor.history[-1].multi_head_ratio:g} times the bytes"
    yield _line((f"{'KV cache':<10}", "bold"), words, (ratio, "dim"))
    num_lines = 4 if look.height is None else max(1, min(8, look.height // 7))
    pages = max(1, -(-total // (look.width * num_lines)))
    cells = [_cell(monitor, glyphs, first, pages) for first in range(0, total, pages)]
    for first in range(0, len(cells), look.width):
        yield _line(*cells[first : first + look.width])
    names = zip((OWNED, SHARED, CACHED, FREE), ("one sequence", "shared", "prefix", "free"), strict=True)
    legend = "  ".join(f"{glyphs[kind]} {name} {counts[kind]:,}" for kind, name in names)
    yield _line((legend + (f"  1 cell: {pages} pages" if pages > 1 else ""), "dim"))


def _cell(monitor: Monitor, glyphs: str, first: int, pages: int) -> tuple[str, str]:
    """A cell of the map, and its style."""
    kinds = monitor.kinds[first : first + pages]
    kind = max((OWNED, SHARED, CACHED, FREE), key=kinds.count)
    owner = monitor.owners[first + kinds.index(kind)]
    return glyphs[kind], _owner_style(owner) if kind == OWNED else STYLES[kind]


def _owner_style(owner: int) -> str:
    return OWNER_STYLES[owner % len(OWNER_STYLES)]


def _table(monitor: Monitor, look: Look, room: int | None) -> RenderableType:
    """The open sequences, as many as there is room for."""
    rows = sorted(monitor.sequences.values(), key=lambda row: (SORTS[look.sort][1](monitor, row), row.id), reverse=look.is_reversed)
    shown = rows if room is None or len(rows) <= room else rows[: room - 1]
    table = Table(box=box.ASCII if look.ascii_only else box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("id", no_wrap=True, justify="right")
    if look.width >= WIDE:
        table.add_column("request", no_wrap=True, max_width=MAX_NAME)
    table.add_column("state", no_wrap=True)
    for heading in ("prompt", "cached", "computed", "output", "tokens/s", "pages", "preempt"):
        table.add_column(heading, no_wrap=True, justify="right")
    bars = ASCII_BARS if look.ascii_only else BARS
    if look.width >= WIDEST:
        table.add_column("  ".join(map(" ".join, zip(bars, BAR_WORDS, strict=True))), no_wrap=True, ratio=1)
    longest = max((row.num_prompt + row.num_output for row in rows), default=1)
    for row in shown:
        bar = [_bar(row, bars, (look.width - BESIDE_BAR) / longest)] if look.width >= WIDEST else []
        table.add_row(*_cells(monitor, row, look), *bar)
    if not rows:
        return Group(table, Text("no open requests", "dim"))
    more = len(rows) - len(shown)
    return Group(table, Text(f"and {more} more", "dim")) if more else table


def _cells(monitor: Monitor, row: Row, look: Look) -> Iterator[Text]:
    """The cells of one sequence."""
    yield Text(str(row.id), _owner_style(row.id))
    if look.width >= WIDE:
        yield Text(printable(row.request), overflow="ellipsis")
    # The last output token's K/V are stored by the next step. After a crash or a preemption all of them are computed again.
    prefill = row.state == "running" and row.num_computed < row.num_prompt + max(0, row.num_output - 1)
    yield Text("prefill" if prefill else printable(row.state), STATE_STYLES.get(row.state, ""))
    speed = monitor.tokens_per_second(row)
    for number in (row.num_prompt, row.num_cached, row.num_computed, row.num_output):
        yield Text(f"{number:,}")
    yield Text("-" if speed is None else _number(speed))
    yield Text(f"{row.num_pages:,}")
    yield Text(str(row.num_preemptions), "red" if row.num_preemptions else "dim")


def _bar(row: Row, bars: str, scale: float) -> Text:
    """The tokens of a sequence, by where their keys and values are from."""
    cached = min(row.num_cached, row.num_computed)
    ends = cached, min(row.num_computed, row.num_prompt), row.num_computed, row.num_prompt + row.num_output
    text, place = Text(no_wrap=True), 0
    for letter, end, style in zip(bars, ends, ("blue", _owner_style(row.id), _owner_style(row.id), "dim"), strict=True):
        text.append(letter * (round(end * scale) - place), style)
        place = max(place, round(end * scale))
    return text


def _keys(look: Look) -> Text:
    """The keys, with the one that rows are sorted by."""
    parts: list[tuple[str, str] | str] = [("q", "bold"), (":quit  sort  ", "dim")]
    for key, (words, _) in SORTS.items():
        parts += [(key, "bold"), (f":{words}", "reverse" if key == look.sort else "dim"), " "]
    return _line(*parts, " ", ("r", "bold"), (":reverse", "reverse" if look.is_reversed else "dim"))
