"""WebServer: the application, uvicorn, the drain and periodic tasks around one SupervisedEngine that is loading or loaded.

Invariant: no request is cut while it is drained. It binds no port, and neither starts nor ends the engine.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import math
import os
import resource
import signal
import socket
import threading
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import uvicorn

from server import logs
from server.config import ServerSection
from server.drain import FLUSH_SECONDS, SIGNALS, Drain, HttpServer
from server.errors import ResourceError
from server.http.app import create_app, with_cors
from server.http.connection import PROBE_CONNECTIONS, connection_class
from server.http.front import FrontDoor
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention, StreamStore
from server.http.tls import reload_certificate
from server.load_log import LoadLog
from server.loop_lag import LoopLag
from server.service import SupervisedEngine
from server.supervision.supervisor import State

EXIT_STREAMS_CUT = 75
FILE_LIMIT_LOG_SECONDS = 10.0
OTHER_FILES, MIN_CONNECTIONS = 64, 8
"""Estimate of the open files of the process besides its connections, and the least connections that a server is worth starting for."""
log = logging.getLogger("onehead")


def raise_file_limit(max_connections: int) -> int:
    """Raises this process's limit of open files for so many connections. Returns the number of connections that it allows. Raises
    ResourceError if it allows next to none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = OTHER_FILES + PROBE_CONNECTIONS
    wanted = max_connections + others
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < min(wanted, others + MIN_CONNECTIONS):
        raise ResourceError(f"this process may have {soft} files open, and needs {others + MIN_CONNECTIONS}; allow it more (ulimit -n)")
    if soft < wanted:
        log.warning("this process may have %d files open, which limits server.max_connections to %d", soft, soft - others)
    return min(max_connections, soft - others)


class FileLimitHandler:
    """Exception handler of the event loop: logs that accept() failed for lack of open files at intervals, not for every failure. (asyncio
    retries each second.)
    """

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged_at >= FILE_LIMIT_LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.error("no connection can be accepted: %s; lower server.max_connections, or allow this process more files", error.strerror)


def http_server(door: FrontDoor, section: ServerSection) -> HttpServer:
    """The uvicorn server of the application."""
    config = uvicorn.Config(
        with_cors(door, section.cors_origins),
        http=connection_class(section, raise_file_limit(section.max_connections), door),
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
    return HttpServer(config)


class WebServer:
    """Serves one engine over HTTP. `lag` is the selector of the running event loop. Raises ConfigurationError for a chat template that is
    not valid.
    """

    def __init__(
        self, engine: SupervisedEngine, section: ServerSection, keys: Keys, names: ModelNames, sink: logs.Sink, lag: LoopLag
    ) -> None:
        self._engine = engine
        self._section = section
        self._names = names
        self._sink = sink
        self._lag = lag
        retention = Retention(
            section.resume_retention, section.resume_stream_bytes, section.resume_memory, section.detach_grace, section.max_detached
        )
        self._store = StreamStore(retention)
        self._door = create_app(engine.generation, section, keys, names, version("onehead"), self._store)
        self._http = http_server(self._door, section)
        self._drain = Drain(self._http, engine.generation, section.drain_timeout, section.lb_grace)
        load = LoadLog(engine.generation, time.monotonic())
        engine.every_second += [lambda: self._store.sweep(time.monotonic()), self._observe, lambda: load.tick(time.monotonic())]

    async def run(self, listener: socket.socket) -> int:
        """Serves until a signal, or until the engine is given up. Returns the exit status. Raises OneheadError if it cannot serve."""
        loop = asyncio.get_running_loop()
        # SIGHUP reloads the keys under nohup too, else a removed key would stay valid.
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self._http.config.ssl is not None:  # uvicorn has no option for the time of a handshake.
            timeout = self._section.header_timeout
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=timeout)  # type: ignore[method-assign]
        loop.set_exception_handler(FileLimitHandler())
        self._engine.metrics.event_loop_lag.set_function(self._lag.longest)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # Ignored by the parent, as shells do for background jobs: keep it.
                loop.add_signal_handler(number, self._drain.on_signal, number)
        # Excludes the objects of start-up from garbage collections, which would else delay requests by about 0.1 s.
        gc.collect()
        gc.freeze()
        self._lag.start(loop)
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            await self._announce(listener)
            await self._engine.wait_for(State.STOPPED)
            self._engine.generation.raise_if_over()
        finally:
            if not self._http.should_exit:  # Without a drain, responses get a moment to be flushed.
                self._http.end(FLUSH_SECONDS)
            await serving
        return EXIT_STREAMS_CUT if self._drain.cut or self._http.cut else 0

    def _reload(self) -> None:
        """Reads the files again that are named by options."""
        self._door.api_keys.reload()
        section, context = self._section, self._http.config.ssl
        if context is not None and section.tls_certificate and section.tls_key:
            reload_certificate(context, section.tls_certificate, section.tls_key)

    def _observe(self) -> None:
        """Copies into the metrics what is counted by objects that do not know them."""
        metrics = self._engine.metrics
        metrics.streams_detached.set(self._store.num_detached)
        metrics.resume_bytes.set(self._store.num_bytes)
        metrics.reach(metrics.log_lines_dropped, self._sink.num_dropped)
        metrics.reach(metrics.requests_quarantined, self._engine.supervisor.crash_policy.num_quarantined)

    async def _announce(self, listener: socket.socket) -> None:
        """Waits for the engine, logs what is served, and prints one line with the URL."""
        await self._engine.generation.texts.check()
        if await self._engine.wait_for(State.READY) is not State.READY:
            return
        ready = self._engine.generation.ready
        host, port = listener.getsockname()[:2]
        weights = ready.dtype if ready.quantization == "none" else ready.quantization
        log.info(
            f"{self._names.shown}: {ready.model_type}, {ready.num_parameters / 1e6:.1f}M parameters in {weights} on {ready.device}, "
            f"by {ready.kernels}, {'batch-invariant' if ready.deterministic else 'not batch-invariant'}; "
            f"cache {ready.kv_bytes_per_token} bytes per token in {ready.kv_dtype}, {ready.num_pages} pages of {ready.page_size}, "
            f"up to {ready.capacity} tokens a sequence"
        )
        if self._door.api_keys.terms is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            log.warning("every host that reaches this port can use it: no key is needed (server.api_keys, server.api_keys_file)")
        scheme = "https" if self._section.tls_key else "http"
        line = f"onehead serves {self._names.shown} on {scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if isinstance(self._sink.formatter, logs.JsonFormatter):  # A log collector that reads both outputs must find JSON only.
            line = self._sink.format(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
        # A thread, without buffers that the exit would wait for: standard output may be a pipe that is full, and never read.
        threading.Thread(target=_write_line, args=(line,), daemon=True, name="stdout").start()


def _write_line(line: str) -> None:
    with contextlib.suppress(OSError):  # Standard output may be closed; serve anyway.
        os.write(1, f"{line}\n".encode())
