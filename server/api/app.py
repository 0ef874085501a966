"""The ASGI application: routes of each dialect over one Generation, and the one place where errors become responses."""

import logging
import secrets

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.generate import TgiRoutes
from server.api.openai import OpenAIRoutes
from server.api.openai_errors import error_body, error_status
from server.api.ops import OpsRoutes
from server.api.tokens import TokenRoutes
from server.chat import ChatTemplate
from server.config import ServerSection
from server.errors import InvalidRequest, ModelNotFound, RequestError
from server.generation import Generation

log = logging.getLogger("onehead.api")


def create_app(generation: Generation, section: ServerSection, model_id: str, version: str) -> FastAPI:
    """The application that `onehead serve` runs."""
    # The documentation page must open on hosts without internet, so its scripts come from here and from no content network.
    app = FastAPIOffline(
        title="onehead", version=version, description="Text generation with Multi-Query Attention.", redoc_url=None, redirect_slashes=False
    )
    chat_template = ChatTemplate(generation.codec)
    app.include_router(TgiRoutes(generation, section, model_id, version).router())
    app.include_router(OpenAIRoutes(generation, section, model_id, chat_template).router())
    app.include_router(TokenRoutes(generation, section, model_id, chat_template).router())
    app.include_router(OpsRoutes(generation).router())
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(RequestId)
    return app


def _speaks_openai(request: Request) -> bool:
    """Which of the two error bodies a route's clients read."""
    path = request.scope["path"]
    return bool(request.scope.get("openai")) or path.startswith("/v1/") or path in ("/infill", "/detokenize")


def _answer(request: Request, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    if _speaks_openai(request):
        return JSONResponse(error_body(error), status_code=error_status(error), headers=headers)
    return JSONResponse({"error": error.message, "error_type": error.tgi_type}, status_code=error.status, headers=headers)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _answer(request, error, {"retry-after": str(error.retry_after)} if error.retry_after is not None else None)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "no such route; GET /docs lists those there are", 405: "this route does not take that method"}.get(
        error.status_code, "the request was refused"
    )
    refusal = ModelNotFound(text) if error.status_code == 404 else InvalidRequest(text)
    refusal.status = refusal.openai_status = error.status_code
    return _answer(request, refusal, dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # Nobody reads it; the access log does.


async def _unexpected(request: Request, error: Exception) -> Response:
    request_id = str(request.scope.get("request_id", "-"))
    log.error("request %s failed", request_id, exc_info=error)
    # This handler runs outside RequestId, so it sets the header itself.
    text = "internal error; the server's log has it under the request id"
    return _answer(request, RequestError(text), {"x-request-id": request_id})


class RequestId:
    """Gives every response an x-request-id, the client's own where it is a plain short word."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        plain = 0 < len(given) <= 64 and given.replace(b"-", b"").replace(b"_", b"").isalnum()
        request_id = given if plain else secrets.token_hex(8).encode()
        scope["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        await self.app(scope, receive, send_with_id)
