"""Server-sent events (WHATWG HTML, section 9.2) and lines of JSON: their encoding, and the response
that streams them. Knows no dialect.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.generation.arrivals import Wake, Write
from server.http.exchange import Chunks, exchange_of

_encode = msgspec.json.Encoder(enc_hook=list).encode
"""Iterators are encoded as arrays."""

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
MAX_EVENTS_PER_WRITE = 32
"""Largest number of events in one write. After that many, other tasks run, even if writing never
blocks."""
LARGE_BYTES = 2**16
DONE = b"data: [DONE]\n\n"
PREFIX = b"data: {"


class Form(NamedTuple):
    """How the JSON objects of a stream are written: what stands before their fields and after them,
    what is sent in a silence, and whether their `type` is also the event's name.
    """

    media_type: str
    prefix: bytes
    end: bytes
    comment: bytes
    named: bool = False


EVENTS = Form("text/event-stream", PREFIX, b"\n\n", KEEP_ALIVE)
NAMED_EVENTS = EVENTS._replace(named=True)
LINES = Form("application/x-ndjson", b"{", b"\n", b"")


def event(data: dict[str, Any], form: Form = EVENTS, prefix: bytes = b"") -> bytes:
    """A JSON object, which has no line breaks and so fits in one line, as `form` writes it.
    `prefix`: of `prefix_of`, in place of the form's.
    """
    name = f"event: {data.get('type', 'error')}\n".encode() if form.named else b""
    return name + (prefix or form.prefix) + _encode(data)[1:] + form.end


def prefix_of(head: dict[str, Any]) -> bytes:
    """What events begin with whose objects have the fields of `head` before those of their own:
    encoded once for all of them.
    """
    return PREFIX + _encode(head)[1:-1] + b","


class Source(Protocol):
    """Where a response's events come from."""

    @property
    def ended(self) -> bool:
        """Whether the last event has been taken."""

    def take(self) -> list[bytes]:
        """Events that have come: as many as fit one write, none if there are none now. Does not
        block.
        """

    def listen(self, wake: Wake) -> None:
        """From now on `wake` is called, on the event loop, when there may be something to take, and
        then what it returns.
        """


def is_whole(events: list[bytes]) -> bool:
    """Whether these events, just taken from a source, are all that it had. After the others, and
    after a large one, other tasks should run: one with log-probabilities of a prompt takes
    milliseconds to make.
    """
    return not events or (len(events) < MAX_EVENTS_PER_WRITE and len(events[-1]) <= LARGE_BYTES)


class EventResponse(StreamingResponse):
    """A response with status 200 that writes events as they come, and a comment after `keep_alive`
    seconds without events.

    Events are taken and written by the call that says they have come, without a switch to the
    response's task, which is left what may wait: the head, a client that does not keep up, many
    events at once, and the end. It calls `close` when it ends, in any way.
    """

    def __init__(
        self,
        source: Source,
        close: Callable[[], None],
        headers: Mapping[str, str],
        keep_alive: float,
        form: Form = EVENTS,
    ) -> None:
        # `stream_response` is overridden, so Starlette's own iterator is not used.
        super().__init__(iter(()), media_type=form.media_type, headers={**HEADERS, **headers})
        self._source = source
        self._idle: asyncio.Future[None] | None = None
        """What the task waits for when there is nothing to take. While it waits, `_push` may take
        events."""
        self._close = close
        self._keep_alive = keep_alive
        self._comment_bytes = form.comment
        self._disconnected = False
        self._last_sent: float | None = None
        """Monotonic time of the last write; None before the first and after the last one."""
        self._send: Send
        self._chunks: Chunks | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._chunks = send, exchange_of(scope).chunks

        async def watched() -> Message:
            message = await receive()
            self._disconnected = self._disconnected or message["type"] == "http.disconnect"
            return message

        comments = asyncio.create_task(self._comment())
        try:
            await super().__call__(scope, watched, send)
        finally:
            comments.cancel()
            self._source.listen(lambda: None)  # Breaks a reference cycle.
            self._close()

    async def stream_response(self, send: Send) -> None:
        self._last_sent = time.monotonic()
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        self._source.listen(self._push)
        while not self._source.ended:
            while batch := self._source.take():
                if not is_whole(batch):
                    # Writes to a closed connection never block: let the disconnect be noticed.
                    await asyncio.sleep(0)
                await self._send_part(b"".join(batch))
            if not self._source.ended:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
        self._last_sent = None
        if not self._disconnected:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _push(self) -> Write | None:
        """Takes what has come and returns what writes it, or leaves it to the task, which raises
        what is raised here.
        """
        if self._idle is None or self._idle.done():
            return None
        try:
            if self._chunks is not None and self._chunks.may_write:
                batch, write = self._source.take(), None
                if batch:
                    self._last_sent = time.monotonic()
                    write = partial(self._chunks.write, b"".join(batch))
                if is_whole(batch) and not self._source.ended:
                    return write
                if write is not None:
                    write()
            self._idle.set_result(None)
        except Exception as error:
            self._idle.set_exception(error)
        return None

    async def _send_part(self, data: bytes) -> None:
        self._last_sent = time.monotonic()
        if not self._disconnected:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self) -> None:
        """Sends a comment after each `keep_alive` seconds without a write, so that proxies do not
        close the connection.
        """
        while self._comment_bytes:
            silence = 0.0 if self._last_sent is None else time.monotonic() - self._last_sent
            if silence < self._keep_alive:
                await asyncio.sleep(self._keep_alive - silence)
            else:
                await self._send_part(self._comment_bytes)
