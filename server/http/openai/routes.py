"""Routes of OpenAI's dialect, POST /v1/completions, /v1/chat/completions, /v1/decisions and GET /v1/models; /v1/systemone; Mistral's POST
/v1/fim/completions; and llama.cpp's POST /infill, /completion and /apply-template and GET /props.

The modules completions, chat, decisions, fim and llama_cpp convert requests and replies; this one reads bodies and starts them. It knows
nothing of TGI's dialect.
"""

import json
import secrets
import time
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request
from server.http import sse
from server.http.answer import Answers, Delivery, Reply, full_response
from server.http.body import check, read_model
from server.http.exchange import Dialect, exchange_of
from server.http.model_names import ModelNames
from server.http.openai.chat import ChatReply
from server.http.openai.chat_fields import ChatBody, TemplateBody, TemplateFields
from server.http.openai.completions import CompletionReply
from server.http.openai.decision_fields import AnyDecisionBody, DecisionBody, SystemBody
from server.http.openai.decisions import DecisionReply
from server.http.openai.fields import CompletionBody, GenerationBody
from server.http.openai.fim import FimBody, FimReply
from server.http.openai.llama_cpp import LlamaCppReply
from server.http.openai.llama_cpp_fields import InfillBody, LlamaCppBody, LlamaCppCompletionBody
from server.http.pieces import pieces
from server.http.routes import Route
from server.text.jobs import RenderChat

ReadBody = TypeVar("ReadBody", bound=BaseModel)
AnyBody = GenerationBody | LlamaCppBody | AnyDecisionBody
REPLIES: dict[type[AnyBody], Any] = {
    CompletionBody: CompletionReply,
    ChatBody: ChatReply,
    FimBody: FimReply,
    InfillBody: LlamaCppReply,
    LlamaCppCompletionBody: LlamaCppReply,
    DecisionBody: DecisionReply,
    SystemBody: DecisionReply,
}
"""The class of the reply to each body."""


