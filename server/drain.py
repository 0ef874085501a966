"""HttpServer and Drain: graceful shutdown on a signal.

The first signal refuses new requests and lets open ones finish; a second one ends them with an error event. What follows, in order:
`Drain._finish` stops the supervisor and the HTTP server, which aborts connections with unsent bytes after a time; then `serve` closes the
engine process. Invariant: bytes written to a client get time to arrive, and no client can keep the process running.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

import uvicorn

from server.generation.generation import Generation

log = logging.getLogger("onehead")

FLUSH_SECONDS = 1.0
"""Time that clients get at least to receive what was written, before their connections are aborted."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop without draining, and without its ten wake-ups a second."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    cut = False
    """Whether a connection was aborted with unsent bytes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.get_running_loop().create_future()

    async def main_loop(self) -> None:
        """Runs until the end. uvicorn's own looks ten times a second whether it has come."""
        while not await self.on_tick(0):  # It sets the date that responses bear.
            await asyncio.wait({self._ending}, timeout=1.0)

    def end(self, timeout: float) -> None:
        """Stops listening, and after `timeout` seconds aborts the connections that are still open."""
        self.should_exit = True
        if not self._ending.done():
            self._ending.set_result(None)
        asyncio.get_running_loop().call_later(timeout, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            self.cut = self.cut or connection.transport.get_write_buffer_size() > 0
            connection.transport.abort()


class Drain:
    """Handles signals. `grace`: seconds to keep listening after SIGTERM, until load balancers have noticed that /ready fails."""

    def __init__(self, http: HttpServer, generation: Generation, timeout: float, grace: float) -> None:
        self.http = http
        self.generation = generation
        self.timeout = timeout
        self.grace = grace
        self.cut = False
        """Whether open requests were ended early."""
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        if self._task is None:
            self.generation.admission.draining = True
            log.info(
                "draining for up to %g s: %d sequences are open; a second signal ends them",
                self.timeout,
                self.generation.admission.num_open,
            )
            # Ctrl-C in a terminal skips the grace period.
            self._task = asyncio.create_task(self._drain(0.0 if number == signal.SIGINT else self.grace))
        else:
            self._finish(FLUSH_SECONDS)

    async def _drain(self, grace: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + self.timeout
        while (self.generation.admission.num_open or loop.time() < began + grace) and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self._finish(max(FLUSH_SECONDS, deadline - loop.time()))

    def _finish(self, timeout: float) -> None:
        """Ends open requests, and gives connections `timeout` seconds to receive what was written."""
        self.cut = self.cut or bool(self.generation.admission.num_open)
        self.generation.supervisor.stop()
        self.http.end(timeout)
