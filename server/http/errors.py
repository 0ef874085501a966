"""Errors to responses, in the dialect that a route's clients read. Knows no routes but by `speaks_openai`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import RequestError

_OPENAI_NAMES = {"inputs": "prompt", "max_new_tokens": "max_tokens"}
"""Our names of fields that OpenAI's dialect spells otherwise."""


def speaks_openai(request: Request) -> bool:
    """Which of the two error bodies a route's clients read."""
    path = request.scope["path"]
    return bool(request.scope.get("openai")) or path.startswith("/v1/") or path in ("/infill", "/detokenize")


def tgi_error_body(error: RequestError) -> dict[str, str]:
    """An error in TGI's dialect. Its clients raise by `error_type`, and by the status only where there is none."""
    return {"error": error.message} | ({} if error.tgi_type is None else {"error_type": error.tgi_type})


def openai_error_status(error: RequestError) -> int:
    """The HTTP status in OpenAI's dialect."""
    return error.openai_status or error.status


def openai_error_body(error: RequestError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    message, param = error.message, error.param
    for ours, theirs in _OPENAI_NAMES.items():
        message = message.replace(f"`{ours}`", f"`{theirs}`")
    param = None if param is None else _OPENAI_NAMES.get(param, param)
    return {"error": {"message": message, "type": error.openai_type, "param": param, "code": error.code or openai_error_status(error)}}


def refusal(request: Request, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The response to a refused request."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if speaks_openai(request):
        return JSONResponse(openai_error_body(error), status_code=openai_error_status(error), headers=headers)
    return JSONResponse(tgi_error_body(error), status_code=error.status, headers=headers)
