"""Handlers: the way of a request from its body to its response, which the dialects share: one JSON
body, server-sent events or lines of JSON, or a resumable stream.

Invariant: a body is read and checked before a sequence is started; the sequences of a request are
closed when its answer ends, however it ends. It knows no dialect's fields.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.embedding import Embedded, Given, embed
from server.generation.generation import Generation
from server.http import sse
from server.http.answer import Reply, ReplyEvents, full_response
from server.http.body import read_model
from server.http.disconnect import unless_disconnected
from server.http.exchange import exchange_of
from server.http.fields import Body
from server.http.model_names import ModelNames
from server.http.pieces import JsonAnswers
from server.http.streams import StreamPublisher
from server.text.jobs import AnyJob

ReadBody = TypeVar("ReadBody", bound=Body)
Open = Callable[[Generation, Any, str, Reservation], Awaitable[Reply]]
"""Starts the sequences of a body, for the model of a name. Raises RequestError."""


def resumes(http: HttpRequest, stream: bool, resumable: bool | None) -> bool:
    """Whether a request asks for a resumable stream: by `resumable` of its body, else by the header
    x-stream-resumable. Raises InvalidRequest.
    """
    if resumable is None:
        resumable = http.headers.get("x-stream-resumable") == "1"
    if resumable and not stream:
        raise InvalidRequest('`resumable` needs `"stream": true`', param="resumable")
    return resumable


class Answers(JsonAnswers):
    """Sends answers, resumable ones by `publisher`."""

    def __init__(self, publisher: StreamPublisher) -> None:
        super().__init__()
        self.publisher = publisher

    async def answer(
        self, http: HttpRequest, reply: Reply, stream: bool, resumable: bool = False
    ) -> Response:
        """The response of a started request. Raises RequestError for a failure before the first
        piece.
        """
        exchange, streams, keep_alive = exchange_of(http), reply.streams, self.publisher.keep_alive
        source = ReplyEvents(reply, exchange.dialect)
        exchange.ignored += streams.choices[0].request.ignored
        try:
            if resumable:
                return self.publisher.publish(http, source)
            exchange.body = b""  # Only a resumable stream is asked for again.
            if not stream:
                value = await unless_disconnected(http, full_response(reply))
                return await self.response(value, reply.headers(streamed=False))
            source.first = await unless_disconnected(http, streams.first_piece(keep_alive))
            headers = reply.headers(streamed=True)
            return sse.EventResponse(source, streams.close, headers, keep_alive, reply.form)
        except BaseException:
            streams.close()
            raise


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of the server that the routes of every dialect work with."""

    generation: Generation
    section: ServerSection
    names: ModelNames
    answers: Answers


class Handlers:
    """Base of a dialect's handlers."""

    def __init__(self, context: Context) -> None:
        self.generation, self.section = context.generation, context.section
        self.names, self.answers = context.names, context.answers

    async def read(self, http: HttpRequest, schema: type[ReadBody]) -> ReadBody:
        """The body of a request. Raises RequestError."""
        body = await read_model(http, schema, self.section)
        exchange_of(http).ignored += self.fit(body)
        return body

    async def read_named(self, http: HttpRequest, schema: type[ReadBody]) -> ReadBody:
        """The body of a request that names the model. Raises RequestError, NotFound for another
        one.
        """
        body = await self.read(http, schema)
        self.check_model(body, http)
        return body

    async def convert(self, http: HttpRequest, job: AnyJob) -> Any:
        """Generation.convert, for the client of a request."""
        exchange = exchange_of(http)
        return await self.generation.convert(job, exchange.client, exchange.terms)

    def fit(self, body: Body) -> list[str]:
        """Leaves out what the chat template does not read, and returns its places. Raises
        InvalidRequest.
        """
        ignored = body.fit(self.generation.texts.variables)
        if ignored and self.section.strict_fields:
            text = f"`{ignored[0]}` has no effect with this model (server.strict_fields)"
            raise InvalidRequest(text, param=ignored[0])
        return ignored

    async def answer(self, http: HttpRequest, schema: type[Any], open: Open) -> Response:
        """The response to a request of a route that generates."""
        body = await self.read(http, schema)
        resumable = resumes(http, bool(body.stream), body.resumable)
        self.check_model(body, http)
        reply = await open(self.generation, body, self.names.shown, exchange_of(http).reserved)
        return await self.answers.answer(http, reply, bool(body.stream), resumable)

    async def embedded(self, http: HttpRequest, given: Sequence[Given], **asked: Any) -> Embedded:
        """The vectors of inputs, for a client that waits for them; `asked`: as `embed` takes it.
        Raises RequestError.
        """
        made = embed(self.generation, given, exchange_of(http).reserved, **asked)
        return await unless_disconnected(http, made)

    def check_model(self, body: Any, http: HttpRequest) -> None:
        """Raises NotFound where the body names a model that is not served."""
        self.names.resolve(body.model, http.headers.get("host"))
