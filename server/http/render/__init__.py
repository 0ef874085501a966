"""The token ids of requests, for routers that look for their prefixes: POST /v1/completions/render
and /v1/chat/completions/render, as vLLM has them.
"""

import secrets
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.generation.request import Request
from server.http.errors import OPENAI
from server.http.exchange import exchange_of
from server.http.handlers import Context, Handlers
from server.http.openai.chat import ChatReply
from server.http.openai.chat_fields import ChatBody
from server.http.openai.completions import CompletionReply
from server.http.openai.fields import CompletionBody
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = RenderRoutes(context)
    shown = partial(Route, methods=("POST",), dialect=OPENAI, tag="openai")
    return [
        shown("/v1/completions/render", handler=handlers.completions),
        shown("/v1/chat/completions/render", handler=handlers.chat),
    ]


class RenderRoutes(Handlers):
    """Handlers of the routes that render."""

    async def completions(self, http: HttpRequest) -> Response:
        """Show the tokens of prompts.

        Those that POST /v1/completions computes for the same body, in vLLM's form, for routers that
        look for their prefixes.
        """
        prepared = await CompletionReply.prepare(
            self.generation, await self._body(http, CompletionBody), exchange_of(http).client
        )
        rendered = [
            self._rendered(http, f"cmpl-{secrets.token_hex(16)}", request)
            for request, _ in prepared
        ]
        return await self.answers.response(rendered)

    async def chat(self, http: HttpRequest) -> Response:
        """Show the tokens of a conversation.

        Those that POST /v1/chat/completions computes for the same body, in vLLM's form, for routers
        that look for their prefixes.
        """
        request = await ChatReply.prepare(
            self.generation, await self._body(http, ChatBody), exchange_of(http).client
        )
        rendered = self._rendered(http, f"chatcmpl-{secrets.token_hex(16)}", request)
        return await self.answers.response(rendered)

    async def _body(self, http: HttpRequest, schema: type[Any]) -> Any:
        body = await self.read_named(http, schema)
        exchange = exchange_of(http)
        self.generation.client.admission.charge(exchange.client, exchange.terms, 0)
        return body

    def _rendered(self, http: HttpRequest, id: str, request: Request) -> dict[str, Any]:
        self.generation.client.admission.clients[exchange_of(http).client].tokens.level -= len(
            request.prompt
        )
        return {
            "request_id": id,
            "token_ids": iter(request.prompt),
            "features": None,
            "sampling_params": {"max_tokens": self.generation.max_new_tokens(request)},
            "model": self.names.shown,
        }
