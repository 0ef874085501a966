"""OpenAI's dialect: POST /v1/completions and /v1/chat/completions, GET /v1/models; and, since its clients are those of llama.cpp's
editors, POST /infill. What differs between them is in completions, chat and infill; here is what they share.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.config import ServerSection
from server.errors import InvalidRequest, RequestError
from server.generation.admission import Generation
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.body import check, read_model
from server.http.disconnect import unless_disconnected
from server.http.errors import openai_error_body
from server.http.model_names import ModelNames
from server.http.openai.chat import ChatReply
from server.http.openai.chat_fields import ChatBody
from server.http.openai.completions import CompletionReply
from server.http.openai.fields import CompletionBody, GenerationBody
from server.http.openai.infill import InfillReply
from server.http.openai.infill_fields import InfillBody
from server.http.streams import Publications, is_resumable
from server.text.chat_template import ChatTemplate
from server.text.fim import FillInTheMiddle


class Reply(Protocol):
    """Pieces of one request to the JSON of its route."""

    streams: OpenStreams

    def first(self) -> list[dict[str, Any]]:
        """Chunks that stand before the first piece."""

    def take(self, piece: Piece) -> object:
        """Accounts for a piece of an answer that is not streamed."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Accounts for a piece of a stream; its chunks."""

    def last(self) -> list[dict[str, Any]]:
        """Chunks behind the last piece."""

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed, when every piece has been taken."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is wanted. `last` ends a stream of this route."""

    stream: bool
    resumable: bool
    last: bytes

    @classmethod
    def of(cls, http: HttpRequest, body: GenerationBody | InfillBody, done: bool) -> "Delivery":
        """What a request asks for. `done`: on this route OpenAI's last line ends a stream. Raises InvalidRequest."""
        return cls(bool(body.stream), is_resumable(http, body.resumable, bool(body.stream)), sse.DONE if done else b"")


class OpenAIRoutes:
    """The dialect over one Generation."""

    def __init__(
        self, generation: Generation, section: ServerSection, names: ModelNames, chat_template: ChatTemplate, publications: Publications
    ) -> None:
        self.generation = generation
        self.publications = publications
        self.section = section
        self.names = names
        self.created = int(time.time())
        self.chat_template = chat_template
        self.fim = FillInTheMiddle(generation.codec)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"])
        for path, handler in (("/v1/completions", self.completions), ("/v1/chat/completions", self.chat), ("/infill", self.infill)):
            router.add_api_route(path, handler, methods=["POST"], response_class=Response)
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        return router

    async def completions(self, http: HttpRequest) -> Response:
        """Continue one prompt or several.

        Prompts are texts or token ids.
        """
        body = await read_model(http, CompletionBody, self.section.max_body_bytes)
        delivery = Delivery.of(http, body, done=True)
        return await self._answer(http, await self.open_completion(body), delivery)

    async def chat(self, http: HttpRequest) -> Response:
        """Write the next message of a conversation.

        The checkpoint's own chat template makes the prompt; a checkpoint without one is used by /v1/completions.
        """
        body = await read_model(http, ChatBody, self.section.max_body_bytes)
        delivery = Delivery.of(http, body, done=True)
        return await self._answer(http, await self.open_chat(body), delivery)

    async def infill(self, http: HttpRequest) -> Response:
        """Fill the gap between two texts.

        In llama.cpp's form, for editors. The checkpoint's tokenizer must have fill-in-the-middle tokens.
        """
        body = await read_model(http, InfillBody, self.section.max_body_bytes)
        delivery = Delivery.of(http, body, done=False)
        self._check_stops(body.stop)
        reply = await InfillReply.open(self.generation, self.fim, body, self.names.shown)
        return await self._answer(http, reply, delivery)

    async def models(self) -> dict[str, Any]:
        """List the served model.

        Once under each of its names; the first is the one in replies.
        """
        return {"object": "list", "data": [self._model(name) for name in self.names.listed]}

    async def model(self, name: str) -> dict[str, Any]:
        """Show the served model by one of its names.

        Without a name, list the model as /v1/models does.
        """
        return self._model(self.names.resolve(name)) if name else await self.models()

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "onehead",
            "max_model_len": self.generation.max_total_tokens,
        }

    async def whole(self, path: str, value: dict[str, Any]) -> dict[str, Any]:
        """The whole answer of a POST to `path` with this body, without HTTP. Raises RequestError."""
        reply: Reply
        for name in ("stream", "resumable"):
            if value.get(name):
                raise InvalidRequest(f"`{name}` is not supported here: there is nobody to stream to", param=name)
        if path == "/v1/chat/completions":
            reply = await self.open_chat(check(value, ChatBody))
        elif path == "/v1/completions":
            reply = await self.open_completion(check(value, CompletionBody))
        else:
            raise InvalidRequest("`url` must be /v1/completions or /v1/chat/completions", param="url")
        try:
            return await _whole(reply)
        finally:
            reply.streams.close()

    async def open_completion(self, body: CompletionBody) -> CompletionReply:
        """Checks and starts a completion."""
        self._check(body)
        return await CompletionReply.open(self.generation, self.fim, body, self.names.shown)

    async def open_chat(self, body: ChatBody) -> ChatReply:
        """Checks and starts a chat completion."""
        self._check(body)
        return await ChatReply.open(self.generation, self.chat_template, body, self.names.shown)

    def _check(self, body: GenerationBody) -> None:
        self.names.resolve(body.model)
        self._check_stops(body.stop)

    def _check_stops(self, stops: list[str] | None) -> None:
        most = self.section.max_stop_strings
        if len(stops or ()) > most:
            raise InvalidRequest(f"`stop` supports up to {most} stop sequences. Given: {len(stops or ())}", param="stop")

    async def _answer(self, http: HttpRequest, reply: Reply, delivery: "Delivery") -> Response:
        close = reply.streams.close
        try:
            if delivery.resumable:
                return self.publications.publish(http, _events(reply, None), close, _error_event, {}, delivery.last)
            if not delivery.stream:
                return JSONResponse(await unless_disconnected(http, _whole(reply)))
            first = await unless_disconnected(http, reply.streams.begin(self.section.keep_alive))
            events = sse.closing(_events(reply, first), _error_event, delivery.last)
            return sse.EventResponse(events, close, {}, self.section.keep_alive)
        except BaseException:
            reply.streams.close()
            raise


async def _whole(reply: Reply) -> dict[str, Any]:
    async for piece in reply.streams:
        reply.take(piece)
    return reply.whole()


def _error_event(error: RequestError) -> bytes:
    return sse.event(openai_error_body(error))


async def _events(reply: Reply, first: Piece | None) -> AsyncIterator[list[bytes]]:
    """One event for each chunk, and together those of pieces that have come. Raises RequestError."""
    chunks = [*reply.first(), *(reply.chunks(first) if first is not None else ())]
    if chunks:
        yield [sse.event(chunk) for chunk in chunks]
    async for piece in reply.streams:
        chunks = reply.chunks(piece)
        while len(chunks) < sse.BREATH and (more := reply.streams.take()) is not None:
            chunks += reply.chunks(more)
        if chunks:
            yield [sse.event(chunk) for chunk in chunks]
    if chunks := reply.last():
        yield [sse.event(chunk) for chunk in chunks]
