"""Random JSON schemas, outputs drawn under them by a model of random logits, and a validator that
reads the raw text.

The schemas use every supported keyword, some unsupported ones, and values at and beyond the
supported bounds.
"""

import asyncio
import datetime
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from server import protocol
from server.errors import ConstraintFailed, InvalidRequest
from server.text.codec import TextCodec
from server.text.service import Source
from tests.support.guided import read_grammars
from tests.support.inline_workers import Compiler

TEMPERATURE = 0.6
CLOSING = 5.0
"""Added to the logits of tokens that close a string, an array or an object."""
MOST_TOKENS = 500
NAMES = ["a", "b", "name", "n", "x y", "é", "kind", "a/b", "tab\t"]
FORMATS = [
    "date",
    "date-time",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "password",
    "int64",
    "uri-reference",
]
PATTERNS = [
    "^[a-c]{1,4}$",
    "^\\d{3}-\\d{2}$",
    "[xy]",
    "^(foo|bar)?$",
    "^[A-Z][a-z]{0,5}$",
    "^.{0,3}$",
    "^a|b$",
    "\\s",
    "^\\w{1,5}$",
]
checker = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])


@checker.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or (
        "T" in value and datetime.datetime.fromisoformat(value).tzinfo is not None
    )


@checker.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.time.fromisoformat(value).tzinfo is not None


@checker.checks("duration")
def _is_duration(value: object) -> bool:
    date = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
    time = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
    return (
        not isinstance(value, str)
        or re.fullmatch(f"P({date}({time})?|{time}|\\d+W)", value) is not None
    )


@checker.checks("uri")
def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or re.match("[A-Za-z][A-Za-z0-9+.-]*:", value) is not None


