"""Drain: graceful shutdown on a signal.

The first signal refuses new requests and lets open ones finish; a second one ends them with an error event. What follows, in order:
`Drain._finish` stops the supervisor and the HTTP server, which aborts connections with unsent bytes after a time; then `serve` closes the
engine process. Invariant: bytes written to a client get time to arrive, and no client can keep the process running.
"""

import asyncio
import logging
import signal
from collections.abc import Callable

from server.generation.engine_client import EngineClient

log = logging.getLogger("onehead")

FLUSH_SECONDS = 1.0
"""Time that clients get at least to receive what was written, before their connections are aborted."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Drain:
    """Handles signals. `end` ends the HTTP server within a time; `grace`: seconds to keep listening after SIGTERM, until load balancers
    have noticed that /ready fails.
    """

    def __init__(self, end: Callable[[float], None], client: EngineClient, timeout: float, grace: float) -> None:
        self.end = end
        self.client = client
        self.timeout = timeout
        self.grace = grace
        self.cut = False
        """Whether open requests were ended early."""
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        if self._task is None:
            self.client.drain()
            log.info(
                "draining for up to %g s: %d sequences are open; a second signal ends them",
                self.timeout,
                self.client.admission.num_open,
            )
            # Ctrl-C in a terminal skips the grace period.
            self._task = asyncio.create_task(self._drain(0.0 if number == signal.SIGINT else self.grace))
        else:
            self._finish(FLUSH_SECONDS)

    async def _drain(self, grace: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + self.timeout
        while (self.client.admission.num_open or loop.time() < began + grace) and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self._finish(max(FLUSH_SECONDS, deadline - loop.time()))

    def _finish(self, timeout: float) -> None:
        """Ends open requests, and gives connections `timeout` seconds to receive what was written."""
        self.cut = self.cut or bool(self.client.admission.num_open)
        self.client.supervisor.stop()
        self.end(timeout)
