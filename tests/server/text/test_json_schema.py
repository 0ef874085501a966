"""Prepared schemas accept the right values, or are refused with keyword, value and place."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest

from server.config import EMBEDDED_MODEL
from server.errors import InvalidRequest
from server.text.codec import TextCodec
from server.text.json_schema import SchemaError, parse, prepare
from server.text.service import Source
from tests.support.inline_workers import Compiler
from tests.support.random_schemas import Trial, faults


def test_150_random_schemas_give_what_satisfies_them() -> None:
    """`python -m tests.trials.random_schemas` runs 2,000."""
    finished = 0
    with Trial(EMBEDDED_MODEL) as trial:
        for seed in range(150):
            result = trial.run(seed)
            assert not result.failed, (seed, result.failed)
            if result.text is not None:
                finished += 1
                assert not faults(result.text, result.schema), (seed, result.text)
    assert finished >= 90


class Follower:
    """Whether the grammar of a schema accepts a text."""

    def __init__(self) -> None:
        self._compiler = Compiler(TextCodec(EMBEDDED_MODEL))

    def takes(self, schema: Any, text: str) -> bool:
        from llguidance import LLMatcher

        async def compiled() -> str:
            return await self._compiler.compile(Source("json", schema, "field"))

        matcher = LLMatcher(self._compiler.tokenizer, asyncio.run(compiled()), log_level=0)
        tokens = self._compiler.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module")
def follower() -> Follower:
    return Follower()


A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "type": "object"}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "type": "object"}
TAGGED = {"oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}, {"type": "null"}]} | {
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name}, "n": {"type": "integer"}}}
        for name in "XY"
    }
}
DATE, TIME = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        (DATE, '"2020-02-29"', True),
        (DATE, '"2021-02-29"', False),
        (DATE, '"2000-02-29"', True),
        (DATE, '"1900-02-29"', False),
        (DATE, '"0000-01-01"', False),
        (DATE | {"pattern": "^2"}, '"1999-12-31"', False),
        (TIME, '"2021-06-30T23:59:59.5+02:00"', True),
        (TIME, '"2021-06-30T11:59:60Z"', False),
        (A, '{"a":1}', True),
        (A, '{"b":1}', False),
        (A | {"additionalProperties": True}, '{"b":1}', True),
        (A | {"additionalProperties": True}, '{"\\u0061":"x"}', False),
        (A | {"required": ["more"]}, '{"more":"x"}', True),
        ({"type": "object"}, '{"b":{"c":[1]}}', True),
        ({"properties": {"a": {"type": "integer"}}}, "1", False),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, '{"b":1}', False),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a":1,"b":1}', True),
        ({"allOf": [A, B]}, '{"a":1,"b":1}', True),
        ({"anyOf": [A, B]}, '{"a":1}', True),
        ({"anyOf": [A, B]}, '{"a":1,"b":1}', False),
        (TAGGED, '{"kind":"X","n":1}', True),
        (TAGGED, '{"kind":"Y"}', True),
        (TAGGED, '{"n":1}', False),
        (TAGGED, "null", True),
        ({"type": "string", "format": "password"}, '"x"', True),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False},
            '["x"]',
            False,
        ),
        ({"type": "integer", "maximum": 2**53 - 1}, "9007199254740991", True),
        (
            {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
            '{"x":1}',
            True,
        ),
    ],
    ids=str,
)
def test_what_a_schema_takes(follower: Follower, schema: Any, text: str, is_taken: bool) -> None:
    assert follower.takes(schema, text) is is_taken


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": ["number", "null"]},
        {"type": "number", "minimum": 0},
        {"type": "number", "maximum": 2.5},
        {"type": "number", "minimum": -1e6, "maximum": 1e6},
        {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01},
        {"type": "integer"},
        {"type": "integer", "minimum": 1},
        {"type": "integer", "multipleOf": 7},
        {"anyOf": [{"type": "number"}, {"type": "string"}]},
        {"allOf": [{"type": "number"}, {"minimum": 1}]},
        {},
        {"minimum": 1},
        {"title": "any", "x-y": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "place", ["items", "properties", "additionalProperties", "$ref", "prefixItems"]
)
def test_numbers_have_an_end(follower: Follower, schema: Any, place: str) -> None:
    """However many digits a model likes to write."""
    forms: dict[str, tuple[Any, str]] = {
        "items": ({"type": "array", "items": schema}, "[%s]"),
        "properties": ({"properties": {"a": schema}}, '{"a":%s}'),
        "additionalProperties": ({"type": "object", "additionalProperties": schema}, '{"a":%s}'),
        "$ref": (
            {"properties": {"a": {"$ref": "#/$defs/a b"}}, "$defs": {"a b": schema}},
            '{"a":%s}',
        ),
        "prefixItems": ({"type": "array", "prefixItems": [schema]}, "[%s]"),
    }
    whole, text = forms[place]
    assert follower.takes(whole, text % ("7" if "multipleOf" in schema else "2"))
    for digits in ("1" * 20, "7" * 40, "1." + "0" * 20, "0." + "1" * 17, "1e" + "1" * 10):
        assert not follower.takes(whole, text % digits)


def test_numbers_of_up_to_16_digits_are_taken(follower: Follower) -> None:
    for number in (
        "0",
        "-1",
        "0.1",
        "1234567890123456",
        "1234567890123.123",
        "-123456.1234567891",
        "0.0000000001",
    ):
        assert follower.takes({"type": "number"}, number), number
    assert follower.takes({"type": "integer"}, "1234567890123456789")
    assert follower.takes(
        {"type": "number", "minimum": 1e-11, "maximum": 1.5e-11}, "0.000000000012"
    )


def test_a_value_of_any_kind_has_a_bounded_depth(follower: Follower) -> None:
    for schema in (
        {"type": "object"},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "additionalProperties": {}},
    ):
        assert follower.takes(schema, '{"a":' + "[" * 7 + "]" * 7 + "}")
        assert not follower.takes(schema, '{"a":' + "[" * 12 + "]" * 12 + "}")
        assert not follower.takes(schema, '{"a":' * 12 + "1" + "}" * 12)


@pytest.mark.parametrize(
    "name", ["a b", "Page[int]", "Dict[str, Page<T>]", "a/b", "c~d", "100%", "é", "List`1"]
)
@pytest.mark.parametrize("written", ["plain", "encoded"])
@pytest.mark.parametrize("place", ["$defs", "definitions", "properties"])
def test_names_of_references(follower: Follower, name: str, written: str, place: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    pointer = quote(pointer, safe="") if written == "encoded" else pointer.replace("%", "%25")
    schema: dict[str, Any] = {
        "properties": {"v": {"$ref": f"#/{place}/{pointer}"}},
        "required": ["v"],
    }
    schema[place] = schema.get(place, {}) | {name: {"const": 1}}
    assert follower.takes(schema, '{"v":1}') and not follower.takes(schema, '{"v":2}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": 2**53 + 1}, "has const 9007199254740993 at #/const"),
        ({"items": {"enum": [1, {"a": 2**63}]}}, "at #/items/enum"),
        (
            {"properties": {"n": {"type": "integer", "minimum": -(2**60)}}},
            "has minimum -1152921504606846976 at #/properties/n/minimum",
        ),
        ({"type": "number", "maximum": 2.0**60}, "has maximum"),
        ({"type": "integer", "multipleOf": 12345}, "has multipleOf 12345 at #/multipleOf"),
        ({"type": "number", "multipleOf": 0.07}, "has multipleOf 0.07"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "at #/oneOf: one value could satisfy two branches",
        ),
        ({"oneOf": [A, B]}, "at #/oneOf: one value could satisfy two branches"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "one value could satisfy two branches"),
        (
            {"oneOf": [*TAGGED["$defs"].values(), {"type": "object"}]},  # type: ignore[attr-defined]
            "one value could satisfy two branches",
        ),
        (
            {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
            "has minProperties 2 at #/minProperties",
        ),
        ({"const": "\u0001"}, "control character"),
        ({"$ref": "https://example.com/x.json"}, "nothing is fetched"),
        (
            {
                "properties": {"a": {"$ref": "#s"}},
                "$defs": {"s": {"$anchor": "s", "type": "string"}},
            },
            "no schema of its own has this place",
        ),
        (
            {"properties": {"a": {"$id": "http://e/x", "$ref": "#/$defs/s", "$defs": {"s": {}}}}},
            "only the whole schema may have one",
        ),
        ({"oneOf": [{"const": 0}, {"const": -0.0}]}, "one value could satisfy two branches"),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}] * 2000, "$defs": {"a": {"enum": [1] * 10_000}}},
            "at most 64 branches",
        ),
        ({"type": "objct"}, 'has type "objct" at #/type: Invalid type: objct'),
        (
            {"properties": {"a": {"type": ["string", "nil"]}}},
            "at #/properties/a/type: Invalid type: nil",
        ),
        (
            {"properties": [1]},
            "has properties [1] at #/properties: it is not of the standard's form",
        ),
        (
            {"properties": {"a": 5}},
            "has a 5 at #/properties/a: a schema is an object, true or false",
        ),
        ({"allOf": 3}, "has allOf 3 at #/allOf: it is not of the standard's form"),
        ({"enum": []}, "has enum [] at #/enum"),
        ({"minLength": -1}, "has minLength -1 at #/minLength: Expected positive integer"),
        ({"items": {"maxItems": 1.5}}, "has maxItems 1.5 at #/items/maxItems"),
        ({"minimum": "1"}, 'has minimum "1" at #/minimum'),
        ({"oneOf": [{"$ref": "#/nothing"}, {}]}, "at #/oneOf"),
        ({"format": ["date"]}, 'has format ["date"] at #/format: it must be a text'),
        (
            {"required": [[1]], "properties": {}},
            "has required [[1]] at #/required: Expected string for 'required' item",
        ),
        (
            {"items": {"uniqueItems": True}},
            "has uniqueItems true at #/items/uniqueItems: it cannot be followed",
        ),
        ({"properties": {"a": {"not": {}}}}, "has not {} at #/properties/a/not"),
        ({"if": {}, "then": {"type": "string"}}, "has if {} at #/if"),
        (
            {"properties": {"a": {"pattern": "(?=x)"}}},
            'has pattern "(?=x)" at #/properties/a/pattern',
        ),
        (
            {"patternProperties": {"^a": {}, "b$": {}}},
            "at #/patternProperties: patterns must not overlap",
        ),
        ([], "which is an object"),
    ],
    ids=str,
)
def test_refusals_name_keyword_value_and_place(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare(schema)
    assert (
        words in str(caught.value)
        and len(str(caught.value)) < 250
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "1" * 400, "1" * 5000])
def test_numbers_that_are_not_finite_are_refused_before_anything_is_computed(number: str) -> None:
    with pytest.raises(SchemaError, match="not finite"):
        prepare(parse(f'{{"type": "integer", "multipleOf": {number}}}'))


def test_a_reference_may_name_any_schema_and_a_text_may_look_like_an_escape() -> None:
    schema = {
        "properties": {
            "a/b": {"type": "string"},
            "c": {"$ref": "#/properties/a~1b"},
            "d": {"$ref": "#/$defs/e%20f"},
        }
    }
    prepare(schema | {"$defs": {"e f": {"const": "a\\u0041"}}})


async def test_a_bound_on_optional_properties_is_refused_by_name() -> None:
    compiler = Compiler(TextCodec(EMBEDDED_MODEL))
    with pytest.raises(InvalidRequest, match="has maxProperties 2 at #/maxProperties"):
        await compiler.compile(
            Source(
                "json",
                json.dumps(A | {"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}),
                "field",
            )
        )


def test_settings_of_the_grammar_library_do_not_come_from_a_schema() -> None:
    settings = {"x-guidance": {"lenient": True, "whitespace_flexible": True}}
    prepared = prepare(
        settings | {"type": "object", "properties": {"a": settings | {"type": "string"}}}
    )
    assert "x-guidance" not in json.dumps(prepared)


def test_what_a_schema_says_of_itself_asserts_nothing() -> None:
    about = {
        "$schema": "x",
        "$comment": 3,
        "id": 5,
        "definitions": {"a": 5},
        "$vocabulary": {"y": True},
    }
    schema = {
        "$id": "https://example.com/x",
        "oneOf": [{"type": "string"}, {"$ref": "#/definitions/b"}],
    }
    prepared = prepare(about | schema | {"definitions": {"a": 5, "b": {"type": "null"}}})
    assert prepared["oneOf"] == [{"type": "string"}, {"$ref": "#/$defs/d0"}]


def test_names_of_patterns_that_cannot_be_followed_are_not_forbidden() -> None:
    told: list[str] = []
    schema = {
        "type": "object",
        "patternProperties": {"^(?!_).*$": {"type": "string"}},
        "additionalProperties": False,
    }
    prepared = prepare(schema, lambda at, value, why: told.append(at))
    assert prepared["additionalProperties"] == {"anyOf": [{"type": "string"}]}
    assert told == ["#/patternProperties", "#/additionalProperties"]
