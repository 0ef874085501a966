"""The route table: each route with its methods, handler, access, dialect, and whether it generates.

The router, FrontDoor and the error bodies use it. Invariant: the application serves no path that
is not in the table, so that no route generates without a reservation or is reached without the key
that it needs.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from server.http.errors import OPENAI, TGI, Dialect


class Access(Enum):
    """The key that a request needs."""

    API_KEY = "one of server.api_keys, where there are any"
    METRICS_KEY = "server.metrics_key, where there is one"
    PUBLIC = "none"


@dataclass(frozen=True, slots=True)
class Route:
    """One path. `generates`: its POST requests are admitted under server.max_waiting before their
    body is read, and start sequences with the Exchange's reservation. `probe`: polled every few
    seconds, so its requests are logged at level debug.
    """

    path: str
    methods: tuple[str, ...]
    handler: Callable[..., Awaitable[Any]] | ASGIApp
    dialect: Dialect
    access: Access = Access.API_KEY
    generates: bool = False
    probe: bool = False
    tag: str = ""
    """The heading of the route in the OpenAPI document; one without is not part of it."""
    body: type[BaseModel] | None = None
    """The model of its body, which the OpenAPI document describes."""
    head: bool = False
    """Whether the route also answers HEAD."""
    status: int = 200
    route_class: type[APIRoute] = APIRoute
    """Decides which requests of this path and these methods the route takes."""


class RouteTable:
    """Finds routes by path, and adds them to the application."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._literal = {
            (method, route.path): route
            for route in reversed(self.routes)
            for method in ("", *route.methods, *route.head * ("HEAD",))
        }
        self._patterns = [
            (compile_path(route.path)[0], route) for route in self.routes if "{" in route.path
        ]

    def find(self, path: str, method: str = "") -> Route | None:
        """The route of a path and a method; for a method that the path does not take, its first
        route; None if there is none.
        """
        route = self._literal.get((method, path)) or self._literal.get(("", path))
        if route is not None:
            return route
        return next((route for pattern, route in self._patterns if pattern.match(path)), None)

    def dialect(self, path: str) -> Dialect:
        """The dialect of errors for a path; OpenAI's for unknown paths below /v1, TGI's for
        others.
        """
        route = self.find(path)
        if route is not None:
            return route.dialect
        return OPENAI if path.startswith("/v1/") else TGI

    def add_to(self, app: FastAPI) -> None:
        """Adds every route to the application."""
        for route in self.routes:
            if not route.methods:
                app.mount(route.path.removesuffix("/{path:path}"), route.handler)
                continue
            for methods, tag in ((route.methods, route.tag), (route.head * ("HEAD",), "")):
                if methods:
                    app.router.add_api_route(
                        route.path,
                        route.handler,
                        methods=list(methods),
                        status_code=route.status,
                        response_class=Response,
                        tags=[tag],
                        include_in_schema=bool(tag),
                        route_class_override=route.route_class,
                    )
