"""Routes of OpenAI's dialect: POST /v1/completions, /v1/chat/completions and GET /v1/models.

The modules completions and chat convert requests and replies. It knows nothing of other dialects.
"""

import json
import time
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.errors import InvalidRequest
from server.http.answer import full_response
from server.http.body import check
from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.openai.chat import ChatReply
from server.http.openai.chat_fields import ChatBody
from server.http.openai.completions import CompletionReply
from server.http.openai.fields import CompletionBody
from server.http.pieces import pieces
from server.http.routes import Route

BODIES: dict[str, tuple[type[Any], Any]] = {
    "/v1/chat/completions": (ChatBody, ChatReply.open),
    "/v1/completions": (CompletionBody, CompletionReply.open),
}
"""Routes that generate -> their body, and what starts it."""


class OpenAIRoutes(Handlers):
    """Handlers of OpenAI's routes."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.created = int(time.time())

    def routes(self) -> list[Route]:
        generating = partial(Route, methods=("POST",), dialect=OPENAI, generates=True, tag="openai")
        shown = partial(Route, methods=("GET",), dialect=OPENAI, tag="openai")
        return [
            generating("/v1/completions", handler=self.completions, body=CompletionBody),
            generating("/v1/chat/completions", handler=self.chat, body=ChatBody),
            shown("/v1/models", handler=self.models),
            shown("/v1/models/{name:path}", handler=self.model),
        ]

    async def completions(self, http: HttpRequest) -> Response:
        """Continue one prompt or several.

        Prompts are texts or token ids.
        """
        return await self.answer(http, *BODIES["/v1/completions"])

    async def chat(self, http: HttpRequest) -> Response:
        """Write the next message of a conversation.

        The checkpoint's own chat template makes the prompt; for a checkpoint without one use
        /v1/completions.
        """
        return await self.answer(http, *BODIES["/v1/chat/completions"])

    async def models(self) -> Response:
        """List the served model.

        Once under each of its names; the first is the one in replies.
        """
        return JSONResponse(
            {"object": "list", "data": [self._model(name) for name in self.names.listed]}
        )

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
                "completion_fim": self.generation.can_fill,
            },
        }

    async def response_without_http(self, path: str, value: dict[str, Any], caller: str) -> Any:
        """The JSON value of the response to POST `path` with this body, without HTTP (`onehead
        batch`). Raises RequestError.
        """
        for name in ("stream", "resumable"):
            if value.get(name):
                raise InvalidRequest(
                    f"`{name}` is not supported here: answers are not streamed", param=name
                )
        if path not in BODIES:
            raise InvalidRequest(
                "`url` must be /v1/completions or /v1/chat/completions", param="url"
            )
        schema, open = BODIES[path]
        reservation = self.generation.client.reserve(caller)
        try:
            body, ignored = check(value, schema, self.section.strict_fields)
            self.generation.client.count_ignored([*ignored, *self.fit(body)])
            self.names.resolve(body.model)
            reply = await open(self.generation, body, self.names.shown, reservation)
            try:
                return json.loads(b"".join(pieces(await full_response(reply))))
            finally:
                reply.streams.close()
        finally:
            reservation.close()
