"""Server-sent events (WHATWG HTML, section 9.2): their encoding, and the response that streams them. Knows no dialect."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.generation.arrivals import Wake, Write
from server.http.exchange import Chunks, exchange_of, task_name
from server.supervision.token_writer import ClientSocket

_encode = msgspec.json.Encoder(enc_hook=list).encode
"""Iterators are encoded as arrays."""

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
MAX_EVENTS_PER_WRITE = 32
"""Largest number of events in one write. After that many, other tasks run, even if writing never blocks."""
LARGE_BYTES = 2**16
DONE = b"data: [DONE]\n\n"
PREFIX = b"data: {"


def event(data: dict[str, Any], prefix: bytes = PREFIX) -> bytes:
    """An event with a JSON object, which has no line breaks and so fits in one data line. `prefix`: of `prefix_of`."""
    return prefix + _encode(data)[1:] + b"\n\n"


def prefix_of(head: dict[str, Any]) -> bytes:
    """What events begin with whose objects have the fields of `head` before those of their own: encoded once for all of them."""
    return PREFIX + _encode(head)[1:-1] + b","


class Source(Protocol):
    """Where a response's events come from."""

    @property
    def ended(self) -> bool:
        """Whether the last event has been taken."""

    def take(self) -> list[bytes]:
        """Events that have come: as many as fit one write, none if there are none now. Does not block."""

    def listen(self, wake: Wake) -> None:
        """From now on `wake` is called, on the event loop, when there may be something to take, and then what it returns."""

    def write_natively(self, client: ClientSocket) -> None:
        """All that was taken has been sent: until `client` is held, native code may write what comes next, which is not taken then."""


def is_whole(events: list[bytes]) -> bool:
    """Whether these events, just taken from a source, are all that it had. After the others, and after a large one, other tasks should run:
    one with log-probabilities of a prompt takes milliseconds to make.
    """
    return not events or (len(events) < MAX_EVENTS_PER_WRITE and len(events[-1]) <= LARGE_BYTES)


class EventResponse(StreamingResponse):
    """A response with status 200 that writes events as they come, and a comment after `keep_alive` seconds without events.

    Events are taken and written by the call that says they have come, without a switch to the response's task, which is left what may
    wait: the head, a client that does not keep up, many events at once, and the end. Between its own writes native code writes plain
    tokens. It calls `close` when it ends, in any way.
    """

    def __init__(
        self,
        source: Source,
        close: Callable[[], None],
        headers: Mapping[str, str],
        keep_alive: float,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        # `stream_response` is overridden, so Starlette's own iterator is not used.
        super().__init__(iter(()), media_type="text/event-stream", headers={**HEADERS, **headers})
        self._source = source
        self._idle: asyncio.Future[None] | None = None
        """What the task waits for when there is nothing to take. While it waits, `_push` may take events."""
        self._close = close
        self._keep_alive = keep_alive
        self._comment_bytes = comment
        self._disconnected = False
        self._last_sent: float | None = None
        """Monotonic time of the last write; None before the first and after the last one."""
        self._send: Send
        self._chunks: Chunks | None = None
        self._client: ClientSocket | None = None
        self._is_commenting = False
        """Whether a comment is to be sent, which may wait for the client to read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        self._send, self._chunks = send, exchange.chunks
        self._client = None if exchange.chunks is None else exchange.chunks.client
        self._name = task_name()

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
            self._hold()
            self._close()

    async def stream_response(self, send: Send) -> None:
        task_name(self._name)
        self._last_sent = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._source.listen(self._push)
        while not self._source.ended:
            self._hold()
            while batch := self._source.take():
                if not is_whole(batch):
                    await asyncio.sleep(0)  # Writes to a closed connection never block: let the disconnect be noticed.
                await self._send_part(b"".join(batch))
            if not self._source.ended:
                self._idle = asyncio.get_running_loop().create_future()
                self._leave_to_native_code()
                await self._idle
        self._hold()
        self._last_sent = None
        if not self._disconnected:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _push(self) -> Write | None:
        """Takes what has come and returns what writes it, or leaves it to the task, which raises what is raised here."""
        if self._idle is None or self._idle.done():
            return None
        try:
            self._hold()
            if self._chunks is not None and self._chunks.may_write:
                batch = self._source.take()
                self._last_sent = time.monotonic()
                if is_whole(batch) and not self._source.ended:
                    return partial(self._write, self._chunks, batch)
                if batch:
                    self._chunks.write(b"".join(batch))
            self._idle.set_result(None)
        except Exception as error:
            self._idle.set_exception(error)
        return None

    def _write(self, chunks: Chunks, batch: list[bytes]) -> None:
        if batch:
            chunks.write(b"".join(batch))
        self._leave_to_native_code()

    def _hold(self) -> None:
        """From now on only this object writes."""
        if self._client is not None:
            self._client.hold()

    def _leave_to_native_code(self) -> None:
        """Until `_hold`, if the response's task waits and nothing is to be sent."""
        if self._client is None or self._chunks is None or self._idle is None or self._idle.done() or self._is_commenting:
            return
        if self._chunks.may_write and self._chunks.all_sent:
            self._source.write_natively(self._client)

    async def _send_part(self, data: bytes) -> None:
        self._last_sent = time.monotonic()
        if not self._disconnected:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self) -> None:
        """Sends a comment after each `keep_alive` seconds without a write, so that proxies do not close the connection."""
        while True:
            await asyncio.sleep(max(0.0, self._keep_alive - self._silence))
            if self._last_sent is not None and self._silence >= self._keep_alive:
                self._is_commenting = True
                self._hold()
                await self._send_part(self._comment_bytes)
                self._is_commenting = False
                self._leave_to_native_code()

    @property
    def _silence(self) -> float:
        """Seconds since the last write; 0 before the first and after the last one."""
        if self._last_sent is None:
            return 0.0
        return time.monotonic() - max(self._last_sent, self._client.last_write if self._client is not None else 0.0)
