"""HTTP/1.1 responses and server-sent events, parsed strictly from bytes as they arrive; and a
blocking reader of a socket.

Invariant: nothing is repaired. A response that the server must not send, or a line that no event of
the server has, raises ValueError; a connection that ends within a response or an event raises
EOFError. It imports nothing of the server, and knows neither dialect.
"""

import json
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STATUS_LINE = re.compile(r"HTTP/1\.1 ([1-5]\d\d) [ -~]*")
HEADER_LINE = re.compile(r"([!#-'*+.0-9A-Z^-z|~-]+): ?([ -~]*)")
CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
FIELDS = ("id", "retry", "event", "data")
RECEIVED_AT_ONCE = 2**16
Headers = list[tuple[str, str]]


def http_request(
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    close: bool = True,
) -> bytes:
    """The bytes of a request, with `body` as JSON unless it is None; with `close`, the only one of
    its connection.
    """
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        *(["connection: close"] if close else []),
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


class NoResponse(EOFError):
    """The connection ended before the first byte of a response."""


# --- parsers without I/O


class ResponseParser:
    """One response, from the bytes that are fed. `rest` holds what follows it."""

    def __init__(self, method: str = "GET", data: bytes = b"") -> None:
        self.status, self.headers = 0, Headers()
        self.interim = False
        """Whether a response with a status below 200 came first."""
        self.has_head = self.complete = False
        self.rest = data
        self._body = bytearray()
        self._ended = False
        self._steps = self._parse(method)
        next(self._steps, None)

    def header(self, name: str) -> str | None:
        """The header of that name; all of them where there are several."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else None

    def feed(self, data: bytes) -> None:
        """Takes more bytes; none means that the connection has ended, which raises EOFError within
        a response.
        """
        self.rest += data
        self._ended = self._ended or not data
        next(self._steps, None)

    def take_body(self) -> bytes:
        """What has arrived of the body since the last call, without its framing."""
        data = bytes(self._body)
        self._body.clear()
        return data

    def _parse(self, method: str) -> Iterator[None]:
        yield from self._head()
        while self.status < 200:
            self.interim = True
            yield from self._head()
        self.has_head = True
        if method == "HEAD" or self.status in (204, 304):
            pass
        elif self.header("transfer-encoding") == "chunked":
            yield from self._chunks()
        elif (length := self.header("content-length")) is not None:
            yield from self._take(int(length))
        else:
            while not self._ended:
                self._body += self.rest
                self.rest = b""
                yield
        self.complete = True

    def _head(self) -> Iterator[None]:
        yield from self._await(lambda: b"\r\n\r\n" in self.rest)
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = STATUS_LINE.fullmatch(first)
        pairs = [HEADER_LINE.fullmatch(line) for line in lines]
        if status is None or not all(pairs):
            raise ValueError(f"no HTTP: {first!r} {lines!r}")
        self.status, self.headers = (
            int(status[1]),
            [(pair[1].lower(), pair[2]) for pair in pairs if pair is not None],
        )

    def _chunks(self) -> Iterator[None]:
        size = 1
        while size:
            yield from self._await(lambda: b"\r\n" in self.rest)
            line, _, self.rest = self.rest.partition(b"\r\n")
            if not CHUNK_SIZE.fullmatch(line):
                raise ValueError(f"no size of a chunk: {line[:80]!r}")
            size = int(line, 16)
            yield from self._take(size)
            yield from self._await(lambda: len(self.rest) >= 2)
            if self.rest[:2] != b"\r\n":
                raise ValueError(f"a chunk of {size} bytes is followed by {self.rest[:80]!r}")
            self.rest = self.rest[2:]

    def _take(self, count: int) -> Iterator[None]:
        while True:
            data, self.rest = self.rest[:count], self.rest[count:]
            self._body += data
            count -= len(data)
            if not count:
                return
            yield from self._await(lambda: bool(self.rest))

    def _await(self, arrived: Any) -> Iterator[None]:
        while not arrived():
            if self._ended:
                if not (self.rest or self.interim or self.has_head):
                    raise NoResponse("the connection ended without a response")
                raise EOFError(f"the connection ended within a response, after {self.rest[-80:]!r}")
            yield


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. Where it is a comment alone, `data` is None."""

    data: str | None
    id: str | None = None
    kind: str | None = None
    comment: str | None = None


class EventParser:
    """Server-sent events, from the bytes of a body."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return [parse_event(block.decode()) for block in blocks]

    def end(self) -> None:
        """To be called at the end of the body."""
        if self._rest:
            raise EOFError(f"the stream ends within an event: {self._rest[:80]!r}")


def parse_event(block: str) -> Event:
    """The lines of one event."""
    fields: dict[str, str] = {}
    for line in block.split("\n"):
        name, colon, value = line.partition(":")
        if (
            not colon
            or name not in ("", *FIELDS)
            or (name and (name in fields or value[:1] != " "))
        ):
            raise ValueError(f"not a line of an event: {line[:80]!r}")
        fields[name] = value[1:]
    return Event(fields.get("data"), fields.get("id"), fields.get("event"), fields.get(""))


# --- a blocking reader


class Wire:
    """The receiving side of a socket, over which responses come one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rest = b""

    def receive(self) -> bytes:
        """More bytes; none at the end, also where the other side reset the connection."""
        try:
            return self.connection.recv(RECEIVED_AT_ONCE)
        except ConnectionError:
            return b""

    def response(self, method: str = "GET") -> "Response":
        """The next response, its head read. Raises TimeoutError, EOFError and ValueError."""
        return Response(self, method)


class Response:
    """Status and headers, then the body as it comes."""

    def __init__(self, wire: Wire, method: str) -> None:
        self._wire, self._parser = wire, ResponseParser(method, wire.rest)
        wire.rest = b""
        while not self._parser.has_head:
            self._parser.feed(wire.receive())
        self.status = self._parser.status
        self.headers = self._parser.headers
        self.interim = self._parser.interim
        self._release()

    def header(self, name: str) -> str | None:
        """The header of that name; all of them where there are several."""
        return self._parser.header(name)

    def pieces(self) -> Iterator[bytes]:
        """The body to its end."""
        while True:
            if data := self._parser.take_body():
                yield data
            if self._parser.complete:
                return
            self._parser.feed(self._wire.receive())
            self._release()

    def body(self) -> bytes:
        """The rest of the body."""
        return b"".join(self.pieces())

    def events(self) -> Iterator[Event]:
        """The events of the body."""
        parser = EventParser()
        for data in self.pieces():
            yield from parser.feed(data)
        parser.end()

    def _release(self) -> None:
        """Leaves to the wire what follows a response that is complete."""
        if self._parser.complete:
            self._wire.rest += self._parser.rest
            self._parser.rest = b""


def abort(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def exchange(port: int, request: bytes, timeout: float) -> tuple[Response, bytes]:
    """The response to a request on a connection of its own, and its body."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(request)
        response = Wire(connection).response(request.partition(b" ")[0].decode("latin-1"))
        return response, response.body()
