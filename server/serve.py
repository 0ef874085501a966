"""`onehead serve`: one process with the HTTP side, one engine process behind it, from start to drained exit.

Invariant: the port is bound before the model is loaded, and the engine is gone when this returns.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import math
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
import uvicorn
from prometheus_client import ProcessCollector

from server import logs, protocol
from server.config import EngineSettings, ServerSection, ServeSettings
from server.drain import FLUSH_SECONDS, SIGNALS, Drain, HttpServer
from server.errors import ResourceError
from server.generation.admission import Bounds
from server.generation.generation import Generation
from server.http.app import create_app, with_cors
from server.http.connection import connection_class
from server.http.front import FrontDoor
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention, StreamStore
from server.hub.download import model_id
from server.load_log import LoadLog
from server.metrics import Metrics
from server.supervision.processors import available_processors, engine_threads
from server.supervision.supervisor import State, Supervisor, Timeouts
from server.supervision.transport import EngineProcess
from server.text.codec import TextCodec

EXIT_STREAMS_CUT = 75
ENGINE_EXIT_SECONDS = 5.0
TICK_SECONDS = 0.25
OUT_OF_FILES_SECONDS = 10.0
OTHER_FILES = 64
"""Files that the process has open besides its connections."""
log = logging.getLogger("onehead")


def start_message(settings: EngineSettings, codec: TextCodec, section: ServerSection) -> protocol.Start:
    """What an engine of these settings is told first."""
    cache = settings.cache
    return protocol.Start(
        **settings.engine.model_dump() | {"threads": engine_threads(settings.engine.threads)},  # The fields have the options' names.
        version=protocol.VERSION,
        model=str(settings.model),
        tokenizer=str(codec.path),
        largest_token_id=codec.largest_id,
        end_token_ids=list(codec.end_token_ids),
        cache_dtype=cache.dtype,
        page_size=cache.page_size,
        pages=cache.pages,
        memory=cache.memory,
        heartbeat_seconds=section.stall_after / 4,
        log_level=section.log_level,
        log_format=section.log_format,
    )


class Running:
    """A supervised engine with a Generation over it, inside an event loop."""

    def __init__(self, settings: EngineSettings, section: ServerSection, name: str = "") -> None:
        codec = TextCodec(settings.model)
        self._start = start_message(settings, codec, section)
        self._changed = asyncio.Event()
        self._process: EngineProcess | None = None
        self._spawned = 0
        self._died: float | None = None
        self._tick = min(TICK_SECONDS, section.stall_after / 10)
        self._watch: asyncio.Task[None] | None = None
        self.metrics = Metrics(name)
        ProcessCollector("onehead_engine", lambda: self._process.process.pid if self._process else 0, registry=self.metrics.registry)
        patience = Timeouts(section.stall_after, section.start_timeout, section.recovery_timeout)
        self.supervisor = Supervisor(self._spawn, self._on_state, self._on_news, patience)
        max_open = settings.engine.max_running + section.max_waiting
        bounds = Bounds(
            max_open,
            settings.engine.max_running,
            section.max_waiting_tokens,
            section.max_queue_wait,
            section.grammar_timeout,
            section.tokenize_timeout,
            section.open_objects,
        )
        self.generation = Generation(self.supervisor, codec, self.metrics, bounds, section.log_prompts)

    def start(self, *every_tick: Callable[[], None]) -> None:
        """Spawns the engine and begins to watch it; `every_tick` is called at intervals with it.

        Raises ResourceError or ConfigurationError.
        """
        try:
            self.supervisor.start()
        except OSError as error:
            raise ResourceError(f"no engine can be started: {error.strerror}") from None
        _ = self.generation.compiler  # Read while the engine loads: a request that had to wait for it would hold up all others.
        self._watch = asyncio.create_task(self._pass_time(every_tick))

    async def _pass_time(self, every_tick: tuple[Callable[[], None], ...]) -> None:
        """Tells the supervisor how time passes. What this process slept through itself is not counted as anybody's silence."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * self._tick), now
            calls: list[Callable[[], None]] = [partial(self.supervisor.tick, elapsed), *every_tick]
            for call in calls:
                try:
                    call()
                except Exception:  # Of one call: without the next ones nothing would be watched any more.
                    log.exception("what is done at intervals failed")

    def _spawn(self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]) -> EngineProcess:
        ready = self.supervisor.ready
        # A replacement gets the pool that requests were admitted to, however much memory is free now, on the device that began them.
        start = self._start if ready is None else msgspec.structs.replace(self._start, pages=ready.num_pages, device=ready.device)
        if self._spawned:
            self.metrics.engine_restarts.inc()
        self._spawned += 1
        self._process = EngineProcess(start, on_message, on_exit)
        return self._process

    def _on_state(self, state: State) -> None:
        log.info("engine: %s%s", self.supervisor.status, f" ({self.supervisor.reason})" if self.supervisor.reason else "")
        if state is State.READY and self.supervisor.ready is not None:
            self.metrics.loaded(self.supervisor.ready)
            if self._died is None and self.supervisor.ready.device == "cpu":
                _warn_of_threads(self._start.threads)
            if self._died is not None:
                seconds = time.monotonic() - self._died
                self.metrics.engine_recovery.observe(seconds)
                log.info("the engine was replaced in %.2f s", seconds)
            self._died = None
        if state is State.STARTING:
            self._died = time.monotonic()
            self.metrics.idle()
        self._changed.set()

    def _on_news(self, news: protocol.Tokens | protocol.Started) -> None:
        self.generation.on_engine_event(news)

    def count(self, sink: logs.Sink, store: StreamStore) -> None:
        """Metrics of what happens in no request."""
        self.metrics.streams_detached.set(store.num_detached)
        self.metrics.resume_bytes.set(store.num_bytes)
        self.metrics.reach(self.metrics.log_lines_dropped, sink.num_dropped)
        self.metrics.reach(self.metrics.requests_quarantined, self.supervisor.crash_policy.num_quarantined)

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
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            await self._process.ended(ENGINE_EXIT_SECONDS)