class OpenAIRoutes:
    """Handlers of the routes of OpenAI's dialect."""

    def __init__(self, generation: Generation, section: ServerSection, names: ModelNames, answers: Answers) -> None:
        self.generation = generation
        self.answers = answers
        self.section = section
        self.names = names
        self.created = int(time.time())

    def routes(self) -> list[Route]:
        generating = partial(Route, methods=("POST",), dialect=Dialect.OPENAI, generates=True, tag="openai")
        shown = partial(Route, methods=("GET",), dialect=Dialect.OPENAI, tag="openai")
        return [
            generating("/v1/completions", handler=self.completions),
            generating("/v1/chat/completions", handler=self.chat),
            generating("/v1/fim/completions", handler=self.fim),
            generating("/fim/completions", handler=self.fim),
            generating("/infill", handler=self.infill, tag="llama.cpp"),
            generating("/completion", handler=self.llama_cpp_completion, tag="llama.cpp"),
            generating("/apply-template", handler=self.apply_template, generates=False, tag="llama.cpp"),
            shown("/props", handler=self.props, tag="llama.cpp"),
            generating("/v1/decisions", handler=self.decisions),
            generating("/v1/systemone", handler=self.systemone),
            generating("/v1/completions/render", handler=self.render_completions, generates=False),
            generating("/v1/chat/completions/render", handler=self.render_chat, generates=False),
            shown("/v1/models", handler=self.models),
            shown("/v1/models/{name:path}", handler=self.model),
        ]

    async def completions(self, http: HttpRequest) -> Response:
        """Continue one prompt or several.

        Prompts are texts or token ids.
        """
        return await self._answer(http, CompletionBody)

    async def chat(self, http: HttpRequest) -> Response:
        """Write the next message of a conversation.

        The checkpoint's own chat template makes the prompt; for a checkpoint without one use /v1/completions.
        """
        return await self._answer(http, ChatBody)

    async def render_completions(self, http: HttpRequest) -> Response:
        """Show the tokens of prompts.

        Those that POST /v1/completions computes for the same body, in vLLM's form, for routers that look for their prefixes.
        """
        prepared = await self._prepared(http, CompletionBody)
        rendered = [self._rendered(http, f"cmpl-{secrets.token_hex(16)}", request) for request, _ in prepared]
        return await self.answers.json_answers.response(rendered)

    async def render_chat(self, http: HttpRequest) -> Response:
        """Show the tokens of a conversation.

        Those that POST /v1/chat/completions computes for the same body, in vLLM's form, for routers that look for their prefixes.
        """
        request = await self._prepared(http, ChatBody)
        rendered = self._rendered(http, f"chatcmpl-{secrets.token_hex(16)}", request)
        return await self.answers.json_answers.response(rendered)

    async def _prepared(self, http: HttpRequest, schema: type[AnyBody]) -> Any:
        body = await self._read(http, schema)
        self._check(body, http.headers.get("host"))
        exchange = exchange_of(http)
        self.generation.client.admission.charge(exchange.client, exchange.terms, 0)
        return await REPLIES[schema].prepare(self.generation, body, exchange.client)

    async def _read(self, http: HttpRequest, schema: type[ReadBody]) -> ReadBody:
        """The body of a request. Raises RequestError."""
        body = await read_model(http, schema, self.section)
        exchange = exchange_of(http)
        exchange.ignored = [*exchange.ignored, *self._fit(body)]
        return body

    def _fit(self, body: BaseModel) -> list[str]:
        """Leaves out what the chat template does not read, and returns its places. Raises InvalidRequest."""
        if not isinstance(body, TemplateFields):
            return []
        ignored = body.fit(self.generation.texts.variables)
        if ignored and self.section.strict_fields:
            text = f"`{ignored[0]}`: the model's chat template reads no such variable"
            raise InvalidRequest(text, param=ignored[0])
        return ignored

    def _rendered(self, http: HttpRequest, id: str, request: Request) -> dict[str, Any]:
        self.generation.client.admission.clients[exchange_of(http).client].tokens.level -= len(request.prompt)
        return {
            "request_id": id,
            "token_ids": iter(request.prompt),
            "features": None,
            "sampling_params": {"max_tokens": self.generation.max_new_tokens(request)},
            "model": self.names.shown,
        }

    async def fim(self, http: HttpRequest) -> Response:
        """Fill the gap between two texts, in Mistral's form.

        The fields of /v1/completions, answered as a chat completion. Without `suffix` the prompt is continued.
        """
        return await self._answer(http, FimBody)

    async def infill(self, http: HttpRequest) -> Response:
        """Fill the gap between two texts.

        In llama.cpp's form, for editors. The checkpoint's tokenizer must have fill-in-the-middle tokens.
        """
        return await self._answer(http, InfillBody, last=b"")

    async def llama_cpp_completion(self, http: HttpRequest) -> Response:
        """Continue one prompt or several, in llama.cpp's form.

        With llama.cpp's names and defaults, for its editors. Others use /v1/completions.
        """
        return await self._answer(http, LlamaCppCompletionBody, last=b"")

    async def apply_template(self, http: HttpRequest) -> Response:
        """Show the prompt that the chat template makes of a conversation.

        Special tokens that are spelt in messages are told from those of the template only on the routes that take the messages themselves.
        """
        body = await self._read(http, TemplateBody)
        self.names.resolve(body.model, http.headers.get("host"))
        job = RenderChat(body.chat_input(self.generation.texts.texts.calls.form is not None))
        exchange = exchange_of(http)
        text = await self.generation.convert(job, exchange.client, exchange.terms)
        return await self.answers.json_answers.response({"prompt": text})

    async def props(self) -> Response:
        """Show the context length and the chat template.

        What llama.cpp's editors read of its route of this name.
        """
        value = {
            "default_generation_settings": {"n_ctx": self.generation.max_total_tokens},
            "total_slots": self.generation.client.max_open - self.section.max_waiting,
            "modalities": dict.fromkeys(("vision", "audio", "video"), False),
            "model_alias": self.names.shown,
            "chat_template": self.generation.codec.files.chat_template or "",
        }
        return JSONResponse(value)

    async def decisions(self, http: HttpRequest) -> Response:
        """Answer questions by probabilities.

        Each answer's probability is read off the model's logits, as openai's client of decisions reads it.
        """
        return await self._answer(http, DecisionBody)

    async def systemone(self, http: HttpRequest) -> Response:
        """Answer questions about a state by probabilities.

        What POST /v1/decisions does, with questions and answers by their ids.
        """
        return await self._answer(http, SystemBody)

    async def models(self) -> Response:
        """List the served model.

        Once under each of its names; the first is the one in replies.
        """
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.names.listed]})

    async def model(self, name: str) -> Response:
        """Show the served model by one of its names.

        Without a name, list the model as /v1/models does.
        """
        return JSONResponse(self._model(self.names.resolve(name))) if name else await self.models()

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "onehead",
            "max_model_len": self.generation.max_total_tokens,
            "meta": {"n_ctx": self.generation.max_total_tokens},
            "tool_call_format": (form := self.generation.texts.texts.calls.form) and form.name,
            "default_sampling_params": self.generation.codec.files.sampling_defaults,
            "capabilities": {
                "completion_chat": self.generation.codec.files.chat_template is not None,
                "completion_fim": self.generation.texts.texts.fim.marks is not None,
            },
        }

    async def response_without_http(self, path: str, value: dict[str, Any], caller: str) -> Any:
        """The JSON value of the response to POST `path` with this body, without HTTP (`onehead batch`). Raises RequestError."""
        for name in ("stream", "resumable"):
            if value.get(name):
                raise InvalidRequest(f"`{name}` is not supported here: answers are not streamed", param=name)
        schemas: dict[str, type[AnyBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
        if path not in schemas:
            raise InvalidRequest("`url` must be /v1/completions or /v1/chat/completions", param="url")
        reservation = self.generation.client.reserve(caller)
        try:
            body, ignored = check(value, schemas[path], self.section.strict_fields)
            self.generation.client.count_ignored([*ignored, *self._fit(body)])
            reply = await self._open(body, reservation)
            try:
                return json.loads(b"".join(pieces(await full_response(reply))))
            finally:
                reply.streams.close()
        finally:
            reservation.close()

    async def _answer(self, http: HttpRequest, schema: type[AnyBody], last: bytes = sse.DONE) -> Response:
        """The response to a request of a route that generates. `last`: bytes that end a stream."""
        body = await self._read(http, schema)
        delivery = Delivery.of(http, bool(body.stream), body.resumable, last)
        reply = await self._open(body, exchange_of(http).reserved, http.headers.get("host"))
        exchange = exchange_of(http)
        exchange.ignored = [*exchange.ignored, *reply.streams.choices[0].request.ignored]
        return await self.answers.answer(http, reply, delivery)

    async def _open(self, body: AnyBody, reservation: Reservation, host: str | None = None) -> Reply:
        """Checks a request and starts it. Raises RequestError."""
        self._check(body, host)
        reply: Reply = await REPLIES[type(body)].open(self.generation, body, self.names.shown, reservation)
        return reply

    def _check(self, body: AnyBody, host: str | None) -> None:
        if not isinstance(body, LlamaCppBody):  # It takes any name of a model.
            self.names.resolve(body.model, host)
