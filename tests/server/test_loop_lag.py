"""How long the event loop stands still, and what is named as the reason."""

import asyncio
import logging
import signal
import time
import types
from collections.abc import Iterator

import pytest

from server import loop_lag
from server.loop_lag import LOGGED_SECONDS, NUM_SECONDS, LoopLag


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.SelectorEventLoop()
    yield loop
    loop.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes only in a test's words."""
    now = [100.0]
    monkeypatch.setattr(loop_lag, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGPROF)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, handler)


def test_the_longest_turn_of_the_last_seconds_is_told(
    clock: list[float], loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    with LoopLag() as lag:
        lag.select(0)
        clock[0] += 5.0  # Not measured yet.
        lag.start(loop)
        for busy in (0.0, 0.03, 0.01):
            lag.select(0)
            clock[0] += busy
        lag.select(0)
        assert lag.longest() == pytest.approx(0.03) and not caplog.records
        clock[0] += NUM_SECONDS + 1  # A long turn, which has not ended.
        assert lag.longest() == 0.0


def test_waiting_is_no_lag(clock: list[float], loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopLag() as lag:
        lag.start(loop)
        lag.select(0)

        def wait(self: LoopLag, timeout: float | None = None) -> list[object]:
            clock[0] += 3.0
            return []

        monkeypatch.setattr(LoopLag.__mro__[1], "select", wait)
        lag.select(3.0)
        lag.select(3.0)
        assert lag.longest() == 0.0


def test_a_stall_is_a_line_that_names_the_task(
    clock: list[float], loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asyncio, "current_task", lambda of: types.SimpleNamespace(get_name=lambda: "POST '/infill'"))
    with LoopLag() as lag, caplog.at_level(logging.WARNING):
        lag.start(loop)
        lag.select(0)
        clock[0] += 0.25
        lag.select(0)
        assert "stood still for 0.25 s, in no request" in caplog.text
        lag._look()
        clock[0] += 0.3
        lag.select(0)
        assert "stood still for 0.30 s, in POST '/infill'" in caplog.text
        clock[0] += 0.2
        lag.select(0)  # What was seen in the turn before is not named again.
        assert "stood still for 0.20 s, in no request" in caplog.text


def test_a_loop_with_it_names_a_route_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    async def block() -> None:
        lag.start(asyncio.get_running_loop())
        await asyncio.sleep(0.01)
        end = time.process_time() + 3 * LOGGED_SECONDS
        while time.process_time() < end:
            pass
        await asyncio.sleep(0)

    lag = LoopLag()
    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(lag)) as runner:
        runner.run(asyncio.wait_for(named(block()), 5.0))
        assert lag.longest() >= 3 * LOGGED_SECONDS
    assert "in POST '/generate'" in caplog.text


async def named(coroutine: object) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.set_name("POST '/generate'")
    await coroutine  # type: ignore[misc]
