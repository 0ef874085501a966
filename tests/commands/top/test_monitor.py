"""What the events of GET /monitor say about a server."""

from typing import Any

import msgspec
import pytest

from commands.bench.client import ReplyError
from commands.top.monitor import Event, Histogram, Monitor, quantiles
from server.protocol import CACHED, FREE, OWNED, SHARED
from tests.support.fake_monitor import MadeUpEngine


def take(monitor: Monitor, name: str, data: Any) -> None:
    monitor.take(Event(name, msgspec.json.encode(data)))


def cells_of(engine: MadeUpEngine) -> list[tuple[int, int]]:
    """Kind and owner of each page."""
    found = [(FREE, -1)] * engine.num_pages
    for page in engine.cached:
        found[page] = CACHED, -1
    for id, pages in engine.pages.items():
        for page in pages:
            found[page] = OWNED, id
    return found


@pytest.mark.parametrize("joined_at", [0, 137])
def test_the_pages_are_the_engines_after_every_event(joined_at: int) -> None:
    engine, monitor = MadeUpEngine(num_pages=200), Monitor()
    for _ in range(joined_at):
        engine.advance()
    take(monitor, "cache", engine.whole())
    for _ in range(600):
        take(monitor, "cache", engine.advance())
        assert list(zip(monitor.kinds, monitor.owners, strict=True)) == cells_of(engine)
        assert monitor.sequences == engine.rows
    assert monitor.kinds.count(CACHED) and monitor.kinds.count(OWNED)


def test_a_run_of_pages_is_one_cell() -> None:
    engine, monitor = MadeUpEngine(num_pages=8), Monitor()
    take(monitor, "cache", engine.event(True, [2, 3, SHARED, 7, 0, 6, 1, CACHED, -1, 0], [], []))
    assert list(monitor.kinds) == [FREE, FREE, SHARED, SHARED, SHARED, FREE, CACHED, FREE]
    assert list(monitor.owners) == [-1, -1, 7, 7, 7, -1, -1, -1]


def test_changes_of_another_engine_wait_for_its_whole_event() -> None:
    engine, monitor = MadeUpEngine(num_pages=4), Monitor()
    take(monitor, "cache", engine.event(True, [0, 2, OWNED, 0, 0], [], []))
    engine.engine = 1
    take(monitor, "cache", engine.event(False, [3, 1, OWNED, 5, 0], [], []))
    assert list(monitor.kinds) == [OWNED, OWNED, FREE, FREE]
    take(monitor, "cache", engine.event(True, [1, 1, CACHED, -1, 0], [], []))
    take(monitor, "cache", engine.event(False, [3, 1, OWNED, 5, 0], [], []))
    assert list(monitor.kinds) == [FREE, CACHED, FREE, OWNED]


def test_changes_after_a_gap_wait_for_a_whole_event() -> None:
    engine, monitor = MadeUpEngine(num_pages=4), Monitor()
    take(monitor, "cache", engine.event(True, [0, 2, OWNED, 0, 0], [], []))
    engine.event(False, [1, 1, CACHED, -1, 0], [], [])  # Is lost.
    for _ in range(2):
        take(monitor, "cache", engine.event(False, [3, 1, OWNED, 5, 0], [], []))
        assert list(monitor.kinds) == [OWNED, OWNED, FREE, FREE]
    take(monitor, "cache", engine.event(True, [0, 1, OWNED, 0, 0], [], []))
    take(monitor, "cache", engine.event(False, [3, 1, OWNED, 5, 0], [], []))
    assert list(monitor.kinds) == [OWNED, FREE, FREE, OWNED]


def test_figures_that_come_twice_count_once() -> None:
    """A connection that is made again begins with the last ones."""
    engine, monitor = MadeUpEngine(), Monitor()
    take(monitor, "cache", engine.whole())
    for second in (0, 1, 1, 2):
        take(monitor, "stats", engine.stats(1000.0 + second))
    assert [stats.time for stats in monitor.history] == [1000.0, 1001.0, 1002.0]


def test_figures_of_a_server_that_loads_its_engine() -> None:
    engine, monitor = MadeUpEngine(), Monitor()
    for second in range(3):
        take(monitor, "stats", engine.stats(1000.0 + second, is_loading=True))
    take(monitor, "cache", engine.whole())
    assert monitor.status == "starting" and not monitor.is_complete
    take(monitor, "stats", engine.stats(1003.0))
    assert monitor.status == "ready" and monitor.is_complete


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("cache", {"engine": 0}),
        ("cache", MadeUpEngine(num_pages=4).event(True, [3, 2, OWNED, 0, 0], [], [])),
        ("cache", MadeUpEngine(num_pages=4).event(True, [3, 1, 9, 0, 0], [], [])),
        ("cache", MadeUpEngine(num_pages=4).event(True, [3, 1, OWNED], [], [])),
        ("stats", {"time": "noon"}),
    ],
)
def test_an_event_that_is_not_as_it_should_be_is_an_error(name: str, data: Any) -> None:
    with pytest.raises(ReplyError, match="an event of GET /monitor cannot be read"):
        take(Monitor(), name, data)


def test_events_of_other_names_are_left_out() -> None:
    take(Monitor(), "news", {"what": "ever"})


def histogram(*counts: int) -> Histogram:
    return Histogram([0.1, 1.0, 10.0], list(counts), 0.0)


def test_quantiles_are_those_of_the_values_in_between() -> None:
    assert quantiles(histogram(50, 0, 0, 0), histogram(50, 10, 0, 0), (0.0, 0.5, 1.0)) == pytest.approx([0.1, 0.55, 1.0])
    assert quantiles(None, histogram(10, 0, 10, 0), (0.25, 0.5, 0.75)) == pytest.approx([0.05, 0.1, 5.5])
    assert quantiles(None, histogram(0, 0, 0, 3), (0.5, 0.99)) == [10.0, 10.0]
    assert quantiles(histogram(1, 2, 3, 4), histogram(1, 2, 3, 4), (0.5,)) is None


def test_rates_are_those_of_the_last_seconds() -> None:
    engine, monitor = MadeUpEngine(), Monitor()
    take(monitor, "cache", engine.whole())
    for second in range(100):
        take(monitor, "stats", engine.stats(1000.0 + second))
        engine.counts["generation_tokens"] += 70 if second < 50 else 700
    before, now = monitor.span(5.0)
    assert now.time - before.time == 5.0
    assert now.totals.generation_tokens - before.totals.generation_tokens == 3500
    assert len(monitor.history) == 61


def test_the_speed_of_a_sequence_is_known_from_its_second_figures_on() -> None:
    engine, monitor = MadeUpEngine(num_running=1), Monitor()
    take(monitor, "cache", engine.advance() | {"whole": True})
    row = monitor.sequences[0]
    take(monitor, "stats", engine.stats(1000.0))
    assert monitor.tokens_per_second(row) is None and not monitor.is_complete
    for second in (1, 2, 3):
        engine.rows[0].num_output += 10 * second
        take(monitor, "cache", engine.event(False, [], list(engine.rows.values()), []))
        take(monitor, "stats", engine.stats(1000.0 + second))
    assert monitor.tokens_per_second(row) == (20 + 30) / 2
    assert monitor.is_complete


def test_figures_of_a_server_that_began_anew_are_not_compared() -> None:
    monitor = Monitor()
    old = MadeUpEngine()
    old.counts["generation_tokens"] = 1000
    take(monitor, "stats", old.stats(1000.0))
    take(monitor, "stats", MadeUpEngine().stats(1010.0))
    assert [stats.time for stats in monitor.history] == [1010.0]
