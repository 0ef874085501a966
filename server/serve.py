"""`onehead serve`: one process with the HTTP side, one engine process behind it, from start to drained exit.

Invariant: the port is bound before the model is loaded, and the engine is gone when this returns.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version

import msgspec
import uvicorn

from server import protocol
from server.api.app import create_app
from server.config import EngineSettings, ServeSettings, cpu_threads
from server.errors import ResourceError
from server.generation import Generation
from server.hub import model_id
from server.metrics import Metrics
from server.supervisor import State, Supervisor
from server.text import TextCodec
from server.transport import EngineProcess

EXIT_STREAMS_CUT = 75
FLUSH_SECONDS = 1.0
ENGINE_EXIT_SECONDS = 5.0
log = logging.getLogger("onehead")


def start_message(settings: EngineSettings, codec: TextCodec) -> protocol.Start:
    """What an engine of these settings is told first."""
    engine, cache = settings.engine, settings.cache
    return protocol.Start(
        version=protocol.VERSION,
        model=str(settings.model),
        tokenizer=str(codec.path),
        largest_token_id=codec.largest_id,
        end_token_ids=list(codec.end_token_ids),
        device=engine.device,
        dtype=engine.dtype,
        quantization=engine.quantization,
        threads=cpu_threads(engine.threads),
        max_context=engine.max_context,
        max_running=engine.max_running,
        step_tokens=engine.step_tokens,
        page_size=cache.page_size,
        pages=cache.pages,
        memory=cache.memory,
        serve_pooled=engine.serve_pooled,
    )


class Running:
    """A supervised engine with a Generation over it, inside an event loop."""

    def __init__(self, settings: EngineSettings, max_waiting: int, grammar_timeout: float = 2.0) -> None:
        codec = TextCodec(settings.model)
        self._start = start_message(settings, codec)
        self._changed = asyncio.Event()
        self._process: EngineProcess | None = None
        self.metrics = Metrics()
        self.supervisor = Supervisor(self._spawn, self._on_state, self._on_step)
        max_open = settings.engine.max_running + max_waiting
        self.generation = Generation(self.supervisor, codec, self.metrics, max_open, grammar_timeout)

    def _spawn(self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]) -> EngineProcess:
        ready = self.supervisor.ready
        # A replacement gets the pool that requests were admitted to, however much memory is free now.
        start = self._start if ready is None else msgspec.structs.replace(self._start, pages=ready.num_pages)
        self._process = EngineProcess(start, on_message, on_exit)
        return self._process

    def _on_state(self, state: State) -> None:
        log.info("engine: %s %s", state.value, self.supervisor.reason)
        if state is State.READY and self.supervisor.ready is not None:
            self.metrics.loaded(self.supervisor.ready)
        if state is State.STARTING:
            self.metrics.engine_restarts.inc()
            self.metrics.idle()
        self._changed.set()

    def _on_step(self, step: protocol.Tokens) -> None:
        self.generation.heard(step)

    async def until(self, *states: State) -> State:
        """Waits for one of these states, or a final one."""
        final = (State.STOPPED, State.REFUSED, State.GAVE_UP)
        while self.supervisor.state not in (*states, *final):
            self._changed.clear()
            await self._changed.wait()
        return self.supervisor.state

    async def close(self) -> None:
        """Ends the engine, politely first."""
        self.supervisor.stop()
        if self._process is not None:
            await self._process.ended(ENGINE_EXIT_SECONDS)


@contextlib.asynccontextmanager
async def running(settings: EngineSettings, max_waiting: int = 0) -> AsyncIterator[Running]:
    """A loaded engine. Raises ConfigurationError or EngineGaveUp where it cannot be had."""
    engine = Running(settings, max_waiting)
    engine.supervisor.start()
    try:
        await engine.until(State.READY)
        engine.generation.raise_if_over()
        yield engine
    finally:
        await engine.close()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self, patience: float) -> None:
        """Stops listening, and aborts whatever connection is still there in `patience` seconds: one that never sends the rest of its
        request, or never reads its answer, must not keep the process.
        """
        self.should_exit = True
        asyncio.get_running_loop().call_later(patience, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ResourceError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host") from None
    return listener


class Drain:
    """Signals to a clean end: the first lets running streams finish, a second ends them with an error event."""

    def __init__(self, http: HttpServer, engine: Running, timeout: float) -> None:
        self.http = http
        self.engine = engine
        self.timeout = timeout
        self.cut = False
        self._task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        if self._task is None:
            self.engine.generation.draining = True
            self._task = asyncio.create_task(self._drain())
        else:
            self._finish(FLUSH_SECONDS)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout
        while self.engine.supervisor.open and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self._finish(max(FLUSH_SECONDS, deadline - loop.time()))

    def _finish(self, patience: float) -> None:
        """Ends what is open, and gives connections `patience` seconds to take what was written to them."""
        self.cut = self.cut or bool(self.engine.supervisor.open)
        self.engine.supervisor.stop()
        self.http.end(patience)


async def serve(settings: ServeSettings) -> int:
    """Serves until a signal or the engine's end; the exit code. Raises OneheadError for what prevents it."""
    with bind(settings.host, settings.port) as listener:
        engine = Running(settings, settings.server.max_waiting, settings.server.grammar_timeout)
        name = settings.server.model_name or model_id(settings.model)
        app = create_app(engine.generation, settings.server, name, version("onehead"))
        engine.supervisor.start()
        config = uvicorn.Config(app, log_level=settings.server.log_level, access_log=False, lifespan="off", timeout_keep_alive=30)
        http = HttpServer(config)
        drain = Drain(http, engine, settings.server.drain_timeout)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain.on_signal)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            await _announce(engine, name, listener)
            await engine.until(State.STOPPED)
            engine.generation.raise_if_over()
        finally:
            http.end(FLUSH_SECONDS)
            await engine.close()
            await serving
    return EXIT_STREAMS_CUT if drain.cut else 0


async def _announce(engine: Running, name: str, listener: socket.socket) -> None:
    """Waits for the engine and prints the one line that says where it is served, after one on what."""
    if await engine.until(State.READY) is not State.READY:
        return
    ready = engine.generation.ready
    host, port = listener.getsockname()[:2]
    weights = ready.dtype if ready.quantization == "none" else ready.quantization
    what = (
        f"{name}: {ready.model_type}, {ready.num_parameters / 1e6:.1f}M parameters in {weights} on {ready.device}; "
        f"cache {ready.kv_bytes_per_token} bytes per token, {ready.num_pages} pages of {ready.page_size}, "
        f"up to {ready.capacity} tokens a sequence"
    )
    with contextlib.suppress(OSError):  # Whoever started us may have closed the pipe; that is no reason not to serve.
        print(what, file=sys.stderr)
        print(f"onehead serves {name} on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
