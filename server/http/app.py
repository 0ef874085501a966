"""The ASGI application: the routes of every dialect, the handlers of their errors, and FrontDoor
around them.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.config import ServerSection
from server.errors import InvalidRequest, NotFound, RequestError
from server.generation.generation import Generation
from server.http.documentation import documentation_routes
from server.http.exchange import exchange_of
from server.http.extensions import extension_routes
from server.http.front import FrontDoor
from server.http.handlers import Answers, Context
from server.http.hosts import AllowedHosts
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.openai.routes import OpenAIRoutes
from server.http.ops import OpsRoutes
from server.http.routes import RouteTable
from server.http.streams import StreamPublisher, StreamRoutes
from server.http.tgi.generate import TgiRoutes
from server.http.tokens import TokenRoutes
from server.http.tracing import Tracing

log = logging.getLogger("onehead.api")


def create_app(
    generation: Generation,
    section: ServerSection,
    keys: Keys,
    names: ModelNames,
    publisher: StreamPublisher,
    address: str = "",
) -> FrontDoor:
    """The application that `onehead serve` runs. `publisher` writes resumable streams; `address` is
    the one that is listened on.
    """
    about = "Text generation with Multi-Query Attention."
    app = FastAPI(
        title="onehead",
        version=version("onehead"),
        description=about,
        openapi_url=None,
        redirect_slashes=False,
    )
    context = Context(generation, section, names, Answers(publisher))
    table = RouteTable(
        [
            *TgiRoutes(context).routes(),
            *OpenAIRoutes(context).routes(),
            *StreamRoutes(publisher).routes(),
            *TokenRoutes(context).routes(),
            *OpsRoutes(context).routes(),
            *extension_routes(context),
            *documentation_routes(app, lambda: door),
        ]
    )
    table.add_to(app)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnected)
    app.add_exception_handler(Exception, _unexpected)
    tracing = Tracing(section.tracing_endpoint, names.shown) if section.tracing_endpoint else None
    door = FrontDoor(
        app, table, generation, section, keys, AllowedHosts(section.allowed_hosts, address), tracing
    )
    return door


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application with CORS for these origins, if there are any. CORS wraps FrontDoor, because
    browsers send preflight requests without an API key. Of a page on the internet they also ask
    whether it may call a server in their own network.
    """
    if not origins:
        return app
    exposed = ["x-request-id", "x-stream-id", "x-onehead-ignored", "retry-after"]
    return CORSMiddleware(
        app,
        origins,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=exposed,
    )


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return exchange_of(request).dialect.response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {
        404: "no such route; GET /docs lists those there are",
        405: "this route does not take that method",
    }.get(error.status_code, "the request was refused")
    refused = NotFound(text) if error.status_code == 404 else InvalidRequest(text)
    refused.status = refused.openai_status = error.status_code
    refused.tgi_type = None
    return exchange_of(request).dialect.response(refused, dict(error.headers or {}))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    # The client has disconnected: only the access log shows this status.
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    failed = RequestError("internal error; the server's log has it under the request id")
    return exchange_of(request).dialect.response(failed)
