"""Frames of `onehead top`."""

import io

import msgspec
import pytest
from rich.console import Console

from commands.top.monitor import Event, Monitor
from commands.top.view import SORTS, Look, frame
from tests.support.fake_monitor import MadeUpEngine

URL = "http://127.0.0.1:8000"


@pytest.fixture
def engine() -> MadeUpEngine:
    return MadeUpEngine(num_running=30)


def monitor_of(engine: MadeUpEngine, num_steps: int = 300) -> Monitor:
    """What there is to know after so many steps, a tenth of a second each."""
    monitor = Monitor()
    monitor.take(Event("cache", msgspec.json.encode(engine.whole())))
    for step in range(num_steps):
        monitor.take(Event("cache", msgspec.json.encode(engine.advance())))
        if step % 10 == 9:
            monitor.take(Event("stats", msgspec.json.encode(engine.stats(1000.0 + step / 10))))
    return monitor


def drawn(monitor: Monitor, look: Look) -> list[str]:
    """The lines of a frame."""
    output = io.StringIO()
    Console(width=look.width, file=output, force_terminal=False).print(frame(monitor, look))
    return output.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 60), (120, 30), (160, 50), (200, 50), (200, 12), (300, 80)])
def test_a_frame_fits_its_terminal(width: int, height: int, engine: MadeUpEngine) -> None:
    lines = drawn(monitor_of(engine), Look(URL, width, height))
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 20)
    text = "\n".join(lines)
    for words in ("pretrained on cpu", "running 30", "waiting 3", "TTFT", "pages in use", "multi-head: 4 times", "preempt", "r:reverse"):
        assert words in text, words
    assert ("and " in lines[-2] and " more" in lines[-2]) or height >= 50
    assert ("req-000" in text) == (width >= 120)
    assert ("━ prompt" in text) == (width >= 160)


def test_nothing_is_cut_at_80_columns(engine: MadeUpEngine) -> None:
    engine.num_pages = 512
    assert not [line for line in drawn(monitor_of(engine), Look(URL, 80, 40)) if "…" in line]


def test_a_frame_for_scripts_has_every_row_and_no_keys(engine: MadeUpEngine) -> None:
    monitor = monitor_of(engine)
    lines = drawn(monitor, Look(URL, 120))
    assert sum("req-" in line for line in lines) == len(monitor.sequences) == 33
    assert not [line for line in lines if "quit" in line]
    assert "since start" in lines[3]


@pytest.mark.parametrize("num_pages", [1, 79, 80, 512, 65536])
def test_the_map_has_a_cell_for_every_page_or_some(num_pages: int) -> None:
    lines = drawn(monitor_of(MadeUpEngine(num_pages, num_running=1), 30), Look(URL, 80, 40))
    cells = "".join(line for line in lines if set(line.rstrip()) <= set("█▓░·") and line.strip())
    pages = -(-num_pages // len(cells.rstrip()))
    assert len(cells.rstrip()) <= 5 * 80
    assert ("1 cell:" in "\n".join(lines)) == (pages > 1)


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_rows_are_sorted_as_asked(sort: str, is_reversed: bool, engine: MadeUpEngine) -> None:
    monitor = monitor_of(engine)
    list(monitor.sequences.values())[3].num_preemptions = 2
    words = [line.split() for line in drawn(monitor, Look(URL, 80, 90, sort=sort, is_reversed=is_reversed))]
    values = [row[{"i": 0, "s": 1, "o": 5, "t": 6, "p": 7, "x": 8}[sort]] for row in words if len(row) == 9 and row[0].isdigit()]
    assert len(values) == 33
    if sort == "s":
        assert values[-1 if is_reversed else 0] == "waiting"
        return
    numbers = [0.0 if value == "-" else float(value.replace(",", "")) for value in values]
    assert numbers == sorted(numbers, reverse=(sort != "i") != is_reversed)


def test_texts_from_elsewhere_do_nothing_to_the_terminal(engine: MadeUpEngine) -> None:
    monitor = monitor_of(engine)
    next(iter(monitor.sequences.values())).request = "\x1b[2J[bold]\x07\u202ename"
    monitor.history[-1].model = "\x1b]0;title\x07"
    output = io.StringIO()
    Console(width=200, file=output, force_terminal=True, color_system=None).print(frame(monitor, Look(URL, 200, 50)))
    text = output.getvalue()
    assert "?[2J[bold]??name" in text and "?]0;title?" in text
    assert "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text and "\u202e" not in text


def test_a_terminal_without_utf8_gets_ascii(engine: MadeUpEngine) -> None:
    for width in (80, 200):
        assert "\n".join(drawn(monitor_of(engine), Look(URL, width, 50, ascii_only=True))).isascii()


def test_a_notice_takes_the_place_of_the_status(engine: MadeUpEngine) -> None:
    first, *rest = drawn(monitor_of(engine), Look(URL, 80, 50, notice="connection lost, trying again: no route"))
    assert "connection lost, trying again: no route" in first
    assert any("pages in use" in line for line in rest)


def test_before_the_first_events_it_says_so() -> None:
    assert drawn(Monitor(), Look(URL, 80, 24)) == [f"onehead top  {URL}", "status: unknown; waiting for the state of the KV cache"]


def test_a_sequence_that_is_computed_again_is_in_prefill(engine: MadeUpEngine) -> None:
    monitor = monitor_of(engine)
    first, second, *_ = monitor.sequences.values()
    first.num_computed, second.num_computed = first.num_prompt + first.num_output - 2, second.num_prompt + second.num_output - 1
    lines = [line.split()[:2] for line in drawn(monitor, Look(URL, 80, 50))]
    assert [str(first.id), "prefill"] in lines and [str(second.id), "running"] in lines


def test_an_idle_server_has_no_rows() -> None:
    engine, monitor = MadeUpEngine(), Monitor()
    monitor.take(Event("cache", msgspec.json.encode(engine.whole())))
    monitor.take(Event("stats", msgspec.json.encode(engine.stats(1000.0))))
    assert "no open requests" in "\n".join(drawn(monitor, Look(URL, 80, 24)))
