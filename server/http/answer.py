"""Replies: what every dialect's answers are made of, and their events.

It knows no dialect's fields, and no responses.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from server.errors import RequestError
from server.generation.arrivals import Wake
from server.generation.request import Choice
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.errors import Dialect
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
    last: bytes = b""
    """What ends a stream, such as `data: [DONE]`."""

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

    def error_chunk(self, error: RequestError, dialect: Dialect) -> dict[str, Any]:
        """The chunk by which a stream ends that has failed."""
        return dialect.body(error)

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


async def full_response(reply: Reply) -> Any:
    """Waits for all pieces; the JSON value of a reply that is not streamed."""
    async for piece in reply.streams:
        reply.take(piece)
    return reply.full_response()


@dataclass(slots=True)
class ReplyEvents:
    """The events of a reply, one for each chunk; an error becomes an event, as the dialect has it,
    and the reply's `last` follows them all. `first`: a piece that was taken of it already.
    """

    reply: Reply
    dialect: Dialect
    first: Piece | None = None
    has_begun: bool = False
    ended: bool = False

    def listen(self, wake: Wake) -> None:
        self.reply.streams.listen(wake)

    def take(self) -> list[bytes]:
        events: list[bytes] = []
        if self.ended:
            return events
        try:
            self._fill(events)
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("stream failed")
                text = "internal error; the server's log has it under the request id"
                error = RequestError(text)
            chunk = self.reply.error_chunk(error, self.dialect)
            events.append(sse.event(chunk, self.reply.form))
            self.ended = True
        if self.ended and self.reply.last:
            events.append(self.reply.last)
        return events

    def _fill(self, events: list[bytes]) -> None:
        reply, streams = self.reply, self.reply.streams
        if not self.has_begun:
            self.has_begun = True
            self._add(events, reply.first_chunks())
            self._add(events, reply.chunks(self.first) if self.first is not None else ())
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
            events.append(sse.event(chunk, self.reply.form, self.reply.prefix))
