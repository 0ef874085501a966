"""Connection: uvicorn's HTTP/1.1 protocol with limits on bytes and seconds, and JSON bodies for
malformed requests.

Invariant: a connection that sends a request's head or body too slowly or too large, or does not
read its response, is closed in bounded time and uses bounded memory. It knows no routes.
"""

import asyncio
import contextvars
import logging
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.child_process import allow_files
from server.errors import ResourceError
from server.http.exchange import exchange_of
from server.http.front import SAFETY_HEADERS, FrontDoor

HEAD_SECONDS, BODY_SECONDS = 10.0, 30.0
"""Time in which the head and the body of a request have to arrive."""
WRITE_SECONDS = 30.0
"""A client that acknowledges nothing for this long is dropped."""
MAX_HEAD_BYTES = 32 * 2**10
MAX_HEADERS = 100
TOO_LARGE = (
    431,
    "headers_too_large",
    f"the head of a request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes",
)
"""Status, code and message of a refusal."""
LINGER_SECONDS = 2.0
TCP = (socket.AF_INET, socket.AF_INET6)
PROBE_CONNECTIONS = 8
"""Connections beyond server.max_connections, for probes alone: a server whose places are all taken
is not a dead one."""
OTHER_FILES, MIN_CONNECTIONS = 64, 8
"""Estimate of the open files of the process besides its connections, and the least connections that
a server is worth starting for.
"""


log = logging.getLogger("onehead")
access = logging.getLogger("onehead.access")


class _Refused(Exception):
    """Raised in callbacks of httptools, which re-raises it as HttpParserError."""


