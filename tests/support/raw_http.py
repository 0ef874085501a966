"""A raw HTTP exchange over a socket: sends any bytes, and parses the answer strictly.

It knows the shapes of error bodies, and nothing of the request.
"""

import json
import re
import select
import socket
from contextlib import suppress
from dataclasses import dataclass

END_SECONDS = 2.0
"""Time until a connection that must be closed is closed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `interim`: a 1xx came first. `rest`: bytes after it until the connection ended, which `closed` reports."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    interim: bool = False
    rest: bytes = b""
    closed: bool = False
    num_sent: int = 0

    def header(self, name: str) -> str | None:
        """The value of a header; all values if there are several."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else None


class Wire:
    """The receiving side of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.data = b""

    def fill(self) -> bool:
        """More bytes; False at the end."""
        try:
            chunk = self._connection.recv(2**16)
        except ConnectionError:
            return False
        self.data += chunk
        return bool(chunk)

    def until(self, mark: bytes) -> bytes:
        while mark not in self.data:
            if not self.fill():
                raise EOFError
        found, _, self.data = self.data.partition(mark)
        return found

    def take(self, count: int) -> bytes:
        while len(self.data) < count:
            if not self.fill():
                raise EOFError
        found, self.data = self.data[:count], self.data[count:]
        return found

    def head(self) -> tuple[int, list[tuple[str, str]]]:
        first, *lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 ([1-5]\d\d) [ -~]*", first)
        pairs = [re.fullmatch(r"([!#-'*+.0-9A-Z^-z|~-]+): ?([ -~]*)", line) for line in lines]
        if match is None or not all(pairs):
            raise ValueError(f"no HTTP: {first!r} {lines!r}")
        return int(match[1]), [(pair[1].lower(), pair[2]) for pair in pairs if pair is not None]

    def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.until(b"\r\n"), 16):
                body += self.take(size + 2)[:-2]
            if self.until(b"\r\n"):
                raise ValueError("a trailer")
            return body
        if "content-length" in headers:
            return self.take(int(headers["content-length"]))
        while self.fill():
            pass
        body, self.data = self.data, b""
        return body


def _send(connection: socket.socket, data: bytes) -> int:
    """Sends until an answer comes or the other side takes no more; returns the number of bytes."""
    sent, view = 0, memoryview(data)
    with suppress(ConnectionError):
        while sent < len(data):
            readable, writable, _ = select.select([connection], [connection], [], connection.gettimeout())
            if readable or not writable:
                break
            sent += connection.send(view[sent : sent + 2**16])
    return sent


def exchange(port: int, request: bytes, more: bytes = b"", to_end: bool = False, timeout: float = 10.0) -> Reply | None:
    """The answer to `request`, with `more` behind it up to 1024 times as long as there is none; None where the connection ends without.

    `to_end`: reads on until the connection ends. Raises TimeoutError, EOFError within an answer, ValueError for what is no HTTP.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        num_sent = _send(connection, request)
        for _ in range(1024 if more else 0):
            sent = _send(connection, more)
            num_sent += sent
            if sent < len(more):
                break
        wire, interim = Wire(connection), False
        if not wire.fill():
            return None
        status, pairs = wire.head()
        while status < 200:
            interim = True
            status, pairs = wire.head()
        empty = request.startswith(b"HEAD ") or status in (204, 304)
        body = b"" if empty else wire.body(dict(pairs))
        closed = False
        if to_end:
            connection.settimeout(min(timeout, END_SECONDS))
            with suppress(TimeoutError):
                while wire.fill():
                    pass
                closed = True
        return Reply(status, pairs, body, interim, wire.data, closed, num_sent)


UNSAFE = re.compile(r"Traceback|File \"|\.py\b|/(?:work|home|root|tmp|usr|etc)/|0x[0-9a-f]{6,}")


def error_problem(reply: Reply, openai: bool | None = None) -> str | None:
    """The problem with an error body, of one dialect or (if `openai` is None) of either; None if there is none."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        return "an error that is not JSON"
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and openai is not False:
        fits = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"} and isinstance(error["type"], str)
        message = error["message"]
    else:
        fits = (
            openai is not True
            and isinstance(body, dict)
            and set(body) == ({"error"} | (set() if reply.status in (404, 405) else {"error_type"}))
        )
        message = error
    if not fits or not isinstance(message, str) or not message:
        return "an error of another shape"
    if not message.isascii() or not message.isprintable() or len(message) > 300 or UNSAFE.search(message):
        return "a message that is not ours"
    return None if reply.header("x-request-id") else "no x-request-id"


def answer_problem(reply: Reply) -> str | None:
    """The problem with any answer; None if there is none."""
    # A request may limit its own time, and be told that this was too little.
    own_limit = reply.status == 504 and b"the request's time limit" in reply.body
    if not (200 <= reply.status < 500 or own_limit) or reply.status == 429:
        return f"status {reply.status}"
    if reply.status >= 400:
        # An answer to HEAD has no body.
        return error_problem(reply) if reply.body or reply.header("content-length") in (None, "0") else None
    kind = (reply.header("content-type") or "").partition(";")[0]
    try:
        if kind == "application/json":
            json.loads(reply.body or b"null")
        elif kind == "text/event-stream":
            *events, end = reply.body.decode().split("\n\n")
            bad = [event for event in events if not event.startswith(("data: ", ":", "id: ", "event: "))]
            return "a stream that is none" if end or bad else None
    except ValueError:
        return "an answer that is not JSON"
    return None