class Schemas:
    """A source of random schemas."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        for name in self.rng.sample(["A", "B", "C"], self.rng.choice([0, 0, 1, 2])):
            self.definitions[name] = self._object(2)
        schema = self._some(
            [self._object] * 4 + [self._array, self._any_of, self._one_of, self._all_of]
        )(0)
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema  # type: ignore[no-any-return]

    def _some(self, options: list[Any]) -> Any:
        return self.rng.choice(options)

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _schema(self, depth: int) -> Any:
        scalars = [
            self._integer,
            self._number,
            self._string,
            self._string,
            self._literal,
            self._simple,
        ]
        nested = [self._object, self._array, self._any_of, self._one_of, self._all_of]
        if self.definitions and self._chance(0.15):
            return {"$ref": f"#/$defs/{self._some([*self.definitions])}"}
        schema = self._some(scalars + nested * (depth < 3))(depth + 1)
        if self._chance(0.1):
            schema |= {"title": "t", "x-more": [1], "default": None}
        return schema

    def _simple(self, depth: int) -> dict[str, Any]:
        return self._some(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": ["integer", "null"], "maximum": 50},
                {"type": ["boolean", "string"]},
            ]
        )  # type: ignore[no-any-return]

    def _bounds(self, low: Any, high: Any) -> dict[str, Any]:
        schema = {}
        if self._chance(0.6):
            schema[self._some(["minimum", "exclusiveMinimum"])] = low
        if self._chance(0.7):
            schema[self._some(["maximum", "exclusiveMaximum"])] = high
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        size = 10 ** self.rng.randint(1, 6)
        low, high = sorted(self.rng.randint(-size, size) for _ in range(2))
        schema: dict[str, Any] = {"type": "integer"} | self._bounds(low, high + 2)
        if self._chance(0.2):
            schema["multipleOf"] = self._some(
                [2, 3, 5, 7, 10, 25, 100, 0.5, 1.5] + [12345] * self._chance(0.05)
            )
        if self._chance(0.02):
            schema = {"type": "integer"} | self._some(
                [
                    {"maximum": 2**53 - 1},
                    {"minimum": 2**53},
                    {"minimum": -(2**63)},
                    {"maximum": 2**64},
                ]
            )
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        digits, size = self.rng.randint(0, 6), 10 ** self.rng.randint(0, 4)
        low, high = sorted(round(self.rng.uniform(-size, size), digits) for _ in range(2))
        schema: dict[str, Any] = {"type": "number"} | self._bounds(low, high + 1)
        if self._chance(0.15):
            schema["multipleOf"] = self._some(
                [0.1, 0.5, 0.01, 0.25, 3, 1.5] + [0.07] * self._chance(0.05)
            )
        if self._chance(0.05):
            schema = {"type": "number", "minimum": self.rng.uniform(-1, 1)}
        return schema

    def _string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self._chance(0.3):
            schema["format"] = self._some(FORMATS)
        elif self._chance(0.4):
            schema["pattern"] = self._some(PATTERNS)
        if "format" not in schema and self._chance(0.6):
            schema["maxLength"] = self.rng.randint(2, 12)
            if self._chance(0.3):
                schema["minLength"] = self.rng.randint(0, 2)
        return schema

    def _value(self, depth: int) -> Any:
        values = [
            "x",
            "yy",
            "é",
            "",
            "a\nb",
            'q"',
            3,
            0,
            -7,
            1.5,
            0.1,
            1e-7,
            100.0,
            True,
            False,
            None,
            [1, "a"],
            [],
            {"k": [1]},
            {},
        ]
        return self._some(values + [2**53 - 1] + [2**53 + 1, 10**20, "\u0001"] * self._chance(0.05))

    def _literal(self, depth: int) -> dict[str, Any]:
        if self._chance(0.4):
            return {"const": self._value(depth)}
        return {"enum": [self._value(depth) for _ in range(self.rng.randint(1, 4))]}

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.9):
            schema["items"] = self._schema(depth)
        if self._chance(0.2):
            schema["prefixItems"] = [self._schema(depth) for _ in range(self.rng.randint(1, 3))]
        if self._chance(0.8):
            schema["maxItems"] = self.rng.randint(1, 4)
        if self._chance(0.3):
            schema["minItems"] = self.rng.randint(0, min(2, schema.get("maxItems", 2)))
        if self._chance(0.01):
            schema["uniqueItems"] = self._chance(0.5)
        return schema

    def _object(self, depth: int, names: Sequence[str] = NAMES) -> dict[str, Any]:
        names = self.rng.sample(names, self.rng.randint(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
        }
        if self._chance(0.7):
            schema["required"] = self.rng.sample(names, self.rng.randint(0, len(names))) + [
                "more"
            ] * self._chance(0.05)
        if self._chance(0.3):
            schema["additionalProperties"] = self._some(
                [False, False, True, {"type": "integer", "maximum": 9}]
            )
        if self._chance(0.06):
            schema["patternProperties"] = {"^p[0-9]$": {"type": "boolean"}}
        if self._chance(0.02):
            schema[self._some(["minProperties", "maxProperties"])] = self.rng.randint(1, 3)
        if self._chance(0.06):
            del schema["type"]
        if self._chance(0.05):
            del schema["properties"]
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {
            "anyOf": [self._schema(depth) for _ in range(self.rng.randint(1, 3))]
        }
        if self._chance(0.03):
            schema |= self._object(depth)
        return schema

    def _one_of(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            kinds = self.rng.sample([self._integer, self._string, self._object, self._array], 2)
            return {"oneOf": [kind(depth) for kind in kinds]}
        if self._chance(0.93):
            branches = [self._object(depth) for _ in range(self.rng.randint(2, 3))]
            for number, branch in enumerate(branches):
                branch["properties"] = {"kind": {"const": f"k{number}"}} | {
                    k: v for k, v in branch.get("properties", {}).items() if k != "kind"
                }
                branch["type"] = "object"
            return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
        return {"oneOf": [self._schema(depth) for _ in range(2)]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"allOf": [self._object(depth, NAMES[:4])]}
        if self._chance(0.6):
            schema["allOf"].append(self._object(depth, NAMES[4:]))
        for member in schema["allOf"] * self._chance(0.95):
            member.pop("additionalProperties", None)
        if self.definitions and self._chance(0.1):
            schema["allOf"].append({"$ref": f"#/$defs/{self._some([*self.definitions])}"})
        return schema | (self._object(depth) if self._chance(0.05) else {})


def faults(text: str, schema: dict[str, Any]) -> list[str]:
    """The problem with an output, by its text: numbers are compared as written, and a duplicate key
    is checked in either occurrence.
    """
    found = []
    for keep_first in (False, True):

        def pairs(items: list[tuple[str, Any]], keep_first: bool = keep_first) -> dict[str, Any]:
            return dict(reversed(items)) if keep_first else dict(items)

        value = json.loads(text, parse_float=Decimal, object_pairs_hook=pairs)
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        validator = jsonschema.Draft202012Validator(exact, format_checker=checker)
        found += [error.message[:200] for error in validator.iter_errors(value)]
    return found


def has_key_twice(text: str) -> bool:
    lengths: list[int] = []
    json.loads(text, object_pairs_hook=lambda items: lengths.append(len(items) - len(dict(items))))
    return any(lengths)


@dataclass
class Result:
    """`refused`: message of the refusal; `failed`: message of a failure after the schema was
    accepted; `text`: the finished output.
    """

    schema: dict[str, Any]
    refused: str = ""
    failed: str = ""
    text: str | None = None


class Trial:
    """Runs schemas through the check and the engine's constraint, on one tokenizer."""

    def __init__(self, folder: Path) -> None:
        codec = TextCodec(folder)
        self.codec, self.vocab_size, self.ends = (
            codec,
            codec.largest_id + 1,
            list(codec.end_token_ids),
        )
        self.compiler = Compiler(codec)
        self.grammars = read_grammars(codec.path, self.ends)
        texts = [codec.decode([id]) for id in range(self.vocab_size)]
        self.bias = np.array(
            [CLOSING if text and not text.strip('"}],') else 0.0 for text in texts]
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def run(self, seed: int) -> Result:
        result = Result(Schemas(seed).make())
        try:
            source = Source("json", result.schema, "schema")
            grammar = self._runner.run(self.compiler.compile(source))
        except InvalidRequest as error:
            result.refused = error.message
            return result
        try:
            result.text = self._draw(grammar, seed)
        except ConstraintFailed as error:
            result.failed = str(error)
        return result

    def _draw(self, grammar: str, seed: int) -> str | None:
        message = protocol.Submit(
            0, [1], [], MOST_TOKENS, 0, self.ends, protocol.Sampling(), grammar=grammar
        )
        constraint, rng, output = self.grammars.constraint(message), np.random.default_rng(seed), []
        assert constraint is not None
        output += constraint.forced
        while len(output) < MOST_TOKENS and not {*output[-1:]} & {*self.ends}:
            assert constraint.mask is not None
            bits = np.unpackbits(np.frombuffer(constraint.mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            logits = (
                rng.standard_normal(len(allowed))
                + self.bias[np.minimum(allowed, self.vocab_size - 1)]
            )
            token = int(allowed[np.argmax(logits / TEMPERATURE + rng.gumbel(size=len(allowed)))])
            output.append(token)
            if token not in self.ends:
                constraint.advance(token)
                output += constraint.forced
        return self.codec.decode(output[:-1]) if output[-1] in self.ends else None
