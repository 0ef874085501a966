"""The form of Anthropic's errors."""

from typing import Any

from server.errors import RequestError, TooLongPrompt
from server.http.errors import Dialect, openai_message, openai_status

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Statuses -> the types of their errors; of others it is `invalid_request_error`."""


def _body(error: RequestError) -> dict[str, Any]:
    """Clients know by the words of the message that a prompt is too long, and read both numbers."""
    message = openai_message(error)
    if isinstance(error, TooLongPrompt):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
    kind = TYPES.get(openai_status(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


DIALECT = Dialect(_body)
