"""Arrivals: wakes the streams that something has come for, all together once the event loop has
read what the engine sent.

So a step wakes the loop once, and a stream once, however many tokens came for it. What streams then
have to write is written when all of a slice have been woken: a write wakes a client, which may take
the processor. Invariant: every function added is called once, and other work of the event loop runs
after at most SLICE_SECONDS of calls and the call under way. It knows nothing of streams.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

SLICE_SECONDS = 0.01
Write = Callable[[], object]
Wake = Callable[[], Write | None]
"""Takes what has come for a stream, and returns what writes it, which is called when the other
streams of a slice have been woken."""
log = logging.getLogger("onehead.api")


class Arrivals:
    """Functions to be called soon, in the order in which they were added."""

    def __init__(self) -> None:
        self._due: deque[Wake] = deque()
        self._is_scheduled = False

    def add(self, wake: Wake) -> None:
        """Calls `wake` soon, from the event loop."""
        self._due.append(wake)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        end, writes = time.monotonic() + SLICE_SECONDS, list[Write]()
        while self._due:
            if (write := _call(self._due.popleft())) is not None:
                writes.append(write)
            if self._due and time.monotonic() > end:
                self._schedule()
                break
        for write in writes:
            _call(write)


def _call(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # The others belong to other requests.
        log.exception("what came for a stream could not be handled")
        return None
