"""WebServer: the application and uvicorn, over an EngineClient.

Invariant: what the process may have open is known before it serves. It binds no port, and neither starts nor ends an engine.
"""

import asyncio
import contextlib
import errno
import logging
import math
import socket
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import uvicorn

from server.child_process import allow_files
from server.config import ServerSection
from server.drain import FLUSH_SECONDS
from server.errors import ResourceError
from server.generation.generation import Generation
from server.http.app import create_app, with_cors
from server.http.connection import PROBE_CONNECTIONS, connection_class
from server.http.front import FrontDoor
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention, StreamStore
from server.http.streams import StreamPublisher
from server.http.tls import reload_certificate

FILE_LIMIT_LOG_SECONDS = 10.0
OTHER_FILES, MIN_CONNECTIONS = 64, 8
"""Estimate of the open files of the process besides its connections, and the least connections that a server is worth starting for."""
log = logging.getLogger("onehead")


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


def raise_file_limit(max_connections: int) -> int:
    """Raises this process's limit of open files for so many connections. Returns the number of connections that it allows. Raises
    ResourceError if it allows next to none.
    """
    others = OTHER_FILES + PROBE_CONNECTIONS
    wanted = max_connections + others
    soft = allow_files(wanted)
    if soft < min(wanted, others + MIN_CONNECTIONS):
        raise ResourceError(f"this process may have {soft} files open, and needs {others + MIN_CONNECTIONS}; allow it more (ulimit -n)")
    if soft < wanted:
        log.warning("this process may have %d files open, which limits server.max_connections to %d", soft, soft - others)
    return min(max_connections, soft - others)


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
    """Serves requests to `generation` over HTTP, with one listening socket. Raises ConfigurationError for a chat template that is not
    valid.
    """

    def __init__(self, generation: Generation, section: ServerSection, keys: Keys, names: ModelNames, listener: socket.socket) -> None:
        self._generation = generation
        self._section = section
        self._listener = listener
        retention = Retention(
            section.resume_retention, section.resume_stream_bytes, section.resume_memory, section.detach_grace, section.max_detached
        )
        self.store = StreamStore(retention)
        publisher = StreamPublisher(self.store, section.keep_alive)
        address = listener.getsockname()[0]
        door = create_app(generation, section, keys, names, version("onehead"), publisher, address)
        self._http = http_server(door, section)
        self._serving: asyncio.Task[None]

    def start(self) -> None:
        """Begins to serve."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(FileLimitHandler())
        if self._http.config.ssl is not None:  # uvicorn has no option for the time of a handshake.
            timeout = self._section.header_timeout
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=timeout)  # type: ignore[method-assign]
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))

    async def started(self) -> None:
        """Waits until it serves, or serving has ended."""
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0)

    def sweep(self) -> None:
        """Called once a second."""
        self.store.sweep(time.monotonic())

    def reload(self) -> None:
        """Reads the certificate again."""
        section, context = self._section, self._http.config.ssl
        if context is not None and section.tls_certificate and section.tls_key:
            reload_certificate(context, section.tls_certificate, section.tls_key)

    def end(self, timeout: float) -> None:
        """Stops listening, and after `timeout` seconds aborts the connections that are still open."""
        self._generation.client.monitor.end()
        self._http.end(timeout)

    async def ended(self) -> bool:
        """Waits for the end, which begins with this call if `end` was not called. Returns whether a connection was aborted with unsent
        bytes.
        """
        if not self._http.should_exit:  # Without a drain, responses get a moment to be flushed.
            self.end(FLUSH_SECONDS)
        await self._serving
        return self._http.cut
