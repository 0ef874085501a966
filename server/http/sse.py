"""Server-sent events as bytes, and the response that carries them (WHATWG HTML, section 9.2)."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.errors import RequestError
from server.http.exchange import exchange_of

log = logging.getLogger("onehead.api")

_encode = msgspec.json.Encoder().encode

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
MAX_EVENTS_PER_WRITE = 32
"""Events after which others get their turn, however fast they can be written; at most this many are written together."""
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event with JSON data. JSON holds no line break, so one data line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


async def with_error_events(
    events: AsyncIterator[list[bytes]], error_event: Callable[[RequestError], bytes], last: bytes = b""
) -> AsyncIterator[list[bytes]]:
    """`events` with an end in any case: what goes wrong is an event too, and `last` stands behind everything."""
    try:
        async for each in events:
            yield each
    except RequestError as error:
        yield [error_event(error)]
    except Exception:
        log.exception("a stream failed")
        yield [error_event(RequestError("internal error; the server's log has it under the request id"))]
    if last:
        yield [last]


class EventResponse(StreamingResponse):
    """A 200 that sends events as they come, those that come together in one piece, and a comment where none comes for `keep_alive`
    seconds; it calls `close` when it ends, however it ends.

    Starlette drops its iterator without closing it when a client leaves while a write is paused; what the iterator holds would wait
    for the garbage collector.
    """

    def __init__(
        self,
        events: AsyncIterator[list[bytes]],
        close: Callable[[], None],
        headers: Mapping[str, str],
        keep_alive: float,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        # Starlette's own way through the body is overridden: events are sent together, and past everybody between here and the socket.
        super().__init__(iter(()), media_type="text/event-stream", headers={**HEADERS, **headers})
        self._events = events
        self._close = close
        self._keep_alive = keep_alive
        self._comment_bytes = comment
        self._disconnected = False
        self._last_sent: float | None = None
        """When something was last sent; None before the first and after the last."""
        self._write: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = exchange_of(scope).write or send

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
        self._last_sent = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_sent = 0
        async for batch in self._events:
            num_sent += len(batch)
            if num_sent >= MAX_EVENTS_PER_WRITE:
                num_sent = 0
                await asyncio.sleep(0)  # To one who has left, writing never waits: whoever should say so would not get a word in.
            await self._send_part(b"".join(batch))
        self._last_sent = None
        if not self._disconnected:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, data: bytes) -> None:
        self._last_sent = time.monotonic()
        if not self._disconnected:
            await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self) -> None:
        """A comment in every silence of `keep_alive` seconds: proxies close what says nothing."""
        while True:
            silence = 0.0 if self._last_sent is None else time.monotonic() - self._last_sent
            await asyncio.sleep(max(0.0, self._keep_alive - silence))
            if self._last_sent is not None and time.monotonic() - self._last_sent >= self._keep_alive:
                await self._send_part(self._comment_bytes)
