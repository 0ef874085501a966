"""Mistral's POST /v1/fim/completions."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.mistral.fim import FimBody, FimReply
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = FimRoutes(context)
    paths = "/v1/fim/completions", "/fim/completions"
    return [
        Route(path, ("POST",), handlers.fim, OPENAI, generates=True, tag="openai", body=FimBody)
        for path in paths
    ]


class FimRoutes(Handlers):
    """Handlers of Mistral's routes."""

    async def fim(self, http: HttpRequest) -> Response:
        """Fill the gap between two texts, in Mistral's form.

        The fields of /v1/completions, answered as a chat completion. Without `suffix` the prompt is
        continued.
        """
        return await self.answer(http, FimBody, FimReply.open)
