"""HttpServer and Drain: from a signal to a clean end.

The first signal lets running streams finish while new work is refused, a second ends them with an error event. Invariant: whatever was
written to a client gets its time to arrive, and no client can keep the process.
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
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    cut = False
    """Whether a connection was closed over an answer that had not left."""

    def end(self, patience: float) -> None:
        """Stops listening, and aborts whatever connection is still there in `patience` seconds: one that never sends the rest of its
        request, or never reads its answer, must not keep the process.
        """
        self.should_exit = True
        asyncio.get_running_loop().call_later(patience, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            self.cut = self.cut or connection.transport.get_write_buffer_size() > 0
            connection.transport.abort()


class Drain:
    """What signals do. `grace`: seconds for which a server that is told to go still listens, as a balancer needs a while to notice."""

    def __init__(self, http: HttpServer, generation: Generation, timeout: float, grace: float) -> None:
        self.http = http
        self.generation = generation
        self.timeout = timeout
        self.grace = grace
        self.cut = False
        """Whether streams were ended before their time."""
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        if self._task is None:
            self.generation.admission.draining = True
            log.info(
                "draining for up to %g s: %d requests are open; a second signal ends them", self.timeout, self.generation.admission.num_open
            )
            # Whoever interrupts at a terminal waits for nobody's balancer.
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

    def _finish(self, patience: float) -> None:
        """Ends what is open, and gives connections `patience` seconds to take what was written to them."""
        self.cut = self.cut or bool(self.generation.admission.num_open)
        self.generation.supervisor.stop()
        self.http.end(patience)
