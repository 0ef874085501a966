"""`onehead serve`: HTTP over a supervised engine, from the bound port to the exit after a drain.

Invariants: the port is bound before the model is loaded; no request is cut while it is drained;
bytes written to a client get time to arrive, and no client can keep the process running; the engine
process has ended when `serve` returns.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import math
import os
import signal
import threading
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import uvicorn

from server import logs
from server.config import ServeSettings
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention, StreamStore
from server.http.stream_journal import StreamJournal
from server.http.tls import check_certificate, reload_certificate
from server.hub.download import model_id
from server.listener import Listener, listen
from server.metrics import LoadLog
from server.protocol import Ready
from server.service import SupervisedEngine, started_engine
from server.supervision.supervisor import State

EXIT_STREAMS_CUT = 75
FLUSH_SECONDS = 1.0
"""Least time that clients get to receive what was written, before their connections are aborted."""
FILE_LIMIT_LOG_SECONDS = 10.0
log = logging.getLogger("onehead")


async def serve(settings: ServeSettings, sink: logs.Sink) -> int:
    """Serves until a signal, or until the engine is given up. Returns the exit status. Raises
    OneheadError if it cannot serve.
    """
    with contextlib.closing(listen(settings.host, settings.port)) as listener:
        server = Server(settings, sink, listener)
        server.handle_signals()
        async with started_engine(settings, settings.server, server.names.shown) as engine:
            return await server.run(engine)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop without draining."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]


class Server:
    """uvicorn in front of an engine: signals, drain, exit status. Raises ConfigurationError for
    keys and certificates that cannot be used.
    """

    def __init__(self, settings: ServeSettings, sink: logs.Sink, listener: Listener) -> None:
        self._section = section = settings.server
        self._sink = sink
        self._listener = listener
        name = model_id(settings.model)
        listed = section.model_name or name, *section.served_model_names
        self.names = ModelNames.of(listed, (settings.given, name))
        if section.tls_certificate and section.tls_key:
            check_certificate(section.tls_certificate, section.tls_key)
        self._keys = Keys(section.api_keys, section.api_keys_file)
        retention = Retention(section.resume_retention, detach_seconds=section.detach_grace)
        self._store = StreamStore(retention)
        self._journal = StreamJournal(section.journal) if section.journal else None
        self._engine: SupervisedEngine
        self._http: HttpServer
        self._is_serving = False
        self._draining: asyncio.Task[None] | None = None
        self._cut = False
        """Whether open requests were ended early, or a connection was aborted with unsent bytes."""
        self._logged_at = -math.inf

    def handle_signals(self) -> None:
        """Handlers are called in the event loop, and so not before `run` has begun."""
        loop = asyncio.get_running_loop()
        # SIGHUP reloads the keys under nohup too, else a removed key would stay valid.
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        for number in (signal.SIGTERM, signal.SIGINT):
            # Ignored by the parent, as shells do for background jobs: keep it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    async def run(self, engine: SupervisedEngine) -> int:
        """Serves until the engine is stopped or given up. Returns the exit status. Raises
        OneheadError if it cannot serve.
        """
        self._engine, self._http = engine, self._http_server(engine)
        load = LoadLog(engine.metrics, time.monotonic())
        engine.every_second += [self._observe, lambda: load.tick(time.monotonic())]
        # Excludes the objects of start-up from garbage collections, which would else delay requests
        # by about 0.1 s.
        gc.collect()
        gc.freeze()
        serving = asyncio.create_task(self._answer(engine))
        self._is_serving = True
        try:
            await engine.check_texts()
            if await engine.wait_for(State.READY) is State.READY:
                self._announce()
                going_on = asyncio.create_task(self._publisher.go_on(self._door))
                await engine.wait_for(State.STOPPED)
                going_on.cancel()
            engine.client.raise_if_over()
        finally:
            if not self._http.should_exit:
                self._end(FLUSH_SECONDS)
            await serving
        return EXIT_STREAMS_CUT if self._cut else 0

    async def _answer(self, engine: SupervisedEngine) -> None:
        # Where systemd keeps connections until they are accepted, none is told that a model loads.
        if not self._listener.is_shared or await engine.wait_for(State.READY) is State.READY:
            await self._http.serve(sockets=[self._listener.socket])

    def _http_server(self, engine: SupervisedEngine) -> HttpServer:
        """Raises ResourceError if this process may have too few files open."""
        # FastAPI is imported while the engine process imports torch.
        from server.http.app import create_app, with_cors
        from server.http.connection import HEAD_SECONDS, connection_class, raise_file_limit
        from server.http.streams import StreamPublisher

        section, loop = self._section, asyncio.get_running_loop()
        drawing = version("torch"), version("numpy")
        generation = engine.generation
        self._publisher = StreamPublisher(
            self._store,
            section.keep_alive,
            self._journal,
            lambda: " ".join((generation.ready.digest, generation.fingerprint, *drawing)),
        )
        door = create_app(
            generation,
            section,
            self._keys,
            self.names,
            self._publisher,
            self._listener.address,
        )
        self._door = door
        self._publisher.restore(door)
        config = uvicorn.Config(
            with_cors(door, section.cors_origins),
            http=connection_class(raise_file_limit(section.max_connections), door),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            ssl_certfile=section.tls_certificate,
            ssl_keyfile=section.tls_key,
        )
        config.load()
        loop.set_exception_handler(self._on_loop_error)
        if config.ssl is not None:  # uvicorn has no option for the time of a handshake.
            create_server = partial(loop.create_server, ssl_handshake_timeout=HEAD_SECONDS)
            loop.create_server = create_server  # type: ignore[method-assign]
        return HttpServer(config)

    def _announce(self) -> None:
        """Logs what is served, and prints one line with the URL."""
        shown, ready = self.names.shown, self._engine.generation.ready
        log.info("%s: %s", shown, in_words(ready))
        address = self._listener.address.partition("%")[0]
        if self._keys.terms is None and address and not ipaddress.ip_address(address).is_loopback:
            text = "every host that reaches this port can use it: no key is needed (%s)"
            log.warning(text, "server.api_keys, server.api_keys_file")
        scheme = "https" if self._section.tls_key else "http"
        line = f"onehead serves {shown} on {self._listener.url(scheme)}"
        # A log collector that reads both outputs must find JSON only.
        if isinstance(self._sink.formatter, logs.JsonFormatter):
            record = log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None)
            line = self._sink.format(record)
        # A thread, without buffers that the exit would wait for: standard output may be a pipe that
        # is full, and never read.
        threading.Thread(target=_write_line, args=(line,), daemon=True, name="stdout").start()

    def _observe(self) -> None:
        """Expires streams, and copies into the metrics what objects count that do not know them."""
        metrics, store = self._engine.metrics, self._store
        store.sweep(time.monotonic())
        metrics.streams_detached.set(store.num_detached)
        metrics.resume_bytes.set(store.num_bytes)
        metrics.reach(metrics.log_lines_dropped, self._sink.num_dropped)
        policy = self._engine.supervisor.crash_policy
        metrics.reach(metrics.requests_quarantined, policy.num_quarantined)

    def _reload(self) -> None:
        """Reads the files again that are named by options."""
        if not self._is_serving:  # It could not begin, and ends.
            return
        self._keys.reload()
        section, context = self._section, self._http.config.ssl
        if context is not None and section.tls_certificate and section.tls_key:
            reload_certificate(context, section.tls_certificate, section.tls_key)

    def _on_signal(self, number: int) -> None:
        """The first signal refuses new requests and lets open ones finish; a second one ends them
        with an error event.
        """
        if not self._is_serving:  # It could not begin, and ends.
            return
        if self._draining is not None:
            self._end(FLUSH_SECONDS)
            return
        client, timeout = self._engine.client, self._section.drain_timeout
        client.admission.draining = True
        text = "draining for up to %g s: %d sequences are open; a second signal ends them"
        log.info(text, timeout, client.admission.num_open)
        # The grace period is for load balancers; Ctrl-C in a terminal skips it.
        grace = 0.0 if number == signal.SIGINT else self._section.lb_grace
        if self._listener.is_shared:  # New connections wait for the next server.
            grace = 0.0
            for accepting in getattr(self._http, "servers", ()):
                accepting.close()
        self._draining = asyncio.create_task(self._drain(grace, timeout))

    async def _drain(self, grace: float, timeout: float) -> None:
        """Listens for `grace` seconds, until load balancers have noticed that /ready fails, and
        waits for open requests up to `timeout`.
        """
        admission, began = self._engine.client.admission, time.monotonic()
        now = began
        while (admission.num_open or now < began + grace) and now < began + timeout:
            await asyncio.sleep(0.05)
            now = time.monotonic()
        self._end(max(FLUSH_SECONDS, began + timeout - now))

    def _end(self, seconds: float) -> None:
        """Ends open requests and stops listening; connections get so many seconds to receive what
        was written.
        """
        client = self._engine.client
        self._cut = self._cut or bool(client.admission.num_open)
        client.supervisor.stop()
        client.monitor.end()
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(seconds, self._abort)

    def _abort(self) -> None:
        for connection in [*self._http.server_state.connections]:
            self._cut = self._cut or connection.transport.get_write_buffer_size() > 0
            connection.transport.abort()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs that accept() failed for lack of open files at intervals, not for every failure, of
        which asyncio reports thousands a second.
        """
        error, now = context.get("exception"), time.monotonic()
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif now - self._logged_at >= FILE_LIMIT_LOG_SECONDS:
            self._logged_at = now
            way_out = "lower server.max_connections, or allow this process more files"
            log.error("no connection can be accepted: %s; %s", error.strerror, way_out)


def in_words(ready: Ready) -> str:
    """One line that describes the loaded model, for the log."""
    forms = " and ".join(
        f"{count} matrices in {form} blocks" for form, count in sorted(ready.block_forms.items())
    )
    form = ready.dtype if ready.quantization == "none" else ready.quantization
    weights = f"as in the file ({forms})" if forms else f"in {form}"
    words = (
        f"{ready.model_type}, {ready.num_parameters / 1e6:.1f}M parameters {weights} on "
        f"{ready.hardware or ready.device}, by {ready.kernels}, "
        f"{'batch-invariant' if ready.deterministic else 'not batch-invariant'}; "
        f"cache {ready.kv_bytes_per_token} bytes per token in {ready.kv_dtype}, "
        f"{ready.num_pages} pages of {ready.page_size}, up to {ready.capacity} tokens a sequence"
    )
    free, total = (size / 2**30 for size in ready.device_memory)
    if not total:
        return words
    memory = f"{free:.1f} of {total:.1f} GiB of GPU memory are free"
    return f"{words}; {memory}, {ready.num_graphs} CUDA graphs"


def _write_line(line: str) -> None:
    with contextlib.suppress(OSError):  # Standard output may be closed; serve anyway.
        os.write(1, f"{line}\n".encode())
