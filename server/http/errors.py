"""Dialects: how an API tells its errors. TGI's and OpenAI's belong to the core; an extension that
follows another API has a dialect of its own. Knows no routes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from server.errors import BadSize, RequestError

_OPENAI_NAMES = {"inputs": "prompt", "max_new_tokens": "max_tokens"}
"""Messages of BadSize name fields as TGI does: TGI's name -> that of other dialects."""


def openai_status(error: RequestError) -> int:
    """The status of an error in every dialect but TGI's."""
    return error.openai_status or error.status


def openai_message(error: RequestError) -> str:
    """The message of an error in every dialect but TGI's."""
    message = error.message
    if isinstance(error, BadSize):
        for ours, theirs in _OPENAI_NAMES.items():
            message = message.replace(f"`{ours}`", f"`{theirs}`")
    return message


def _openai_body(error: RequestError) -> dict[str, Any]:
    param = error.param
    if isinstance(error, BadSize):
        param = _OPENAI_NAMES.get(param or "", param)
    return {
        "error": {
            "message": openai_message(error),
            "type": error.openai_type,
            "param": param,
            "code": error.code or openai_status(error),
        }
    }


def _tgi_body(error: RequestError) -> dict[str, Any]:
    """TGI's clients choose their exception by `error_type`, and by the status only where it is
    absent.
    """
    kind = {} if error.tgi_type is None else {"error_type": error.tgi_type}
    return {"error": error.message} | kind


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of errors: the body of a response, which is also the event that ends a stream, and
    the status.
    """

    body: Callable[[RequestError], dict[str, Any]]
    status: Callable[[RequestError], int] = openai_status

    def response(self, error: RequestError, headers: dict[str, str] | None = None) -> Response:
        """The response to a refused request."""
        headers = dict(headers or {})
        if error.retry_after is not None:
            headers["retry-after"] = str(error.retry_after)
        return JSONResponse(self.body(error), status_code=self.status(error), headers=headers)


TGI = Dialect(_tgi_body, lambda error: error.status)
OPENAI = Dialect(_openai_body)
