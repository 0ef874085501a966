"""OpenAI's POST /v1/responses, without a store: what needs one is refused by name.

Invariant: every request becomes one of /v1/chat/completions, which decides what it means to the
engine. Its API is described by OpenAI, so it is not part of the OpenAPI document.
"""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.responses.fields import ResponsesBody
from server.http.responses.replies import ResponsesReply
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = ResponsesRoutes(context)
    return [
        Route("/v1/responses", ("POST",), handlers.responses, OPENAI, generates=True),
    ]


class ResponsesRoutes(Handlers):
    """Handlers of the routes of responses."""

    async def responses(self, http: HttpRequest) -> Response:
        """Write the next items of a conversation."""
        return await self.answer(http, ResponsesBody, ResponsesReply.open)