class Connection(HttpToolsProtocol):
    """One client connection. `connection_class` sets the class attributes."""

    max_connections: int
    door: FrontDoor

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._refusal: tuple[int, str, str] | None = None
        self._refused = False
        self._only_probes = len(self.connections) > self.max_connections
        if len(self.connections) > self.max_connections + PROBE_CONNECTIONS:
            self._refuse(*self._too_many())
            return
        sock = transport.get_extra_info("socket")
        if getattr(sock, "family", None) in TCP and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Has the kernel close the connection when sent bytes stay unacknowledged so long.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000))
        self._start_timer("head", HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None and self._busy:
            # uvicorn notifies only the request that was read last, which may be queued after this
            # one.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # Bytes after a refused request are ignored.
        self._unset_keepalive_if_required()
        rest: memoryview | None = memoryview(data)
        while rest is not None and not self._refused:
            if self._in_head:
                self._head_bytes += len(rest)
            rest = self._feed(rest)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuses a head that is too large."""
        if self._refused:
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*TOO_LARGE)
        elif self._timer is None and self.timeout_keep_alive_task is None and not self._busy:
            # Empty lines are no request; without a timer they would keep the connection open.
            self._start_timer("head", HEAD_SECONDS)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered."""
        return self._running is not None and not self._running.response_complete

    def _feed(self, data: memoryview) -> memoryview | None:
        """Parses received bytes. Returns those after a head with an `Upgrade` header, which some
        clients always send: the parser would treat them as the other protocol's, so the head is
        parsed again without that header.
        """
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                head = [b"%s %s HTTP/%s" % (method, self.url, version)]
                head += [
                    b"%s: %s" % pair
                    for pair in self.headers
                    if pair[0] not in (b"upgrade", b"http2-settings")
                ]
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn sets it.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._head_bytes = 0
                self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
                return data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._running is not None and self._busy and self._running.more_body:
            self.door.on_incomplete_body(self._running.scope)
        return None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # `self.cycle` is the request that was read last, which may be queued after this one.
        self._running = cycle
        self._unset_keepalive_if_required()
        if cycle.scope["http_version"] == "1.0":
            _delimit_by_close(cycle)
        exchange_of(cycle.scope).chunks = CycleChunks(cycle, self.transport)
        admitted = self.door.decide(cycle.scope)
        if admitted or self.pipeline or self.transport.get_write_buffer_size():
            super()._start_asgi_task(cycle, app)
            return
        # A refusal never awaits, so it is written now: under overload, its task would be queued
        # after thousands of others.
        try:
            contextvars.copy_context().run(cycle.run_asgi(app).send, None)
        except StopIteration:
            return
        raise RuntimeError("a refusal must not await")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        # Not the connection's first request, whose timer started with the connection.
        if self._timer is None:
            self._head_bytes = 0
            self._start_timer("head", HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._check_head()
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return  # The head is parsed again without `Upgrade`.
        exchange_of(self.scope).received = time.monotonic()
        super().on_headers_complete()
        self._start_timer("body", BODY_SECONDS)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raises _Refused for a well-formed head that this server does not accept."""
        if self.parser.get_method() == b"CONNECT":  # To the parser, another protocol begins here.
            self._reject(405, "method_not_allowed", "this server is no proxy: it takes no CONNECT")
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._reject(*TOO_LARGE)
        if self._only_probes and not self.door.is_probe(
            self.url.partition(b"?")[0].decode("latin-1")
        ):
            self._reject(*self._too_many())

    def _too_many(self) -> tuple[int, str, str]:
        return (
            503,
            "too_many_connections",
            f"{self.max_connections} connections are open, which is the limit; try again later",
        )

    def _reject(self, status: int, code: str, message: str) -> None:
        self._refusal = status, code, message
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            *(self._refusal or (400, "invalid_http", "this is not a valid HTTP/1.1 request"))
        )

    def _start_timer(self, part: str, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout, part, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, part: str, seconds: float) -> None:
        self._timer = None
        # The server has paused reading while it answers an earlier request.
        if self.flow.read_paused:
            self._start_timer(part, seconds)
            return
        answered = self.cycle is not None and self.cycle.response_complete
        if (self._head_bytes == 0 and self.cycle is None) or (part == "body" and answered):
            self.transport.close()  # No request was begun, or the response is complete.
        else:
            self._refuse(
                408,
                "request_timeout",
                f"the {part} of the request did not arrive within {seconds:g} s",
            )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Writes an error response and closes the connection. Aborts it if a response has been
        started.
        """
        self._stop_timer()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.pipeline.clear()
        request_id = secrets.token_hex(8)
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # Else uvicorn would write it after the refusal.
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
            # The application writes the access log's line, with this status.
            exchange = exchange_of(cycle.scope)
            exchange.refused_status = status
            request_id = exchange.request_id or request_id
        else:
            client = self.client[0] if self.client else ""
            fields = {"request_id": request_id, "status": status, "code": code, "client": client}
            access.info(
                "refused a connection: %d %s client=%s request=%s",
                status,
                code,
                client,
                request_id,
                extra={"fields": fields},
            )
        self._write_refusal(status, code, message, request_id)
        if status == 503:  # There are too many connections: close without lingering.
            self.transport.close()
            return
        if self.transport.can_write_eof():
            # Keep reading for a moment: closing a socket with unread bytes discards the response.
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _write_refusal(self, status: int, code: str, message: str, request_id: str) -> None:
        error = {
            "message": message,
            "type": "Service Unavailable" if status == 503 else "BadRequestError",
            "param": None,
            "code": code,
        }
        body = msgspec.json.encode({"error": error})
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **({"retry-after": "1"} if status == 503 else {}),
            "x-request-id": request_id,
            **SAFETY_HEADERS,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[status] + lines.encode() + b"\r\n" + body)


@dataclass(slots=True)
class CycleChunks:
    """The Chunks of one request and its response."""

    cycle: RequestResponseCycle
    transport: asyncio.Transport

    @property
    def may_write(self) -> bool:
        return (
            bool(self.cycle.chunked_encoding)
            and not self.cycle.flow.write_paused
            and not self.cycle.disconnected
        )

    def write(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _delimit_by_close(cycle: RequestResponseCycle) -> None:
    """Has a response without content-length end with its connection, as HTTP/1.0 knows no chunks,
    where uvicorn would send chunks.
    """
    send, has_length = cycle.send, False

    async def send_unframed(message: Any) -> None:
        nonlocal has_length
        has_length = has_length or any(
            name.lower() == b"content-length" for name, _ in message.get("headers", ())
        )
        if not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]


def connection_class(most: int, front: FrontDoor) -> type[Connection]:
    """A protocol class for at most `most` connections, and this application layer."""

    class Limited(Connection):
        max_connections = most
        door = front

    return Limited


def raise_file_limit(max_connections: int) -> int:
    """Raises this process's limit of open files for so many connections. Returns the number of
    connections that it allows. Raises ResourceError if it allows next to none.
    """
    others = OTHER_FILES + PROBE_CONNECTIONS
    wanted, least = max_connections + others, others + MIN_CONNECTIONS
    soft = allow_files(wanted)
    if soft < min(wanted, least):
        text = f"this process may have {soft} files open, and needs {least}"
        raise ResourceError(f"{text}; allow it more (ulimit -n)")
    if soft < wanted:
        text = "this process may have %d files open, which limits server.max_connections to %d"
        log.warning(text, soft, soft - others)
    return min(max_connections, soft - others)
