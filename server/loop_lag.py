"""LoopLag: measures for how long the event loop lets everything wait, for a metric, and logs what had it stand still.

It is the selector of the loop, and so sees when a turn of the loop's work begins and ends. A timer of the processor's time looks which task
runs, so that an idle loop costs nothing. Invariant: a turn of LOGGED_SECONDS is one line of the log. It knows tasks by their names, which
server.http.front makes of their routes.
"""

import asyncio
import logging
import selectors
import signal
import time
from collections import deque

LOGGED_SECONDS = 0.1
LOOK_SECONDS = 0.04
"""Processor time of this process from one look to the next."""
NUM_SECONDS = 10
UNSEEN = "no request: other processes may have had the processors"
log = logging.getLogger("onehead")


class LoopLag(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Of one event loop. It measures nothing before `start`."""

    def __init__(self) -> None:
        super().__init__()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lags = deque([(0, 0.0)], NUM_SECONDS)
        """The longest turn of each of the last seconds that had any."""
        self._began: float | None = None
        """When the turn began that is under way."""
        self._culprit = ""
        """The task that was seen in it."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measures from now on. `loop`: whose selector this is."""
        self._loop, self._began = loop, None
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, LOOK_SECONDS, LOOK_SECONDS)

    def close(self) -> None:
        """As every selector; the timer's signal must not meet a process that has no handler for it."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        super().close()

    def longest(self) -> float:
        """The longest turn of the last 10 s, in seconds."""
        since = time.monotonic() - NUM_SECONDS
        return max((lag for second, lag in self._lags if second >= since), default=0.0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As every selector: called by the loop when a turn has ended, it returns when the next one begins."""
        if self._began is not None:
            self._end_turn(self._began, time.monotonic())
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        if self._loop is not None:
            self._began, self._culprit = time.monotonic(), ""
        return ready

    def _end_turn(self, began: float, now: float) -> None:
        self._began, lag = None, now - began
        second, longest = self._lags[-1]
        if int(now) != second:
            self._lags.append((int(now), lag))
        elif lag > longest:
            self._lags[-1] = second, lag
        if lag > LOGGED_SECONDS:
            log.warning("the event loop stood still for %.2f s, in %s", lag, self._culprit or UNSEEN)

    def _look(self, *_: object) -> None:
        """Notes which task runs. In a call that does not return to Python code it is called afterwards."""
        if self._began is not None and (task := asyncio.current_task(self._loop)) is not None:
            self._culprit = task.get_name()
