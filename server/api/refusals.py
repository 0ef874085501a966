"""Errors to responses, in the dialect that a route's clients read. The one place where that is done."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api.openai_errors import error_body, error_status
from server.errors import RequestError


def speaks_openai(request: Request) -> bool:
    """Which of the two error bodies a route's clients read."""
    path = request.scope["path"]
    return bool(request.scope.get("openai")) or path.startswith("/v1/") or path in ("/infill", "/detokenize")


def tgi_error_body(error: RequestError) -> dict[str, str]:
    """An error in TGI's words. Its clients raise by `error_type`, and by the status only where there is none."""
    return {"error": error.message} | ({} if error.tgi_type is None else {"error_type": error.tgi_type})


def refusal(request: Request, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The answer that an error is."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if speaks_openai(request):
        return JSONResponse(error_body(error), status_code=error_status(error), headers=headers)
    return JSONResponse(tgi_error_body(error), status_code=error.status, headers=headers)
