"""JSON answers made in pieces, with the event loop running in between: their size delays no other request.

Invariant: the bytes are those of Starlette's JSONResponse. However many answers are made at once, they take SLICE_SECONDS of a turn of the
event loop together. It knows no dialect.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from starlette.responses import Response, StreamingResponse

from server.http.exchange import task_name

SLICE_SECONDS = 0.002
ROWS = 64
WHOLE_BYTES = 2**20
"""Answers up to this size are sent with their content-length; longer ones are never held as a whole."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value in pieces. In it an iterator stands for an array, of which ROWS items are taken at a time, and a function
    for its result, which is made when it is needed.
    """
    if callable(value):
        yield from pieces(value())
    elif isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' * (number > 0)}{_encode(key)}:"
            yield from pieces(item)
        yield "}"
    elif isinstance(value, list) and value and (isinstance(value[0], dict) or callable(value[0])):
        yield "["
        for number, item in enumerate(value):
            yield "," * (number > 0)
            yield from pieces(item)
        yield "]"
    elif isinstance(value, Iterator):
        opening = "["
        while rows := [*islice(value, ROWS)]:
            yield opening + _encode(rows)[1:-1]
            opening = ","
        yield "[]" if opening == "[" else "]"
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
                return StreamingResponse(_joined(task_name(), begun, parts), headers=headers, media_type="application/json")
        return Response(begun, headers=headers, media_type="application/json")

    async def _paced(self, texts: Iterator[str]) -> AsyncIterator[bytes]:
        """What is made of `texts` in one slice after the other."""
        ended = False
        while not ended:
            made: list[str] = []
            async with self._turn:
                end = time.monotonic() + SLICE_SECONDS
                for text in texts:
                    made.append(text)
                    if time.monotonic() > end:
                        await asyncio.sleep(0)  # Inside, so that the next slice, of any answer, is in the next turn of the loop.
                        break
                else:
                    ended = True
            yield "".join(made).encode()


async def _joined(name: str, begun: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    task_name(name)
    yield begun
    async for part in parts:
        yield part
