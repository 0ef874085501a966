"""Server-sent events as bytes, and the response that carries them (WHATWG HTML, section 9.2)."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def event(data: Any) -> bytes:
    """One event with JSON data. JSON holds no line break, so one data line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


class EventResponse(StreamingResponse):
    """A 200 that sends each event as it comes, and calls `close` when it ends, however it ends.

    Starlette drops its iterator without closing it when a client leaves while a write is paused; what the iterator holds would wait
    for the garbage collector.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
