"""Errors in OpenAI's words."""

from typing import Any

from server.errors import RequestError

_NAMES = {"inputs": "prompt", "max_new_tokens": "max_tokens"}
"""Our names of fields that the dialect spells otherwise."""


def error_status(error: RequestError) -> int:
    """The HTTP status in this dialect."""
    return error.openai_status or error.status


def error_body(error: RequestError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    message, param = error.message, error.param
    for ours, theirs in _NAMES.items():
        message = message.replace(f"`{ours}`", f"`{theirs}`")
    param = None if param is None else _NAMES.get(param, param)
    return {"error": {"message": message, "type": error.openai_type, "param": param, "code": error.code or error_status(error)}}