def _warn_of_threads(threads: int) -> None:
    """Logs that the engine has more threads than processors: at every barrier all threads wait for one that is not running."""
    processors = available_processors()
    if threads > processors:
        log.warning(
            "the engine has %d threads for %g processors (affinity and CPU quota of this process): steps take longer than with %d; "
            "set engine.threads, or leave it and OMP_NUM_THREADS out",
            threads,
            processors,
            engine_threads(None, {}),
        )


@contextlib.asynccontextmanager
async def running(settings: EngineSettings, section: ServerSection) -> AsyncIterator[Running]:
    """A loaded engine. Raises ConfigurationError or EngineGaveUp where it cannot be had."""
    engine = Running(settings, section)
    engine.start()
    try:
        await engine.until(State.READY)
        engine.generation.raise_if_over()
        yield engine
    finally:
        await engine.close()


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


def allow_files(max_connections: int) -> int:
    """Raises this process's limit of open files to what so many connections need; how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        log.warning("this process may have %d files open, so that server.max_connections is %d", soft, soft - OTHER_FILES)
    return max(1, min(max_connections, soft - OTHER_FILES))


class OutOfFiles:
    """The event loop's handler of errors: when files run out it says so once in a while, where the loop would for every connection that
    waits. (It tries to accept them again each second.)
    """

    def __init__(self) -> None:
        self._said = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said >= OUT_OF_FILES_SECONDS:
            self._said = time.monotonic()
            log.error("no connection can be accepted: %s; lower server.max_connections, or allow this process more files", error.strerror)


def http_server(door: FrontDoor, section: ServerSection) -> HttpServer:
    """uvicorn over the application."""
    config = uvicorn.Config(
        with_cors(door, section.cors_origins),
        http=connection_class(section, allow_files(section.max_connections), door),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
    )
    return HttpServer(config)


async def serve(settings: ServeSettings, sink: logs.Sink) -> int:
    """Serves until a signal or the engine's end; the exit code. Raises OneheadError for what prevents it."""
    section = settings.server
    with bind(settings.host, settings.port) as listener:
        name = model_id(settings.model)
        names = ModelNames.of((section.model_name or name, *section.served_model_names), (settings.given, name))
        engine = Running(settings, section, names.shown)
        retention = Retention(
            section.resume_retention, section.resume_stream_bytes, section.resume_memory, section.detach_grace, section.max_detached
        )
        store = StreamStore(retention)
        door = create_app(engine.generation, section, names, version("onehead"), store)
        loop = asyncio.get_running_loop()
        # Even under nohup: it ends nothing, and a key that was removed must not stay valid.
        loop.add_signal_handler(signal.SIGHUP, door.api_keys.reload)
        http = http_server(door, section)
        load = LoadLog(engine.generation, time.monotonic())
        engine.start(lambda: store.sweep(time.monotonic()), lambda: engine.count(sink, store), lambda: load.tick(time.monotonic()))
        drain = Drain(http, engine.generation, section.drain_timeout, section.lb_grace)
        loop.set_exception_handler(OutOfFiles())
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish is respected.
                loop.add_signal_handler(number, drain.on_signal, number)
        # What there is now stays: left out of every full collection, it no longer holds up requests for a tenth of a second.
        gc.collect()
        gc.freeze()
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            await _announce(engine, names.shown, door, sink, listener)
            await engine.until(State.STOPPED)
            engine.generation.raise_if_over()
        finally:
            if not http.should_exit:  # A drain gives what was written its time; nothing else does.
                http.end(FLUSH_SECONDS)
            await engine.close()
            await serving
    return EXIT_STREAMS_CUT if drain.cut or http.cut else 0


async def _announce(engine: Running, name: str, door: FrontDoor, sink: logs.Sink, listener: socket.socket) -> None:
    """Waits for the engine, logs what is served, and prints the one line that says where."""
    if await engine.until(State.READY) is not State.READY:
        return
    ready = engine.generation.ready
    host, port = listener.getsockname()[:2]
    weights = ready.dtype if ready.quantization == "none" else ready.quantization
    log.info(
        f"{name}: {ready.model_type}, {ready.num_parameters / 1e6:.1f}M parameters in {weights} on {ready.device}, "
        f"by {ready.kernels}, {'batch-invariant' if ready.deterministic else 'not batch-invariant'}; "
        f"cache {ready.kv_bytes_per_token} bytes per token in {ready.kv_dtype}, {ready.num_pages} pages of {ready.page_size}, "
        f"up to {ready.capacity} tokens a sequence"
    )
    if door.api_keys.names is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        log.warning("every host that reaches this port can use it: no key is needed (server.api_keys, server.api_keys_file)")
    line = f"onehead serves {name} on http://{f'[{host}]' if ':' in host else host}:{port}"
    if isinstance(sink.formatter, logs.JsonFormatter):  # A collector that reads both outputs finds JSON alone.
        line = sink.format(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
    with contextlib.suppress(OSError):  # The reader of standard output may have closed it; that is no reason not to serve.
        print(line, flush=True)
