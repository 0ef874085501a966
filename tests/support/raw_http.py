"""A raw HTTP exchange over a socket: sends any bytes, and parses the answer strictly.

It knows the shapes of error bodies, and nothing of the request.
"""

import json
import re
import select
import socket
from contextlib import suppress
from dataclasses import dataclass

from tests.support.paths import ROOT
from tests.support.wire import NoResponse, Wire

END_SECONDS = 2.0
"""Time until a connection that must be closed is closed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `interim`: a 1xx came first. `rest`: bytes after it until the connection ended,
    which `closed` reports.
    """

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


def _send(connection: socket.socket, data: bytes) -> int:
    """Sends until an answer comes or the other side takes no more; returns the number of bytes."""
    sent, view = 0, memoryview(data)
    with suppress(ConnectionError):
        while sent < len(data):
            readable, writable, _ = select.select(
                [connection], [connection], [], connection.gettimeout()
            )
            if readable or not writable:
                break
            sent += connection.send(view[sent : sent + 2**16])
    return sent


ENDLESS = re.compile(rb"GET (?:http://[^/ ]+)?/monitor[? ]")
"""Requests whose answers have no end; the first part is taken."""


def exchange(
    port: int, request: bytes, more: bytes = b"", to_end: bool = False, timeout: float = 10.0
) -> Reply | None:
    """Sends `request`, then `more` up to 1024 times until an answer begins. Returns the answer, or
    None if the connection ends without one.

    `to_end`: reads on until the connection ends. Raises TimeoutError, EOFError within an answer,
    ValueError for what is no HTTP.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        num_sent = _send(connection, request)
        for _ in range(1024 if more else 0):
            sent = _send(connection, more)
            num_sent += sent
            if sent < len(more):
                break
        wire = Wire(connection)
        try:
            response = wire.response("HEAD" if request.startswith(b"HEAD ") else "GET")
        except NoResponse:
            return None
        is_endless = response.status == 200 and ENDLESS.match(request)
        body, closed = next(response.pieces(), b"") if is_endless else response.body(), False
        if to_end:
            connection.settimeout(min(timeout, END_SECONDS))
            with suppress(TimeoutError):
                while data := wire.receive():
                    wire.rest += data
                closed = True
        return Reply(
            response.status, response.headers, body, response.interim, wire.rest, closed, num_sent
        )


UNSAFE = re.compile(
    rf"Traceback|File \"|\.py\b|/(?:home|root|tmp|usr|etc)/|{re.escape(str(ROOT))}|0x[0-9a-f]{{6,}}"
)


def error_problem(reply: Reply, openai: bool | None = None) -> str | None:
    """The problem with an error body, of one dialect or (if `openai` is None) of any; None if
    there is none.
    """
    try:
        body = json.loads(reply.body)
    except ValueError:
        return "an error that is not JSON"
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and openai is None and body.get("type") == "error":
        fits = set(body) == {"type", "error"} and set(error) == {"type", "message"}
        message = error.get("message")
    elif isinstance(error, dict) and openai is not False:
        fits = (
            set(body) == {"error"}
            and set(error) == {"message", "type", "param", "code"}
            and isinstance(error["type"], str)
        )
        message = error["message"]
    else:
        plain, typed = {"error"}, {"error", "error_type"}  # Ollama's is always plain.
        forms = [plain] if reply.status in (404, 405) else [typed, plain][: 1 + (openai is None)]
        fits = openai is not True and isinstance(body, dict) and set(body) in forms
        message = error
    if not fits or not isinstance(message, str) or not message:
        return "an error of another shape"
    if (
        not message.isascii()
        or not message.isprintable()
        or len(message) > 300
        or UNSAFE.search(message)
    ):
        return "a message that is not ours"
    return None if reply.header("x-request-id") else "no x-request-id"


def answer_problem(reply: Reply) -> str | None:
    """The problem with any answer; None if there is none."""
    # A request may limit its own time, and be told that this was too little; or need what HTTP has
    # and this server has not.
    own_limit = reply.status == 504 and b"the request's time limit" in reply.body
    if (
        not (200 <= reply.status < 500 or own_limit or reply.status in (501, 505))
        or reply.status == 429
    ):
        return f"status {reply.status}"
    if reply.status >= 400:
        # An answer to HEAD has no body.
        return (
            error_problem(reply)
            if reply.body or reply.header("content-length") in (None, "0")
            else None
        )
    kind = (reply.header("content-type") or "").partition(";")[0]
    try:
        if kind == "application/json":
            json.loads(reply.body or b"null")
        elif kind == "text/event-stream":
            *events, end = reply.body.decode().split("\n\n")
            bad = [
                event
                for event in events
                if not event.startswith(("data: ", ":", "id: ", "event: "))
            ]
            return "a stream that is none" if end or bad else None
    except ValueError:
        return "an answer that is not JSON"
    return None
