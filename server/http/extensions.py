"""The table of extensions: packages that add routes, and that the rest of the server does not know.

Each has `routes`, which makes its routes. One is removed by deleting its folder and its line here.
"""

from importlib import import_module

from server.http.handlers import Context
from server.http.routes import Route

EXTENSIONS = (
    "server.http.mistral",
    "server.http.ollama",
    "server.http.anthropic",
    "server.http.responses",
    "server.http.llama_cpp",
    "server.http.decisions",
    "server.http.embeddings",
    "server.http.render",
    "server.http.page",
)


def extension_routes(context: Context) -> list[Route]:
    """The routes of every extension."""
    return [route for name in EXTENSIONS for route in import_module(name).routes(context)]
