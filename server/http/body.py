"""Reads the body of a request as a pydantic model: checks size, UTF-8, JSON, nesting, then the
schema.

Invariant: every refusal is a RequestError with a message of this server, not of a library. It knows
nothing of what the fields mean.
"""

import asyncio
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from server.config import ServerSection
from server.errors import BodyTooLarge, InvalidRequest, MalformedBody, UnsupportedMedia
from server.http.exchange import exchange_of
from server.http.unknown_fields import Known, printable

MAX_DEPTH = 64
MAX_CONTAINERS = 16_384
LARGE_BYTES = 2**16
_turn = asyncio.Lock()
"""Held while a larger body is parsed, which takes up to tens of milliseconds: one in a turn of the
event loop, however many arrive."""
MAX_VALUES = 2**18
"""Items of arrays and members of objects in all: as many are parsed and checked in less than 50 ms,
while nothing else runs."""
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or an unterminated one at the end of the text. Possessive quantifiers: no
backtracking."""
_NAMED = re.compile("`([^`]+)`")
_BRACKET = re.compile(r"[\[\]{}]")
_JSON_NAMES = {"None": "null", "False": "false", "True": "true"}
_JSON_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "list": "array",
    "dict": "object",
    "model": "object",
}
Model = TypeVar("Model", bound=BaseModel)


async def read_model(
    request: Request, schema: type[Model], section: ServerSection, any_type: bool = False
) -> Model:
    """The body as a `schema`; the response tells the fields of it that are ignored. `any_type`:
    whatever its content type says. Raises MalformedBody, UnsupportedMedia, BodyTooLarge or
    InvalidRequest.
    """
    value = await read_value(request, section.max_body_bytes, any_type)
    body, exchange_of(request).ignored = check(value, schema, section.strict_fields)
    return body


async def read_value(request: Request, max_bytes: int, any_type: bool = False) -> dict[str, Any]:
    """The body as a JSON object; `any_type`: whatever its content type says. Raises MalformedBody,
    UnsupportedMedia or BodyTooLarge.
    """
    if not any_type:
        _check_type(request)
    body = await read_bytes(request, max_bytes)
    if len(body) < LARGE_BYTES:
        return parse(body)
    async with _turn:
        value = parse(body)
        # Inside, so that the next large body is parsed in the next turn of the event loop.
        await asyncio.sleep(0)
    return value


def check(
    value: dict[str, Any], schema: type[Model], strict_fields: bool = False
) -> tuple[Model, list[str]]:
    """`value` as a `schema`, and the places of its fields that are ignored. Raises
    InvalidRequest.
    """
    known = Known(schema, strict_fields)
    try:
        return schema.model_validate(known.members(value, schema), strict=True), [*known.ignored]
    except ValidationError as error:
        message = _describe(error.errors(include_url=False)[0])
        named = _NAMED.match(message)
        raise InvalidRequest(message, param=named[1] if named else None) from None


def _check_type(request: Request) -> None:
    """Raises UnsupportedMedia unless the body is sent as JSON."""
    media_type, *parameters = (
        part.strip().lower()
        for part in ",".join(request.headers.getlist("content-type")).split(";")
    )
    if media_type != "application/json":
        raise UnsupportedMedia("the body must be sent with content-type: application/json")
    if any(
        p.startswith("charset=") and p.removeprefix("charset=").strip('"') not in ("utf-8", "utf8")
        for p in parameters
    ):
        raise UnsupportedMedia("the body must be UTF-8")
    if any(
        encoding.lower() != "identity" for encoding in request.headers.getlist("content-encoding")
    ):
        raise UnsupportedMedia("content-encoding is not supported; send the body as it is")


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body of a request, whatever it holds. Raises BodyTooLarge as soon as it is known to have
    more bytes than `max_bytes`.
    """
    too_large = BodyTooLarge(f"the body is longer than {max_bytes} bytes (server.max_body_bytes)")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large  # Before the first byte of the body is read.
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    exchange_of(request).body = bytes(body)
    return exchange_of(request).body


def parse(body: bytes) -> dict[str, Any]:
    """Parses JSON: UTF-8, one object, no lone surrogates; of a key that occurs twice the last value
    counts. Raises MalformedBody.
    """
    if not body.strip():
        raise MalformedBody("the body is empty; a JSON object was expected")
    _check_nesting(body.decode("utf-8", errors="replace"))
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object")
    return value


def _check_nesting(text: str) -> None:
    """Raises MalformedBody if brackets outside strings are nested too deeply or too many, before
    it is parsed.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH and text.count(",") <= MAX_VALUES:
        return
    bare = _STRING.sub("", text)
    if bare.count(",") > MAX_VALUES:
        raise MalformedBody(
            f"the body holds more than {MAX_VALUES} values in arrays and objects; send several "
            "requests"
        )
    depth = opened = 0
    for bracket in _BRACKET.finditer(bare):
        if bracket[0] in "]}":
            depth -= 1
            continue
        depth, opened = depth + 1, opened + 1
        if depth > MAX_DEPTH:
            raise MalformedBody(f"the body is nested deeper than {MAX_DEPTH}")
        if opened > MAX_CONTAINERS:
            raise MalformedBody(f"the body holds more than {MAX_CONTAINERS} arrays and objects")


def _describe(detail: Any) -> str:
    """The message for pydantic's first error: the field, the bound, and the given value if it is a
    number.
    """
    # Without tags of unions, such as <word>.
    path = [printable(part) for part in map(str, detail["loc"]) if not part.startswith("<")]
    field = ".".join(path)
    kind = detail["type"]
    context = detail.get("ctx", {})
    value = detail["input"]
    given = (
        f". Given: {value}"
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
        else ""
    )
    if kind == "missing":
        return f"`{field}` is required"
    if kind == "value_error":
        # Raised by a validator of the models, whose message names the field.
        return str(context["error"])
    bounds = {
        "greater_than": "must be > {gt}",
        "greater_than_equal": "must be >= {ge}",
        "less_than": "must be < {lt}",
        "less_than_equal": "must be <= {le}",
        "too_long": "is not supported"
        if context.get("max_length") == 0
        else "supports up to {max_length} items",
        "too_short": "cannot be empty",
        "string_too_short": "cannot be empty",
        "string_pattern_mismatch": "must match {pattern}",
        "string_too_long": "must have at most {max_length} characters",
        "finite_number": "must be a finite number",
        "literal_error": "is supported only as "
        f"{_JSON_NAMES.get(context.get('expected', ''), '{expected}')}",
    }
    if kind in bounds:
        return f"`{field}` {bounds[kind].format(**context)}" + (
            given if kind.startswith(("greater", "less")) else ""
        )
    wanted = kind.removesuffix("_type").removesuffix("_parsing").replace("_", " ")
    return f"`{field}` must be of type {_JSON_TYPES.get(wanted, wanted)}"
