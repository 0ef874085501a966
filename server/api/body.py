"""Bytes of a request to a checked model: limits first, then UTF-8, JSON, the schema. Every refusal is a RequestError in our words.

Knows JSON and pydantic; knows nothing of what the fields mean.
"""

import difflib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from server.errors import BodyTooLarge, InvalidRequest, MalformedBody, UnsupportedMedia

MAX_DEPTH = 64
Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, schema: type[Model], max_bytes: int) -> Model:
    """The body as a `schema`. Raises MalformedBody, UnsupportedMedia, BodyTooLarge or InvalidRequest."""
    value = parse(await _read(request, max_bytes))
    try:
        return schema.model_validate(value, strict=True)
    except ValidationError as error:
        raise InvalidRequest(f"Input validation error: {_describe(error.errors()[0], schema)}") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMedia("the body must be sent with content-type: application/json")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset.removeprefix("charset=").strip('"') not in ("utf-8", "utf8"):
        raise UnsupportedMedia("the body must be UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("content-encoding is not supported; send the body as it is")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is longer than {max_bytes} bytes (server.max_body_bytes)")
    return bytes(body)


def parse(body: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, one object, no key twice, finite numbers, no lone surrogates. Raises MalformedBody."""
    if not body.strip():
        raise MalformedBody("the body is empty; a JSON object was expected")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the body is not UTF-8 at byte {error.start}") from None
    _check_depth(text)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise MalformedBody(f"the body is not JSON at character {error.pos}") from None
    except ValueError:  # An integer of thousands of digits.
        raise MalformedBody("the body holds a number that is too long") from None
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object")
    if not text.isascii() or "\\u" in text:
        _check_text(value)
    return value


def _check_depth(text: str) -> None:
    """Counts brackets outside strings, before a recursive parser sees them."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth, in_string, escaped = 0, False, False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise MalformedBody(f"the body is nested deeper than {MAX_DEPTH}")
        elif character in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedBody(f"the key {_printable(twice)} occurs twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise MalformedBody(f"{name} is not JSON; numbers must be finite")


def _check_text(value: Any) -> None:
    """Refuses strings that are no Unicode text: half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise MalformedBody("a string holds a lone surrogate, which is no character") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _describe(detail: Any, schema: type[BaseModel]) -> str:
    """One sentence on the first thing wrong: field, bound, and the value where it is a number."""
    path = [str(part) for part in detail["loc"]]
    field, kind, context = ".".join(_printable(part) for part in path), detail["type"], detail.get("ctx", {})
    value = detail["input"]
    given = f". Given: {value}" if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else ""
    if kind == "extra_forbidden":
        return _unknown_field(path, schema)
    if kind == "missing":
        return f"`{field}` is required"
    if kind == "value_error":
        return str(context["error"]) if not field else f"`{field}` {context['error']}{given}"
    bounds = {
        "greater_than": ("must be > {gt}"),
        "greater_than_equal": ("must be >= {ge}"),
        "less_than": ("must be < {lt}"),
        "less_than_equal": ("must be <= {le}"),
        "too_long": "supports up to {max_length} items. Given: {actual_length}",
        "too_short": "cannot be empty",
        "string_too_short": "cannot be empty",
        "string_too_long": "must have at most {max_length} characters",
        "finite_number": "must be a finite number",
        "literal_error": "must be {expected}",
    }
    if kind in bounds:
        return f"`{field}` {bounds[kind].format(**context)}" + (given if kind.startswith(("greater", "less")) else "")
    wanted = kind.removesuffix("_type").removesuffix("_parsing").replace("_", " ")
    return f"`{field}` must be of type {wanted}"


def _unknown_field(path: list[str], schema: type[BaseModel]) -> str:
    known = list(schema.model_fields)
    for part in path[:-1]:
        annotation = schema.model_fields[part].annotation if part in schema.model_fields else None
        nested = [t for t in (annotation, *getattr(annotation, "__args__", ())) if isinstance(t, type) and issubclass(t, BaseModel)]
        known = list(nested[0].model_fields) if nested else []
    close = difflib.get_close_matches(path[-1][:64], known, n=1)
    return f"`{'.'.join(_printable(part) for part in path)}` is not a known field" + (f"; did you mean `{close[0]}`?" if close else "")


def _printable(name: str) -> str:
    """A client's own key, shortened and escaped, so that it can stand in a message and in a log line."""
    return ascii(name[:64])[1:-1]
