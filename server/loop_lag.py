"""LoopLag: measures how late the event loop runs what is due, for a metric, and logs what had it stand still.

Invariant: a loop that stands still for LOGGED_SECONDS is one line of the log. It knows tasks by their names, which
server.http.front makes of their routes.
"""

import asyncio
import logging
import threading
import time
from collections import deque

BEAT_SECONDS = 0.05
LOGGED_SECONDS = 0.1
NUM_BEATS = 200
log = logging.getLogger("onehead")


class LoopLag:
    """Of one event loop, from its creation on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags = deque([0.0], NUM_BEATS)
        self._culprit = ""
        self._due = time.monotonic()
        self.beat()
        threading.Thread(target=self._watch, daemon=True, name="loop lag").start()

    def longest(self) -> float:
        """The longest lag of the last 10 s, in seconds."""
        return max(self._lags)

    def beat(self) -> None:
        """Called by the loop BEAT_SECONDS after the last call, or later if other work keeps it."""
        now = time.monotonic()
        self._lags.append(now - self._due)
        if self._lags[-1] > LOGGED_SECONDS:
            log.warning("the event loop stood still for %.2f s, in %s", self._lags[-1], self._culprit or "a call that was not seen")
        self._culprit = ""
        self._due = now + BEAT_SECONDS
        self._loop.call_at(self._due, self.beat)

    def _watch(self) -> None:
        """Looks, from a thread, which task runs while a beat is late. A call that keeps the GIL is seen only if Python code follows it."""
        while not self._loop.is_closed():
            time.sleep(BEAT_SECONDS)
            if time.monotonic() > self._due + BEAT_SECONDS and (task := asyncio.current_task(self._loop)) is not None:
                self._culprit = task.get_name()
