"""Handlers of Ollama's routes, and what they tell of the served model."""

import time
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from server.errors import InvalidRequest, NotFound
from server.generation.embedding import normalised
from server.http import sse
from server.http.body import read_model
from server.http.errors import Dialect, openai_message
from server.http.exchange import exchange_of
from server.http.handlers import Context, Handlers, ReadBody
from server.http.model_names import TAG
from server.http.ollama.fields import (
    ChatBody,
    EmbedBody,
    EmbeddingBody,
    GenerateBody,
    PullBody,
    ShowBody,
)
from server.http.ollama.replies import (
    OllamaReply,
    can_think,
    check_abilities,
    empty_answer,
    now,
)
from server.http.routes import Access, Route
from server.http.unknown_fields import printable

VERSION = "0.12.0"
"""The version of Ollama whose API this is, which some clients compare."""
NEVER = "2100-01-01T00:00:00Z"
"""When the model will be unloaded."""
DIALECT = Dialect(lambda error: {"error": openai_message(error)})
"""The form of Ollama's errors."""
CHANGES = ("create", "copy", "delete", "push", "blobs/{digest}")
"""Routes that change models."""


class NotBrowsers(APIRoute):
    """Takes requests that do not accept HTML: GET / of a browser shows the playground."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if (
            match is not Match.NONE
            and "text/html" in Headers(scope=scope).get("accept", "").lower()
        ):
            return Match.NONE, {}
        return match, child_scope


class OllamaRoutes(Handlers):
    """Handlers of Ollama's routes."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.begun = now()

    def routes(self) -> list[Route]:
        shown = partial(Route, methods=("GET",), dialect=DIALECT, head=True)
        posted = partial(Route, methods=("POST",), dialect=DIALECT)
        changed = partial(posted, methods=("POST", "DELETE", "HEAD"), handler=self.refuse_change)
        return [
            shown("/", handler=self.greet, access=Access.PUBLIC, route_class=NotBrowsers),
            shown("/api/version", handler=self.version),
            shown("/api/tags", handler=self.tags),
            shown("/api/ps", handler=self.loaded),
            posted("/api/show", handler=self.show),
            posted("/api/pull", handler=self.pull),
            posted("/api/generate", handler=self.generate, generates=True),
            posted("/api/chat", handler=self.chat, generates=True),
            posted("/api/embed", handler=self.embed, generates=True),
            posted("/api/embeddings", handler=self.embed_one, generates=True),
            *(changed(f"/api/{path}") for path in CHANGES),
        ]

    async def greet(self) -> Response:
        """Answer the words by which scripts know that a server of this API is there."""
        return PlainTextResponse("Ollama is running")

    async def generate(self, http: HttpRequest) -> Response:
        """Answer a prompt, or fill a gap."""
        return await self._generated(http, GenerateBody)

    async def chat(self, http: HttpRequest) -> Response:
        """Write the next message of a conversation."""
        return await self._generated(http, ChatBody)

    async def _generated(
        self, http: HttpRequest, schema: type[GenerateBody] | type[ChatBody]
    ) -> Response:
        body = await self.read(http, schema)
        name, stream = self._name(body.model), body.stream is not False
        if body.is_empty:
            return _answered([empty_answer(body, name)], stream)
        check_abilities(self.generation, body, name)
        reply = await OllamaReply.open(self.generation, body, name, exchange_of(http).reserved)
        return await self.answers.answer(http, reply, stream)

    async def read(self, http: HttpRequest, schema: type[ReadBody]) -> ReadBody:
        """The body of a request, which Ollama's users send with any content type. A browser's page
        of another origin is told by its `Origin` header, and needs that of JSON, for which it has
        to ask first. Raises RequestError.
        """
        return await read_model(http, schema, self.section, "origin" not in http.headers)

    def _name(self, given: str | None) -> str:
        """The model's name in the answer: as the request has it. Raises NotFound."""
        try:
            resolved = self.names.resolve(given)
        except NotFound:
            raise NotFound(
                f"model '{printable(given or '')}' not found", code="model_not_found"
            ) from None
        return given or resolved

    async def version(self) -> Response:
        """Tell the version of the API."""
        return JSONResponse({"version": VERSION})

    async def tags(self) -> Response:
        """List the served model."""
        models = [self._model(name) | {"modified_at": self.begun} for name in self.names.listed]
        return JSONResponse({"models": models})

    async def loaded(self) -> Response:
        """List the model that is loaded."""
        size = self.generation.ready.weight_bytes
        more = {
            "expires_at": NEVER,
            "size_vram": size if self.generation.ready.device == "cuda" else 0,
            "context_length": self.generation.max_total_tokens,
        }
        return JSONResponse({"models": [self._model(self.names.shown) | more]})

    def _model(self, name: str) -> dict[str, Any]:
        ready, tagged = self.generation.ready, name if ":" in name else name + TAG
        return {
            "name": tagged,
            "model": tagged,
            "size": ready.weight_bytes,
            "digest": ready.digest,
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        ready = self.generation.ready
        size, unit = (10**9, "B") if ready.num_parameters >= 999_500_000 else (10**6, "M")
        return {
            "parent_model": "",
            "format": "gguf" if ready.block_forms else "safetensors",
            "family": ready.model_type,
            "families": [ready.model_type],
            "parameter_size": f"{ready.num_parameters / size:.3g}{unit}",
            "quantization_level": ready.dtype
            if ready.quantization == "none"
            else ready.quantization,
        }

    async def show(self, http: HttpRequest) -> Response:
        """Tell what the served model can do."""
        body = await self.read(http, ShowBody)
        self._name(body.model or body.name)
        ready, files = self.generation.ready, self.generation.codec.files
        chats, family = files.chat_template is not None, ready.model_type
        abilities = {
            "completion": not ready.vector_size,
            "embedding": ready.vector_size > 0 and ready.classes is None,
            "tools": chats and self.generation.can_call,
            "insert": self.generation.can_fill,
            "thinking": chats and can_think(self.generation),
        }
        facts = {
            "general.architecture": family,
            "general.basename": self.names.shown,
            "general.parameter_count": ready.num_parameters,
            f"{family}.context_length": self.generation.max_total_tokens,
            f"{family}.attention.head_count_kv": 1,
            f"{family}.vocab_size": ready.vocab_size,
        }
        value = {
            "modelfile": f"FROM {self.names.shown}\n",
            "parameters": "\n".join(
                f"{name} {value}" for name, value in files.sampling_defaults.items()
            ),
            "template": files.chat_template or "",
            "details": self._details(),
            "model_info": facts,
            "capabilities": [name for name, has in abilities.items() if has],
            "modified_at": self.begun,
        }
        return JSONResponse(value)

    async def pull(self, http: HttpRequest) -> Response:
        """Pull the model that is served, which is there already."""
        body = await self.read(http, PullBody)
        self._name(body.model or body.name)
        steps = [{"status": step} for step in ("pulling manifest", "success")]
        return _answered(steps, body.stream is not False)

    async def embed(self, http: HttpRequest) -> Response:
        """Embed texts."""
        body, began = await self.read(http, EmbedBody), time.monotonic_ns()
        name = self._name(body.model)
        embedded = await self.embedded(
            http, body.input, dimensions=body.dimensions, truncate=body.truncate is not False
        )
        vectors = (list(normalised(vector, body.dimensions)) for vector in embedded.vectors)
        value = {
            "model": name,
            "embeddings": vectors,
            "total_duration": time.monotonic_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": embedded.num_tokens,
        }
        return await self.answers.response(value)

    async def embed_one(self, http: HttpRequest) -> Response:
        """Embed one text, as older clients ask for it."""
        body = await self.read(http, EmbeddingBody)
        self._name(body.model)
        embedded = await self.embedded(http, [body.prompt], truncate=body.truncate is not False)
        return JSONResponse({"embedding": list(normalised(embedded.vectors[0]))})

    async def refuse_change(self) -> Response:
        """Refuse to change models."""
        error = InvalidRequest(
            "this server serves the model that it was started with, and no other"
        )
        error.status = error.openai_status = 501
        raise error


def _answered(objects: list[dict[str, Any]], stream: bool) -> Response:
    """Objects that need no generation; the last one alone where they are not streamed."""
    if not stream:
        return JSONResponse(objects[-1])
    lines = [sse.event(each, sse.LINES) for each in objects]
    return Response(b"".join(lines), media_type=sse.LINES.media_type)
