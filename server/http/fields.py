"""Field types with bounds, base classes of request bodies, and checks that both dialects share.

Invariant: a field has the same bounds on every route that has it. It knows no routes.
"""

import re
import secrets
from collections.abc import Container, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from server import protocol
from server.generation.price import MAX_TOP
from server.text.service import Source

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_KEYS = 2048
Value = TypeVar("Value")
Part = TypeVar("Part")
ANY_JSON = object()
"""Marks fields that take any JSON value. server.http.body bounds them with the whole body: its
bytes, depth, values and containers."""
Json = Annotated[Any, ANY_JSON]


def _nothing(value: Any, info: ValidationInfo) -> None:
    if value:
        raise ValueError(f"`{info.field_name}` is not supported")


Unsupported = Annotated[Json, AfterValidator(_nothing)]
"""A field of another server that is refused, but for values that say nothing."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def _integral(value: Any) -> Any:
    """Converts 3.0 to 3, as JSON Schema defines integers: some languages write every number as a
    float.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few(value: Any) -> Any:
    """Refuses a large object before each of its members is checked, which cannot fail fast."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        bounds = {"field_type": "Dictionary", "max_length": MAX_KEYS, "actual_length": len(value)}
        raise PydanticKnownError("too_long", bounds)
    return value


FEW = BeforeValidator(_few)
INTEGRAL = BeforeValidator(_integral)
"""Accepts floats with integral values. It must follow the bounds: pydantic leaves bounds after a
validator out of the JSON Schema."""
Integer = Annotated[int, INTEGRAL]
Count = Annotated[int, Field(ge=0, lt=2**31), INTEGRAL]
Positive = Annotated[int, Field(ge=1, lt=2**31), INTEGRAL]
Limit = Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL]
"""A largest number of tokens; -1: as many as there are room for, or to choose from."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[
    Annotated[int, Field(ge=-1, lt=2**63, examples=[42]), INTEGRAL] | None,
    AfterValidator(lambda seed: None if seed == -1 else seed),
]
"""-1 means a random seed, as in vLLM and llama.cpp."""
Seconds = Annotated[float, Field(ge=0.001, le=86_400)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31), INTEGRAL]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP), INTEGRAL]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Name = Annotated[str, Field(max_length=1024)]
"""A name, a key of an object, or an opaque value."""

JsonObject = Annotated[dict[Name, Json], Field(max_length=MAX_KEYS), FEW]
Text = Annotated[str, Field(max_length=2**24)]
LogitBias = Annotated[
    dict[Name, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024), FEW
]
StopTokenIds = Annotated[list[TokenId], Field(max_length=128, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=2**20, fail_fast=True)]
AllowedTokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**24)]],
    Field(min_length=1, max_length=2**20, fail_fast=True),
]
"""Ids below 2**24, larger than any vocabulary: they become a bitmap."""


class Body(BaseModel):
    """Base of every body. server.http.unknown_fields has removed unknown fields, and nulls, which
    stand for the default of a field. The docstring of a field is its description in the OpenAPI
    document.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def fit(self, variables: Container[str]) -> list[str]:
        """Leaves out what sets none of the `variables` that the chat template reads. Returns its
        places.
        """
        return []


def default(value: Value | None, otherwise: Value) -> Value:
    """`value`, or `otherwise` if it is None."""
    return otherwise if value is None else value


def text_or_list(value: Any) -> Any:
    """Checks a field that takes a string or an array. Its error names both, where pydantic's would
    name the array alone.
    """
    if value is None or isinstance(value, str | list):
        return value
    raise PydanticCustomError("string_or_array_type", "must be a string or an array")


def _inputs(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    """A list of inputs, each a text or token ids. Raises ValueError that names the first invalid
    one.
    """
    name = str(info.field_name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            f"`{name}` must be a text, a list of texts, a list of token ids, or a list of such "
            "lists"
        )
    if not value:
        raise ValueError(f"`{name}` cannot be empty")
    several = value if isinstance(value[0], str | list) else [value]
    for number, each in enumerate(several):
        place = name if several is not value else f"{name}.{number}"
        if type(each) is not type(several[0]):
            raise ValueError(f"`{place}` differs in kind from the first one")
        if isinstance(each, list):
            _check_ids(each, place)
    return several


def _check_ids(ids: list[Any], name: str) -> None:
    if not ids:
        raise ValueError(f"`{name}` cannot be empty")
    for index, id in enumerate(ids):
        if type(id) is not int or not 0 <= id < 2**31:
            raise ValueError(f"`{name}.{index}` must be a token id: an integer >= 0")


ONE_OR_MORE = BeforeValidator(_inputs, Text | list[Text] | TokenIds | list[TokenIds])
"""Makes a list of inputs of a text, a list of texts, a list of token ids or a list of such
lists."""


def in_list(value: Any) -> Any:
    """A text as a list of one."""
    return [value] if isinstance(text_or_list(value), str) else value


def as_parts(value: Any) -> Any:
    """A text as a list of one part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Part], Field(max_length=1024, fail_fast=True), BeforeValidator(as_parts)]
