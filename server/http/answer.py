"""Answers: what a started request gives, as one JSON body, as server-sent events, or as a resumable stream. The same for every dialect.

Invariant: the sequences of a request are closed when its answer ends, however it ends. It knows no fields of any dialect.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.errors import InvalidRequest, RequestError
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.disconnect import unless_disconnected
from server.http.errors import error_body
from server.http.exchange import Dialect, exchange_of
from server.http.streams import StreamPublisher


class Reply(Protocol):
    """Pieces of one request to the JSON of its route."""

    streams: OpenStreams

    def first(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""

    def take(self, piece: Piece) -> object:
        """Accounts for a piece of an answer that is not streamed."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Accounts for a piece of a stream; its chunks."""

    def last(self) -> list[dict[str, Any]]:
        """Chunks after the last piece."""

    def whole(self) -> Any:
        """The answer that is not streamed, when every piece has been taken."""

    def headers(self, whole: bool) -> dict[str, str]:
        """Headers of the response; of one that is not streamed, when every piece has been taken."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is wanted. `last` ends a stream."""

    stream: bool
    resumable: bool
    last: bytes = b""

    @classmethod
    def of(cls, http: HttpRequest, stream: bool, resumable: bool | None, last: bytes = b"") -> "Delivery":
        """What a request asks for, `resumable` in its body or by header. Raises InvalidRequest."""
        resumable = bool(resumable) if resumable is not None else http.headers.get("x-stream-resumable") == "1"
        if resumable and not stream:
            raise InvalidRequest('`resumable` needs `"stream": true`', param="resumable")
        return cls(stream, resumable, last)


@dataclass(frozen=True, slots=True)
class Answers:
    """Sends answers; a silent stream gets a comment every `keep_alive` seconds."""

    publications: StreamPublisher
    keep_alive: float

    async def answer(self, http: HttpRequest, reply: Reply, delivery: Delivery) -> Response:
        """The response for a started request. Raises RequestError for a failure before the first piece."""
        close, error_event = reply.streams.close, partial(_error_event, exchange_of(http).dialect)
        try:
            if delivery.resumable:
                return self.publications.publish(http, _events(reply, None), close, error_event, reply.headers(False), delivery.last)
            if not delivery.stream:
                value = await unless_disconnected(http, whole(reply))
                return JSONResponse(value, headers=reply.headers(True))
            first = await unless_disconnected(http, reply.streams.first_piece(self.keep_alive))
            events = sse.with_error_events(_events(reply, first), error_event, delivery.last)
            return sse.EventResponse(events, close, reply.headers(False), self.keep_alive)
        except BaseException:
            close()
            raise


async def whole(reply: Reply) -> Any:
    """The answer that is not streamed."""
    async for piece in reply.streams:
        reply.take(piece)
    return reply.whole()


def mean_logprob(logprobs: Sequence[float | None]) -> float:
    """The mean log-probability of a sequence's tokens, by which the best of several sequences is chosen."""
    return sum(logprob or 0.0 for logprob in logprobs) / max(1, len(logprobs))


def check_stops(name: str, stops: Sequence[str] | None, most: int, param: str | None = None) -> None:
    """Raises InvalidRequest for more than `most` stop strings."""
    if len(stops or ()) > most:
        raise InvalidRequest(f"`{name}` supports up to {most} stop sequences. Given: {len(stops or ())}", param=param)


def _error_event(dialect: Dialect, error: RequestError) -> bytes:
    return sse.event(error_body(error, dialect))


async def _events(reply: Reply, first: Piece | None) -> AsyncIterator[list[bytes]]:
    """One event for each chunk; those of pieces that have arrived together are sent together. Raises RequestError."""
    chunks = [*reply.first(), *(reply.chunks(first) if first is not None else ())]
    if chunks:
        yield [sse.event(chunk) for chunk in chunks]
    async for piece in reply.streams:
        chunks = reply.chunks(piece)
        while len(chunks) < sse.MAX_EVENTS_PER_WRITE and (more := reply.streams.take()) is not None:
            chunks += reply.chunks(more)
        if chunks:
            yield [sse.event(chunk) for chunk in chunks]
    if chunks := reply.last():
        yield [sse.event(chunk) for chunk in chunks]
