"""Decisions: POST /v1/decisions, as openai's client sends it, and /v1/systemone."""

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.http.decisions.fields import DecisionBody, SystemBody
from server.http.decisions.replies import DecisionReply
from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = DecisionRoutes(context)
    generating = partial(Route, methods=("POST",), dialect=OPENAI, generates=True, tag="openai")
    return [
        generating("/v1/decisions", handler=handlers.decisions, body=DecisionBody),
        generating("/v1/systemone", handler=handlers.systemone, body=SystemBody),
    ]


class DecisionRoutes(Handlers):
    """Handlers of the routes of decisions."""

    async def decisions(self, http: HttpRequest) -> Response:
        """Answer questions by probabilities.

        Each answer's probability is read off the model's logits, as openai's client of decisions
        reads it.
        """
        return await self.answer(http, DecisionBody, DecisionReply.open)

    async def systemone(self, http: HttpRequest) -> Response:
        """Answer questions about a state by probabilities.

        What POST /v1/decisions does, with questions and answers by their ids.
        """
        return await self.answer(http, SystemBody, DecisionReply.open)
