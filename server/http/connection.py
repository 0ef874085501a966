"""Connection: uvicorn's HTTP/1.1 protocol within bounds of bytes and seconds, refusing in JSON what is no request.

Invariant: a connection that sends its head or its body slowly, sends too much of them, or takes no answer, is closed in bounded time and
has cost bounded memory. It knows nothing of routes; what it lets through is for the application to judge.
"""

import asyncio
import contextvars
import logging
import re
import secrets
import socket
import time
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.config import ServerSection
from server.http.exchange import exchange_of

SAFETY_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}
"""What every response has, unless it says otherwise."""
MAX_HEADERS = 100
MAX_IGNORED_BYTES = 16 * 2**20
MAX_READ_BYTES = 2**18
"""That asyncio reads at once."""
MAX_PIPELINED = 128
LINGER_SECONDS = 2.0
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~%-]*)(:[0-9]{0,5})?")


access = logging.getLogger("onehead.access")


class _Refused(Exception):
    """Raised inside the parser's callbacks, which it leaves as a parser's error."""


class Door(Protocol):
    """Who decides what is let in. Both are given the scope of a request, and wait for nothing."""

    def admits(self, scope: Any, /) -> bool:
        """Whether the application will do something for it, or only refuse it."""

    def on_incomplete_body(self, scope: Any, /) -> None:
        """One that was admitted has not arrived whole."""


class Connection(HttpToolsProtocol):
    """One connection. `limits` are set by `connection_class`."""

    limits: ServerSection
    max_connections: int
    door: Door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._head_bytes = self._bytes_without_body = self._ignored_bytes = 0
        self._in_head = True
        self._refusal: tuple[int, str, str] | None = None
        self._refused = False
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too_many_connections", f"{self.max_connections} connections are open and that is the most; try again later")
            return
        self._limit_writing(transport.get_extra_info("socket"))
        self._start_timer("head", self.limits.header_timeout)

    def _limit_writing(self, sock: Any) -> None:
        """Has the kernel drop a peer that is gone, or takes nothing: bytes it has not acknowledged are given up after so long."""
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.limits.write_timeout * 1000))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None and self._busy:
            # Told by uvicorn is only the request that was read last, and that may be waiting behind this one.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # Whatever stands behind what was refused is not looked at.
        self._unset_keepalive_if_required()
        rest: memoryview | None = memoryview(data)
        while rest is not None and not self._refused:
            if self._in_head:
                self._head_bytes += len(rest)
            self._bytes_without_body += len(rest)
            rest = self._feed(rest)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Bounds what has been read and is no body, whole head or request."""
        if self._refused:
            return
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(431, "headers_too_large", self._largest_head())
        elif not self._in_head and self._bytes_without_body > self.limits.max_header_bytes + MAX_READ_BYTES:
            self._refuse(400, "invalid_http", "the body's chunks have more around them than in them")
        elif self._timer is None and self.timeout_keep_alive_task is None and not self._busy:
            # A lone line end is no request, and must not keep the connection either.
            self._start_timer("head", self.limits.header_timeout)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered."""
        return self._running is not None and not self._running.response_complete

    def _feed(self, data: memoryview) -> memoryview | None:
        """Reads; what is still to be read behind a head that offered another protocol, as some clients do with every request. The parser
        would take what follows for that protocol's, so that head is read again without the offer.
        """
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                head = [b"%s %s HTTP/%s" % (method, self.url, version)]
                head += [b"%s: %s" % pair for pair in self.headers if pair[0] not in (b"upgrade", b"http2-settings")]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's own.
                self._head_bytes = 0
                self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
                return data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._running is not None and self._busy and self._running.more_body:
            self.door.on_incomplete_body(self._running.scope)
        return None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle  # `self.cycle` is the last that was read, and it may be waiting behind this one.
        self._unset_keepalive_if_required()
        admitted = self.door.admits(cycle.scope)
        if admitted or self.pipeline or self.transport.get_write_buffer_size():
            super()._start_asgi_task(cycle, app)
            return
        # A refusal waits for nothing, so it is written now: in a flood, a task would stand behind thousands of others.
        try:
            contextvars.copy_context().run(cycle.run_asgi(app).send, None)
        except StopIteration:
            return
        raise RuntimeError("a refusal waited for something")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._ignored_bytes = self._bytes_without_body = 0
        if self._timer is None:  # Not the connection's first request, for which the time began with the connection.
            self._head_bytes = 0
            self._start_timer("head", self.limits.header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._reject(431, "trailers", "headers behind the body are not taken")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._check_head()
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return  # It comes again, without.
        exchange_of(self.scope).received = time.monotonic()
        super().on_headers_complete()
        self._start_timer("body", self.limits.body_timeout)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._bytes_without_body = 0
        if self.cycle.response_complete:  # With a refusal, before the body had come: what still comes is read for the answer's sake.
            self._ignored_bytes += len(body)
            if self._ignored_bytes > MAX_IGNORED_BYTES:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raises _Refused for what is well-formed and still not for us."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._reject(431, "headers_too_large", self._largest_head())
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(400, "too_many_requests", f"more than {MAX_PIPELINED} requests wait behind one on this connection")
        if self.parser.get_method() == b"CONNECT":
            self._reject(400, "invalid_http", "this is no proxy; CONNECT has no meaning here")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1") or (hosts and _HOST.fullmatch(hosts[0]) is None):
            self._reject(400, "invalid_host", "a request must have one `Host` header, with a name or an address and perhaps a port")

    def _largest_head(self) -> str:
        return f"the head of a request may have {MAX_HEADERS} headers and {self.limits.max_header_bytes} bytes (server.max_header_bytes)"

    def _reject(self, status: int, code: str, message: str) -> None:
        self._refusal = status, code, message
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, "invalid_http", "this is not a valid HTTP/1.1 request")))

    def _start_timer(self, part: str, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout, part, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, part: str, seconds: float) -> None:
        self._timer = None
        if self.flow.read_paused:  # It is we who do not read: behind a request that is being answered.
            self._start_timer(part, seconds)
            return
        answered = self.cycle is not None and self.cycle.response_complete
        if (self._head_bytes == 0 and self.cycle is None) or (part == "body" and answered):
            self.transport.close()  # It never asked for anything, or has its answer.
        else:
            self._refuse(408, "request_timeout", f"the {part} of the request did not arrive within {seconds:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers in place of the application, and closes. Where an answer is under way already, cuts it off."""
        self._stop_timer()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.pipeline.clear()
        request_id = secrets.token_hex(8)
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # It would still be written, behind the refusal.
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
            # The application's own line of the log tells of it.
            exchange = exchange_of(cycle.scope)
            exchange.refused_status = status
            request_id = exchange.request_id or request_id
        else:
            client = self.client[0] if self.client else ""
            fields = {"request_id": request_id, "status": status, "code": code, "client": client}
            access.info("refused a connection: %d %s client=%s request=%s", status, code, client, request_id, extra={"fields": fields})
        self._write_refusal(status, code, message, request_id)
        if status == 503:  # Of connections there are too many: this one must not stay.
            self.transport.close()
            return
        if self.transport.can_write_eof():
            # What it still sends is read for a moment: a socket closed over unread bytes takes the answer back.
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _write_refusal(self, status: int, code: str, message: str, request_id: str) -> None:
        error = {"message": message, "type": "BadRequestError" if status < 500 else "Service Unavailable", "param": None, "code": code}
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


def connection_class(section: ServerSection, most: int, front: Door) -> type[Connection]:
    """The protocol class for a server with these options, `most` connections and this door."""

    class Limited(Connection):
        limits = section
        max_connections = most
        door = front

    return Limited
