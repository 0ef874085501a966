"""Server-sent events as bytes, and the response that carries them (WHATWG HTML, section 9.2)."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

_encode = msgspec.json.Encoder().encode

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def event(data: Any) -> bytes:
    """One event with JSON data. JSON holds no line break, so one data line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


def response(events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> StreamingResponse:
    """A 200 that sends each event as it comes. A client that leaves ends the iteration."""
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS | (headers or {}))
