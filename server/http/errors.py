"""Converts errors to responses in the dialect of the route. Knows no routes."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import BadSize, RequestError
from server.http import sse
from server.http.exchange import Dialect, exchange_of

_OPENAI_NAMES = {"inputs": "prompt", "max_new_tokens": "max_tokens"}
"""Messages of BadSize name fields as TGI does: TGI's name -> that of other dialects."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_status(error: RequestError, dialect: Dialect) -> int:
    """The HTTP status of an error, which may depend on the dialect."""
    return (dialect is not Dialect.TGI and error.openai_status) or error.status


def error_body(error: RequestError, dialect: Dialect) -> dict[str, Any]:
    """The body in a dialect's form. TGI's clients choose their exception by `error_type`, and by
    the status only where it is absent.
    """
    if dialect is Dialect.TGI:
        return {"error": error.message} | (
            {} if error.tgi_type is None else {"error_type": error.tgi_type}
        )
    message, param = error.message, error.param
    if isinstance(error, BadSize):
        for ours, theirs in _OPENAI_NAMES.items():
            message = message.replace(f"`{ours}`", f"`{theirs}`")
        param = _OPENAI_NAMES.get(param or "", param)
    if dialect is Dialect.PLAIN:
        return {"error": message}
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error_status(error, dialect), "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {
        "error": {
            "message": message,
            "type": error.openai_type,
            "param": param,
            "code": error.code or error_status(error, dialect),
        }
    }


def refusal(
    request: Request, error: RequestError, headers: dict[str, str] | None = None
) -> Response:
    """The response to a refused request."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    dialect = exchange_of(request).dialect
    return JSONResponse(
        error_body(error, dialect), status_code=error_status(error, dialect), headers=headers
    )


def event(dialect: Dialect, form: sse.Form, error: RequestError) -> bytes:
    """An error that ends a stream."""
    return sse.event(error_body(error, dialect), form)
