"""Arrivals: tells streams that something has come for them, all together once the event loop has read what the engine sent.

So a step wakes the loop once, and a stream once, however many tokens came for it. Invariant: every function added is called once, and other
work of the event loop runs after at most SLICE_SECONDS of calls and the call under way. It knows nothing of streams.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

SLICE_SECONDS = 0.01
log = logging.getLogger("onehead.api")


class Arrivals:
    """Functions to be called soon, in the order in which they were added."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, tell: Callable[[], None]) -> None:
        """Calls `tell` soon, from the event loop."""
        self._due.append(tell)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        end = time.monotonic() + SLICE_SECONDS
        while self._due:
            tell = self._due.popleft()
            try:
                tell()
            except Exception:  # The others belong to other requests.
                log.exception("what came for a stream could not be handled")
            if self._due and time.monotonic() > end:
                return self._schedule()
