"""Server-sent events (WHATWG HTML, section 9.2): their encoding, and the response that streams them. Knows no dialect."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.errors import RequestError
from server.http.exchange import exchange_of, task_name

log = logging.getLogger("onehead.api")

_encode = msgspec.json.Encoder(enc_hook=list).encode
"""Iterators are encoded as arrays."""

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
MAX_EVENTS_PER_WRITE = 32
"""Largest number of events in one write. After that many, other tasks run, even if writing never blocks."""
LARGE_BYTES = 2**16
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """An event with JSON data, which has no line breaks and so fits in one data line."""
    return b"data: " + _encode(data) + b"\n\n"


def is_large(events: list[bytes]) -> bool:
    """Whether other tasks should run after these events: one with log-probabilities of a prompt takes milliseconds to make."""
    return bool(events) and len(events[-1]) > LARGE_BYTES


async def with_error_events(
    events: AsyncIterator[list[bytes]], error_event: Callable[[RequestError], bytes], last: bytes = b""
) -> AsyncIterator[list[bytes]]:
    """Batches of `events`; an error becomes an event, and `last` is sent at the end unless the task is cancelled."""
    try:
        async for each in events:
            yield each
    except RequestError as error:
        yield [error_event(error)]
    except Exception:
        log.exception("stream failed")
        yield [error_event(RequestError("internal error; the server's log has it under the request id"))]
    if last:
        yield [last]


class EventResponse(StreamingResponse):
    """A response with status 200 that writes batches of events as they come, and a comment after `keep_alive` seconds without events.

    It calls `close` when it ends, in any way: Starlette drops its iterator without closing it if a client disconnects while a write is
    paused, and what the iterator holds would be released by the garbage collector only.
    """

    def __init__(
        self,
        events: AsyncIterator[list[bytes]],
        close: Callable[[], None],
        headers: Mapping[str, str],
        keep_alive: float,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        # `stream_response` is overridden, so Starlette's own iterator is not used.
        super().__init__(iter(()), media_type="text/event-stream", headers={**HEADERS, **headers})
        self._events = events
        self._close = close
        self._keep_alive = keep_alive
        self._comment_bytes = comment
        self._disconnected = False
        self._last_sent: float | None = None
        """Monotonic time of the last write; None before the first and after the last one."""
        self._write: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = exchange_of(scope).write or send
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
            self._close()

    async def stream_response(self, send: Send) -> None:
        task_name(self._name)
        self._last_sent = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_sent = 0
        async for batch in self._events:
            num_sent += len(batch)
            if num_sent >= MAX_EVENTS_PER_WRITE or is_large(batch):
                num_sent = 0
                await asyncio.sleep(0)  # Writes to a closed connection never block: let the disconnect be noticed.
            await self._send_part(b"".join(batch))
        self._last_sent = None
        if not self._disconnected:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, data: bytes) -> None:
        self._last_sent = time.monotonic()
        if not self._disconnected:
            await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self) -> None:
        """Sends a comment after each `keep_alive` seconds without a write, so that proxies do not close the connection."""
        while True:
            silence = 0.0 if self._last_sent is None else time.monotonic() - self._last_sent
            await asyncio.sleep(max(0.0, self._keep_alive - silence))
            if self._last_sent is not None and time.monotonic() - self._last_sent >= self._keep_alive:
                await self._send_part(self._comment_bytes)
