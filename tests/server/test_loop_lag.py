"""How late the event loop is, and what is named as the reason."""

import asyncio
import logging
import types
from typing import Any, cast

import pytest

from server import loop_lag
from server.loop_lag import BEAT_SECONDS, NUM_BEATS, LoopLag


class Loop:
    """An event loop that runs nothing; `looks` is how often the watching thread looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.due = 0.0

    def call_at(self, when: float, callback: Any) -> None:
        self.due = when

    def is_closed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes only in a test's words; threads run where they are started."""
    now = [100.0]
    monkeypatch.setattr(loop_lag, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    threads = types.SimpleNamespace(Thread=lambda target, **_: types.SimpleNamespace(start=target))
    monkeypatch.setattr(loop_lag, "threading", threads)
    return now


def lag_of(loop: Loop) -> LoopLag:
    return LoopLag(cast(asyncio.AbstractEventLoop, loop))


def test_the_longest_lag_of_the_last_beats_is_told(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(0)
    lag = lag_of(loop)
    for late in (0.0, 0.03, 0.01):
        clock[0] = loop.due + late
        lag.beat()
    assert lag.longest() == pytest.approx(0.03) and not caplog.records
    for _ in range(NUM_BEATS):
        clock[0] = loop.due
        lag.beat()
    assert lag.longest() == 0.0


def test_a_stall_is_a_line_that_names_the_task(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(0)
    lag = lag_of(loop)
    monkeypatch.setattr(asyncio, "current_task", lambda of: types.SimpleNamespace(get_name=lambda: "POST '/infill'"))
    clock[0], loop.looks = loop.due + BEAT_SECONDS, 1
    lag._watch()  # Not late enough to look.
    with caplog.at_level(logging.WARNING):
        clock[0] = loop.due + 0.25
        lag.beat()
        assert "stood still for 0.25 s, in a call that was not seen" in caplog.text
        clock[0], loop.looks = loop.due + 0.3, 1
        lag._watch()
        lag.beat()
    assert "stood still for 0.30 s, in POST '/infill'" in caplog.text
