"""OpenAI's POST /v1/responses, without a store: what needs one is refused by name.

Invariant: every request becomes one of /v1/chat/completions, which decides what it means to the
engine. Its API is described by OpenAI, so it is not part of the OpenAPI document.
"""

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import RequestError
from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.responses.fields import ResponsesBody
from server.http.responses.replies import ResponsesReply
from server.http.routes import Route

BODIES = ()


def _error_event(error: RequestError) -> dict[str, Any]:
    """With the fields of OpenAI's event, and `error`, for which its Python client looks."""
    body = OPENAI.body(error)
    return {"type": "error"} | {name: body["error"][name] for name in ERROR_FIELDS} | body


ERROR_FIELDS = ("code", "message", "param")
DIALECT = replace(OPENAI, event=_error_event)


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = ResponsesRoutes(context)
    return [
        Route(
            "/v1/responses",
            ("POST",),
            handlers.responses,
            DIALECT,
            generates=True,
            documented=False,
        )
    ]


class ResponsesRoutes(Handlers):
    """Handlers of the routes of responses."""

    async def responses(self, http: HttpRequest) -> Response:
        """Write the next items of a conversation."""
        return await self.answer(http, ResponsesBody, ResponsesReply.open)
