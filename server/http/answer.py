"""Answers: sends the reply of a started request as one JSON body, as server-sent events or lines of
JSON, or as a resumable stream, for every dialect.

Invariant: the sequences of a request are closed when its answer ends, however it ends. It knows no
dialect's fields.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import InvalidRequest, RequestError
from server.generation.arrivals import Wake
from server.generation.request import Choice
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.disconnect import unless_disconnected
from server.http.exchange import exchange_of
from server.http.pieces import JsonAnswers
from server.http.streams import StreamPublisher
from server.text.codec import TextCodec

log = logging.getLogger("onehead.api")


class Reply(Protocol):
    """Base of every dialect's replies: converts the pieces of one request into JSON, whole or chunk
    by chunk.
    """

    streams: OpenStreams
    form: sse.Form = sse.EVENTS
    prefix: bytes = b""
    """What every event of a stream begins with, as sse.prefix_of makes it; empty: the form's."""

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks that a stream sends before its first piece."""
        return []

    def take(self, piece: Piece) -> object:
        """Adds a piece to the state of the reply."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Adds a piece; returns the chunks that a stream sends for it."""

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunks that a stream sends after its last piece."""
        return []

    def full_response(self) -> Any:
        """The JSON value of a reply that is not streamed, after its last piece; as
        server.http.pieces takes it.
        """

    def headers(self, streamed: bool) -> dict[str, str]:
        """Headers of the response; called after the last piece unless it is streamed."""
        return {}


class OutputToken(msgspec.Struct, gc=False):
    """One generated token as replies show it. `top`: (id, log-probability) of the most likely
    tokens at its position.
    """

    id: int
    logprob: float | None
    top: Iterable[tuple[int, float]] = ()
    text: str = ""
    special: bool = False


def token_entries(
    codec: TextCodec, tokens: Iterable[OutputToken], name: Callable[[int, str | None], str]
) -> Iterator[dict[str, Any]]:
    """The log-probabilities of tokens, and of the most likely ones at their positions, as OpenAI's
    chat shows them. `name` gives a token's name from its id and, if known, its text at that place.
    """

    def entry(id: int, logprob: float | None, text: str | None) -> dict[str, Any]:
        bytes = [*codec.token_bytes(id)]
        return {"token": name(id, text), "logprob": logprob or 0.0, "bytes": bytes}

    for token in tokens:
        yield entry(token.id, token.logprob, token.text) | {
            "top_logprobs": [
                entry(id, logprob, token.text if id == token.id else None)
                for id, logprob in token.top
            ]
        }


@dataclass(slots=True)
class Output:
    """The text and the tokens of one sequence so far; `finish` and `stop` are those of its last
    piece.
    """

    choice: Choice
    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def take(self, piece: Piece) -> list[OutputToken]:
        """Adds a piece. Returns its token, or an empty list where it has none."""
        new = []
        if piece.token is not None:
            new = [
                OutputToken(piece.token, piece.logprob, piece.top, piece.token_text, piece.special)
            ]
        self.tokens += new
        self.text += piece.text
        self.finish, self.stop = piece.finish, piece.stop
        return new

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens, by which the best of several sequences is
        chosen.
        """
        return sum(token.logprob or 0.0 for token in self.tokens) / max(1, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request asks for its answer. `last`: bytes that end a stream, such as `data:
    [DONE]`.
    """

    stream: bool
    resumable: bool
    last: bytes = b""

    @classmethod
    def of(
        cls, http: HttpRequest, stream: bool, resumable: bool | None, last: bytes = b""
    ) -> "Delivery":
        """`resumable` is taken from the body, else from the header x-stream-resumable. Raises
        InvalidRequest.
        """
        resumable = (
            bool(resumable)
            if resumable is not None
            else http.headers.get("x-stream-resumable") == "1"
        )
        if resumable and not stream:
            raise InvalidRequest('`resumable` needs `"stream": true`', param="resumable")
        return cls(stream, resumable, last)


@dataclass(frozen=True, slots=True)
class Answers:
    """Sends answers, resumable ones by `publisher`."""

    publisher: StreamPublisher
    json_answers: JsonAnswers = field(default_factory=JsonAnswers)

    async def answer(self, http: HttpRequest, reply: Reply, delivery: Delivery) -> Response:
        """The response of a started request. Raises RequestError for a failure before the first
        piece.
        """
        close = reply.streams.close
        error_event = partial(sse.error_event, exchange_of(http).dialect, reply.form)
        try:
            if delivery.resumable:
                source = ReplyEvents(reply, None, error_event, delivery.last)
                headers = reply.headers(streamed=True)
                return self.publisher.publish(
                    http, source, reply.streams, reply.form, headers, delivery.last
                )
            exchange_of(http).body = b""  # Only a resumable stream is asked for again.
            if not delivery.stream:
                value = await unless_disconnected(http, full_response(reply))
                return await self.json_answers.response(value, reply.headers(streamed=False))
            first = await unless_disconnected(
                http, reply.streams.first_piece(self.publisher.keep_alive)
            )
            source = ReplyEvents(reply, first, error_event, delivery.last)
            headers = reply.headers(streamed=True)
            return sse.EventResponse(source, close, headers, self.publisher.keep_alive, reply.form)
        except BaseException:
            close()
            raise


async def full_response(reply: Reply) -> Any:
    """Waits for all pieces; the JSON value of a reply that is not streamed."""
    async for piece in reply.streams:
        reply.take(piece)
    return reply.full_response()


class ReplyEvents:
    """The events of a reply, one for each chunk; an error becomes an event, and `last` follows them
    all.
    """

    def __init__(
        self,
        reply: Reply,
        first: Piece | None,
        error_event: Callable[[RequestError], bytes],
        last: bytes,
    ) -> None:
        self._reply, self._first, self._error_event, self._last = reply, first, error_event, last
        self._has_begun = False
        self.ended = False

    def listen(self, wake: Wake) -> None:
        self._reply.streams.listen(wake)

    def take(self) -> list[bytes]:
        events: list[bytes] = []
        if self.ended:
            return events
        try:
            self._fill(events)
        except RequestError as error:
            events.append(self._error_event(error))
            self.ended = True
        except Exception:
            log.exception("stream failed")
            events.append(
                self._error_event(
                    RequestError("internal error; the server's log has it under the request id")
                )
            )
            self.ended = True
        if self.ended and self._last:
            events.append(self._last)
        return events

    def _fill(self, events: list[bytes]) -> None:
        reply, streams = self._reply, self._reply.streams
        if not self._has_begun:
            self._has_begun = True
            self._add(events, reply.first_chunks())
            self._add(events, reply.chunks(self._first) if self._first is not None else ())
        while sse.is_whole(events):
            piece = streams.take()
            if piece is None:
                if streams.ended:
                    self._add(events, reply.last_chunks())
                    self.ended = True
                return
            self._add(events, reply.chunks(piece))

    def _add(self, events: list[bytes], chunks: Iterable[dict[str, Any]]) -> None:
        for chunk in chunks:
            events.append(sse.event(chunk, self._reply.form, self._reply.prefix))
