"""Ollama's routes: POST /api/generate and /api/chat, what its clients ask about the served model,
and refusals of what changes models.

Invariant: every request becomes one of server.http.openai, which decides what it means to the
engine. Its API is described by Ollama, so it is not part of the OpenAPI document.
"""

from server.http.handlers import Context
from server.http.ollama.routes import OllamaRoutes
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    return OllamaRoutes(context).routes()
