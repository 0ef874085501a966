"""JSON answers made in pieces, with the event loop running in between: their size delays no other
request.

Invariant: however many answers are made at once, they take SLICE_SECONDS of a turn of the event
loop together, and about half of a processor's time, so that the engine is not slowed down much. It
knows no dialect.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

SLICE_SECONDS = 0.002
ROWS = 64
WHOLE_BYTES = 2**20
"""Answers up to this size are sent with their content-length; longer ones are never held as a
whole."""

_encode = msgspec.json.Encoder().encode


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON text of a value in pieces. In it an iterator stands for an array, of which ROWS
    items are taken at a time, and a function for its result, which is made when it is needed.
    """
    if callable(value):
        yield from pieces(value())
    elif isinstance(value, dict):
        opening = b"{"
        for key, item in value.items():
            yield opening + _encode(key) + b":"
            yield from pieces(item)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and (isinstance(value[0], dict) or callable(value[0])):
        opening = b"["
        for item in value:
            yield opening
            yield from pieces(item)
            opening = b","
        yield b"]"
    elif isinstance(value, Iterator):
        opening = b"["
        while rows := [*islice(value, ROWS)]:
            yield opening + _encode(rows)[1:-1]
            opening = b","
        yield b"[]" if opening == b"[" else b"]"
    else:
        yield _encode(value)


class JsonAnswers:
    """Makes the responses of one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def response(self, value: Any, headers: dict[str, str] | None = None) -> Response:
        """The response with this value, as `pieces` takes it."""
        parts, begun = self._paced(pieces(value)), b""
        async for part in parts:
            begun += part
            if len(begun) > WHOLE_BYTES:
                whole = _joined(begun, parts)
                return StreamingResponse(whole, headers=headers, media_type="application/json")
        return Response(begun, headers=headers, media_type="application/json")

    async def _paced(self, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
        """What is made of `parts` in one slice after the other."""
        ended = False
        while not ended:
            made: list[bytes] = []
            async with self._turn:
                end = time.monotonic() + SLICE_SECONDS
                for part in parts:
                    made.append(part)
                    if time.monotonic() > end:
                        # Inside, so that the next slice, of any answer, comes after the pause.
                        await asyncio.sleep(SLICE_SECONDS)
                        break
                else:
                    ended = True
            yield b"".join(made)


async def _joined(begun: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    async for part in parts:
        yield part
