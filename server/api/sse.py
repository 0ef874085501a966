"""Server-sent events as bytes, and the response that carries them (WHATWG HTML, section 9.2)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

_encode = msgspec.json.Encoder().encode

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event with JSON data. JSON holds no line break, so one data line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


class EventResponse(StreamingResponse):
    """A 200 that sends each event as it comes, a comment where none comes for `keep_alive` seconds, and calls `close` when it ends,
    however it ends.

    Starlette drops its iterator without closing it when a client leaves while a write is paused; what the iterator holds would wait
    for the garbage collector.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
        keep_alive: float,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**HEADERS, **headers})
        self._close = close
        self._keep_alive = keep_alive
        self._comment_bytes = comment
        self._last: float | None = None
        """When something was last sent; None before the first and after the last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            over = message["type"] == "http.response.body" and not message.get("more_body", False)
            self._last = None if over else time.monotonic()
            await send(message)

        comments = asyncio.create_task(self._comment(send))
        try:
            await super().__call__(scope, receive, noted)
        finally:
            comments.cancel()
            self._close()

    async def _comment(self, send: Send) -> None:
        """A comment in every silence of `keep_alive` seconds: proxies close what says nothing."""
        while True:
            silence = 0.0 if self._last is None else time.monotonic() - self._last
            await asyncio.sleep(max(0.0, self._keep_alive - silence))
            if self._last is not None and time.monotonic() - self._last >= self._keep_alive:
                self._last = time.monotonic()
                await send({"type": "http.response.body", "body": self._comment_bytes, "more_body": True})