"""Parts of a kind; a text is a list of one."""


def check_logit_bias(bias: dict[str, float] | None, name: str) -> None:
    """Raises ValueError if a key is not a token id."""
    for key in bias or {}:
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(
                f"`{name}` has the key {key[:16]!a}, which is no token id: up to 9 decimal "
                "digits, no leading zero"
            )


def check_minimum(minimum: int | None, maximum: int | None, names: tuple[str, str]) -> None:
    """Raises ValueError if the minimum is above the maximum."""
    if minimum and maximum is not None and minimum > maximum:
        raise ValueError(f"`{names[0]}` must be <= `{names[1]}` {maximum}. Given: {minimum}")


class ResultPart(Body):
    """A part of a tool's result."""

    type: Name
    """The kind of part. The model is told of what is no text that it cannot be shown."""
    text: Text | None = None
    """The text."""

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return f"({self.type} that cannot be shown)" if self.text is None else self.text


class Named(Body):
    """A body that names the model."""

    model: Name | None = None
    """A name that GET /v1/models lists, or what --model was given; `dummy`, `tgi` and "" too.
    Default: the served model."""


class DeliveryBody(Body):
    """Fields of every route that generates text: how the answer is delivered, and when the request
    is served.
    """

    stream: bool | None = None
    """Whether the answer comes as server-sent events, as the text is generated. Default: false."""
    resumable: bool | None = None
    """Whether the stream can be read again, and goes on, after its connection was lost: GET
    /v1/streams/{stream_id}. Only with `stream`. Default: false.
    """
    priority: Priority | None = None
    """Waiting requests with a lower number are served first: the client's own, or everybody's where
    its key may. Default: 0."""


class LimitedBody(DeliveryBody):
    """Fields of most generating routes: a time limit, and a salt of the prefix cache."""

    timeout_s: Seconds | None = None
    """Time limit in seconds, from 0.001 on, waiting included. A request that has begun by then ends
    with what it has and the finish reason `timeout`; one that still waits is answered 504. Default:
    none.
    """
    cache_salt: Name | None = None
    """Requests share the KV cache of common prefixes only with requests of the same API key and the
    same salt. Default: no salt."""


SETTINGS = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
}
"""Sampling parameters that are numbers, by the names that they also have in the engine."""


