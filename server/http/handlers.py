"""Handlers: the way of a request from its body to its response, which the dialects with OpenAI's
errors share.

Invariant: a body is read and checked before a sequence is started. It knows no dialect's fields.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.http import sse
from server.http.answer import Answers, Delivery, Reply
from server.http.body import read_model
from server.http.exchange import exchange_of
from server.http.fields import Body
from server.http.model_names import ModelNames

ReadBody = TypeVar("ReadBody", bound=Body)
Open = Callable[[Generation, Any, str, Reservation], Awaitable[Reply]]
"""Starts the sequences of a body, for the model of a name. Raises RequestError."""


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
        exchange = exchange_of(http)
        exchange.ignored = [*exchange.ignored, *self.fit(body)]
        return body

    def fit(self, body: Body) -> list[str]:
        """Leaves out what the chat template does not read, and returns its places. Raises
        InvalidRequest.
        """
        ignored = body.fit(self.generation.texts.variables)
        if ignored and self.section.strict_fields:
            text = f"`{ignored[0]}`: the model's chat template reads no such variable"
            raise InvalidRequest(text, param=ignored[0])
        return ignored

    async def answer(
        self, http: HttpRequest, schema: type[Any], open: Open, last: bytes = sse.DONE
    ) -> Response:
        """The response to a request of a route that generates. `last`: bytes that end a stream."""
        body = await self.read(http, schema)
        delivery = Delivery.of(http, bool(body.stream), body.resumable, last)
        self.check_model(body, http)
        exchange = exchange_of(http)
        reply = await open(self.generation, body, self.names.shown, exchange.reserved)
        exchange.ignored = [*exchange.ignored, *reply.streams.choices[0].request.ignored]
        return await self.answers.answer(http, reply, delivery)

    def check_model(self, body: Any, http: HttpRequest) -> None:
        """Raises NotFound where the body names a model that is not served."""
        self.names.resolve(body.model, http.headers.get("host"))
