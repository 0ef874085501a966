"""The table of extensions: packages that add routes, and that the rest of the server does not know.

Each has `routes`, which makes its routes, and `BODIES`, the bodies that they take. One is removed
by deleting its folder and its line here.
"""

from importlib import import_module
from typing import Any

from pydantic import BaseModel

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
    return [route for module in _modules() for route in module.routes(context)]


def extension_bodies() -> list[type[BaseModel]]:
    """The bodies that these routes take."""
    return [body for module in _modules() for body in module.BODIES]


def _modules() -> list[Any]:
    return [import_module(name) for name in EXTENSIONS]