class SamplingBody(Body):
    """Sampling parameters of both dialects, but `temperature`, whose bounds and defaults differ."""

    top_k: Limit | None = None
    """Sample from this many most likely tokens only; at most the size of the vocabulary. 0 and -1:
    from all. Default: all."""
    top_p: TopP | None = None
    """Sample from the most likely tokens whose probabilities add up to this share. Default: 1.0,
    all tokens."""
    min_p: Share | None = None
    """Sample only tokens at least this share as likely as the most likely token. Default: 0, all
    tokens."""
    typical_p: TopP | None = None
    """Locally typical sampling: sample from the tokens whose information is nearest to the
    distribution's entropy, as many as hold this share of the probability. Default: 1.0, all tokens.
    """
    repetition_penalty: RepetitionPenalty | None = None
    """Positive logits of tokens that occur in the prompt or in the output are divided by this,
    negative ones multiplied. Default: 1.0, no penalty.
    """
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time the token occurs in the output. Default:
    0."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of each token that occurs in the output. Default: 0."""
    logit_bias: LogitBias | None = None
    """Added to the logits of these tokens: token ids, as strings of decimal digits, to biases from
    -100 to 100. Up to 1024 tokens. Default: none.
    """
    allowed_token_ids: AllowedTokenIds | None = None
    """Only these token ids may be generated. Default: all of the vocabulary."""
    seed: Seed = None
    """Seed of the random draws: the same request with the same seed gets the same tokens where GET
    /info has `deterministic: true`, and nearly always elsewhere. 0 to 2**63 - 1. -1, the default:
    drawn at random for each request.
    """
    min_tokens: Count | None = None
    """Tokens to generate before a stop token, a stop string or the end of sequence may end the
    output. Default: 0."""
    stop_token_ids: StopTokenIds | None = None
    """Token ids that end the output, as the end of sequence does. Up to 128. Default: none."""
    ignore_eos: bool | None = None
    """Whether generation goes on after the end-of-sequence token, up to the limit of tokens.
    Default: false."""

    def sampling(self, defaults: Mapping[str, float]) -> protocol.Sampling:
        """The engine's sampling parameters. `defaults`: of those that the body does not have.
        Without a seed one is drawn here, so that it can be reported, and used again when the
        request is replayed after a crash of the engine.
        """
        given = self.model_dump(include=SETTINGS, exclude_none=True)
        values: dict[str, Any] = {**defaults, **given}
        values["top_k"] = max(0, values.get("top_k", 0))
        return protocol.Sampling(
            **values,
            logit_bias={int(key): value for key, value in (self.logit_bias or {}).items()},
            allowed_tokens=protocol.bitmap({*(self.allowed_token_ids or ())}),
            seed=self.drawn_seed(),
        )

    def drawn_seed(self) -> int:
        """The seed, or one that is drawn, another at each call."""
        return secrets.randbits(63) if self.seed is None else self.seed


class JsonSchema(Body):
    """A JSON Schema with a name, as OpenAI and TGI wrap it."""

    name: str | None = Field(default=None, max_length=256)
    """A name for the schema. It changes nothing in the answer."""
    description: str | None = Field(default=None, max_length=4096)
    """A description of the schema. It changes nothing in the answer."""
    strict: bool | None = None
    """Accepted for OpenAI's clients: the output always follows the schema."""
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """The JSON Schema that the output follows. Required."""


class Format(Body):
    """A constraint on the output: OpenAI's `response_format` (`type` and `json_schema`) and TGI's
    `grammar` (`type` and `value`). Both forms are accepted in both places.
    """

    type: str = Field(max_length=32)
    """`text` (no constraint), `json` or `json_object` (a JSON object, or what the schema in `value`
    says), `json_schema`, or `regex`."""
    value: Json = None
    """For `json` and `json_object` a JSON Schema; for `regex` a regular expression that the whole
    output matches; for `json_schema` what `json_schema` holds.
    """
    json_schema: JsonSchema | None = None
    """The schema of the type `json_schema`."""
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """For `json_object` and `json` the JSON Schema that the object follows, as llama.cpp takes
    it."""

    def source(self, field: str) -> Source | None:
        """The constraint, None for plain text. Raises ValueError for an unknown type or a missing
        value.
        """
        given = [
            value for value in (self.value, self.json_schema, self.schema_) if value is not None
        ]
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(f"`{field}.json_schema` goes with the type json_schema")
        if self.schema_ is not None and self.type not in ("json", "json_object"):
            raise ValueError(f"`{field}.schema` goes with the type json_object")
        if len(given) > (self.type != "text"):
            raise ValueError(f"`{field}` has more than its type {self.type!a} takes")
        if self.type == "text":
            return None
        if self.type in ("json", "json_object"):
            return Source("json", given[0] if given else {"type": "object"}, field)
        if self.type == "json_schema":
            wrapped = self.json_schema or JsonSchema.model_validate(
                self.value if isinstance(self.value, dict) else {}, strict=True
            )
            if wrapped.schema_ is None:
                raise ValueError(f"`{field}.json_schema.schema` is required")
            return Source("json", wrapped.schema_, field)
        if self.type == "regex":
            if not isinstance(self.value, str):
                raise ValueError(f"`{field}.value` must be a regular expression")
            return Source("regex", self.value, field)
        raise ValueError(f"`{field}.type` must be text, json, json_object, json_schema or regex")
