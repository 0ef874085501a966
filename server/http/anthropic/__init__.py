"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, without a store.

Invariant: every request becomes one of /v1/chat/completions, which decides what it means to the
engine. Its API is described by Anthropic, so it is not part of the OpenAPI document.
"""

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.http.anthropic.errors import DIALECT
from server.http.anthropic.fields import CountBody, MessagesBody
from server.http.anthropic.replies import MessagesReply
from server.http.handlers import Context, Handlers
from server.http.routes import Route
from server.text.jobs import EncodeChat


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = MessagesRoutes(context)
    posted = partial(Route, methods=("POST",), dialect=DIALECT)
    return [
        posted("/v1/messages", handler=handlers.messages, generates=True),
        posted("/v1/messages/count_tokens", handler=handlers.count_tokens),
    ]


class MessagesRoutes(Handlers):
    """Handlers of Anthropic's routes."""

    async def messages(self, http: HttpRequest) -> Response:
        """Write the next message of a conversation."""
        return await self.answer(http, MessagesBody, MessagesReply.open)

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Count the tokens of a conversation as the chat template writes it."""
        body = await self.read_named(http, CountBody)
        job = EncodeChat(body.chat.chat_input(self.generation.can_call))
        ids = await self.convert(http, job)
        return JSONResponse({"input_tokens": len(ids)})
