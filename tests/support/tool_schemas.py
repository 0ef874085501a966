"""Schemas of tools as libraries publish them: pydantic 2, zod 4, MCP servers, Java (victools,
Spring AI, LangChain4j, swagger) and .NET (System.Text.Json's exporter, NJsonSchema,
Microsoft.Extensions.AI).

Each library is a table of the fields that its types become, and a function that wraps fields into
the parameters of a tool as that library does. What matters are the combinations of keywords.
"""

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

import jsonschema

Node = dict[str, Any]
STRING: Node = {"type": "string"}
INTEGER: Node = {"type": "integer"}
NUMBER: Node = {"type": "number"}
NULL: Node = {"type": "null"}
POINT: Node = {
    "type": "object",
    "properties": {"x": NUMBER, "y": NUMBER},
    "required": ["x", "y"],
}
LOOK_AHEAD = "^(?!\\.)(?!.*\\.\\.)[A-Za-z0-9_.]+@[a-z]+\\.[a-z]{2,}$"
SAFE = 2**53 - 1


def _tree(name: str, defs: str = "$defs") -> Node:
    """A node with a list of its own kind."""
    return {
        "type": "object",
        "properties": {
            "value": INTEGER,
            "children": {"type": "array", "items": {"$ref": f"#/{defs}/{name}"}},
        },
        "required": ["value"],
    }


def _cat(tag: str, key: str = "kind", **more: Any) -> Node:
    """A branch of a tagged union."""
    properties = {key: {"const": tag, "type": "string"}, "size": {"type": "integer"}}
    return {"type": "object", "properties": properties | more}


def _titled(name: str, node: Node) -> Node:
    return node | {"title": name.title()}


def _optional(node: Node) -> Node:
    return {"anyOf": [node, NULL], "default": None}


PYDANTIC: dict[str, Node] = {
    "int": INTEGER,
    "optional_int": _optional(INTEGER),
    "float": NUMBER,
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "percent": {"type": "number", "minimum": 0, "maximum": 100, "description": "in percent"},
    "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "cents": {"type": "number", "multipleOf": 0.01},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "literal": {"const": "fast", "type": "string"},
    "literals": {"enum": ["a", "b", 3], "title": "Mode"},
    "str_pattern": {"type": "string", "pattern": "^[a-z]{2,4}$", "maxLength": 8},
    "look_ahead": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,8}$"},
    "decimal": {
        "anyOf": [NUMBER, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]
    },
    "uuid": {"type": "string", "format": "uuid"},
    "datetime": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "timedelta": {"type": "string", "format": "duration"},
    "url": {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    "email": {"type": "string", "format": "email"},
    "path": {"type": "string", "format": "path"},
    "bytes": {"type": "string", "format": "binary"},
    "secret": {"type": "string", "format": "password", "writeOnly": True},
    "json": {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"type": "integer"},
    },
    "base64": {"type": "string", "format": "base64", "contentEncoding": "base64"},
    "any": {},
    "list": {"type": "array", "items": STRING},
    "conlist": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    "set": {"type": "array", "items": STRING, "uniqueItems": True},
    "tuple": {
        "type": "array",
        "prefixItems": [INTEGER, STRING],
        "minItems": 2,
        "maxItems": 2,
    },
    "dict": {"type": "object", "additionalProperties": INTEGER},
    "dict_any": {"type": "object", "additionalProperties": True},
    "dict_pattern": {"type": "object", "patternProperties": {"^[a-z]+$": INTEGER}},
    "dict_enum": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": NUMBER,
    },
    "union": {"anyOf": [INTEGER, STRING, {"type": "array", "items": NUMBER}]},
    "deprecated": {"type": "string", "deprecated": True, "examples": ["x"]},
    "extra": {"type": "string", "x-order": 3, "markdownDescription": "**bold**"},
    "read_only": {"type": "integer", "readOnly": True},
    "enum": {"$ref": "#/$defs/Color"},
    "enum_default": {"$ref": "#/$defs/Color", "default": "red", "description": "a color"},
    "enum_all_of": {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"},
    "model": {"$ref": "#/$defs/Point"},
    "optional_model": _optional({"$ref": "#/$defs/Point"}),
    "recursive": {"$ref": "#/$defs/Node"},
    "generic": {"$ref": "#/$defs/Page[int]"},
    "generic_of_generic": {"$ref": "#/$defs/Dict[str, Page<T>]"},
    "quoted": {"$ref": "#/$defs/My%20Type"},
    "slashed": {"$ref": "#/$defs/a~1b~0c"},
    "tagged": {
        "discriminator": {"mapping": {"cat": "#/$defs/Cat"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    "one_of": {"oneOf": [INTEGER, NUMBER]},
    "json_value": {"$ref": "#/$defs/JsonValue"},
}
PYDANTIC_DEFS: Node = {
    "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
    "Point": POINT | {"title": "Point", "additionalProperties": False},
    "Node": _tree("Node"),
    "Page[int]": {"type": "object", "properties": {"items": {"type": "array", "items": INTEGER}}},
    "Dict[str, Page<T>]": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Page[int]"}},
    "My Type": {"type": "string", "maxLength": 5},
    "a/b~c": {"type": "boolean"},
    "Cat": _cat("cat"),
    "Dog": _cat("dog", barks={"type": "boolean"}),
    "JsonValue": {},
}
ZOD: dict[str, Node] = {
    "string": STRING,
    "int": {"type": "integer", "minimum": -SAFE, "maximum": SAFE},
    "int32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "uint32": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4e38},
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "multiple": {"type": "number", "multipleOf": 0.25},
    "email": {"type": "string", "format": "email", "pattern": LOOK_AHEAD},
    "uuid": {
        "type": "string",
        "format": "uuid",
        "pattern": "^([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})$",
    },
    "url": {"type": "string", "format": "uri"},
    "iso_date": {
        "type": "string",
        "format": "date",
        "pattern": "^(?:\\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\\d|3[01]))$",
    },
    "iso_datetime": {
        "type": "string",
        "format": "date-time",
        "pattern": "^\\d{4}-\\d{2}-\\d{2}T(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?Z$",
    },
    "iso_duration": {
        "type": "string",
        "format": "duration",
        "pattern": "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?)?)$",
    },
    "ipv4": {"type": "string", "format": "ipv4"},
    "cidr": {"type": "string", "format": "cidrv4", "pattern": "^(\\d{1,3}\\.){3}\\d{1,3}/\\d\\d?$"},
    "base64": {
        "type": "string",
        "format": "base64",
        "contentEncoding": "base64",
        "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==)?$",
    },
    "nanoid": {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
    "emoji": {"type": "string", "format": "emoji", "pattern": "^(\\p{Extended_Pictographic})+$"},
    "starts": {"type": "string", "pattern": "^id_.*"},
    "escaped": {"type": "string", "pattern": "^https?:\\/\\/[a-z]{1,8}\\/$"},
    "back_reference": {"type": "string", "pattern": "^(a|b)\\1$"},
    "two_patterns": {"type": "string", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*b$"}]},
    "min_max": {"type": "string", "minLength": 2, "maxLength": 6},
    "literal": {"type": "string", "const": "tuna"},
    "literal_number": {"type": "number", "const": 42},
    "literals": {"enum": ["on", "off", 1, True, None]},
    "enum": {"type": "string", "enum": ["low", "high"]},
    "nullable": {"anyOf": [STRING, NULL]},
    "nullish_enum": {"anyOf": [{"type": "string", "enum": ["a"]}, NULL]},
    "union": {"anyOf": [STRING, NUMBER, {"type": "boolean"}]},
    "discriminated": {
        "oneOf": [_cat("a") | {"required": ["kind"]}, _cat("b") | {"required": ["kind"]}]
    },
    "intersection": {"allOf": [POINT, {"type": "object", "properties": {"z": NUMBER}}]},
    "strict_intersection": {
        "allOf": [
            POINT | {"additionalProperties": False},
            {
                "type": "object",
                "properties": {"z": NUMBER},
                "required": ["z"],
                "additionalProperties": False,
            },
        ]
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
    "tuple": {"type": "array", "prefixItems": [STRING, NUMBER], "items": False},
    "tuple_7": {"type": "array", "items": [STRING, NUMBER], "additionalItems": {"type": "boolean"}},
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": NUMBER,
    },
    "record_enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": NUMBER,
        "required": ["a", "b"],
    },
    "record_pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^k_"},
        "additionalProperties": {"type": "boolean"},
    },
    "unknown": {},
    "never": {"not": {}},
    "default": {"default": 3, "type": "number"},
    "read_only": {"readOnly": True, "type": "string"},
    "file": {"type": "string", "format": "binary", "contentEncoding": "binary", "minLength": 1},
    "template": {"type": "string", "pattern": "^v\\d+\\.\\d+$"},
    "lazy": {"$ref": "#"},
    "shared": {"$ref": "#/$defs/__schema0"},
    "json": {
        "anyOf": [
            *({"type": kind} for kind in ("string", "number", "boolean", "null")),
            {"type": "array", "items": {"$ref": "#/$defs/__schema1"}},
        ]
    },
    "loose": {"type": "object", "properties": {"a": STRING}, "additionalProperties": {}},
    "catchall": {"type": "object", "properties": {"a": STRING}, "additionalProperties": NUMBER},
}
ZOD_DEFS: Node = {
    "__schema0": {"id": "User", "type": "object", "properties": {"name": STRING}},
    "__schema1": {"anyOf": [NUMBER, {"type": "array", "items": {"$ref": "#/$defs/__schema1"}}]},
}
MCP: dict[str, Node] = {
    "path": {"type": "string", "description": "Path of a file"},
    "paths": {"type": "array", "items": STRING, "minItems": 1},
    "edits": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"oldText": STRING, "newText": STRING},
            "required": ["oldText", "newText"],
            "additionalProperties": False,
        },
    },
    "limit": {"type": "number", "default": 10, "minimum": 1, "maximum": 100},
    "head": {"type": ["number", "null"], "description": "first lines"},
    "query": {"type": "string", "maxLength": 400, "examples": ["weather"]},
    "sort": {"type": "string", "enum": ["asc", "desc", ""]},
    "ids": {"type": "array", "items": {"type": ["string", "number"]}},
    "labels": {"oneOf": [STRING, {"type": "array", "items": STRING}]},
    "overlap": {"oneOf": [STRING, {"type": "string", "format": "uri"}]},
    "body": {"type": "object"},
    "headers": {"type": "object", "additionalProperties": STRING},
    "arguments": {"type": "object", "properties": {}, "additionalProperties": True},
    "anything": True,  # type: ignore[dict-item]
    "nested": {"type": "object", "properties": {"a b": STRING, "c-d": {"type": "integer"}}},
    "conditional": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "value": STRING},
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["value"]},
    },
    "dependent": {
        "type": "object",
        "properties": {"card": STRING, "address": STRING},
        "dependentRequired": {"card": ["address"]},
    },
    "nothing_depends": {
        "type": "object",
        "properties": {"card": STRING},
        "dependentRequired": {},
    },
    "not_empty": {"type": "string", "not": {"const": ""}},
    "contains": {"type": "array", "items": INTEGER, "contains": {"const": 1}},
    "unique_off": {"type": "array", "items": INTEGER, "uniqueItems": False},
    "unevaluated": {"type": "object", "properties": {"a": STRING}, "unevaluatedProperties": False},
    "unevaluated_on": {"type": "object", "properties": {}, "unevaluatedProperties": True},
    "at_least_one": {
        "type": "object",
        "properties": {"a": STRING, "b": STRING},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "at_most_two": {
        "type": "object",
        "properties": {"a": STRING, "b": STRING, "c": STRING},
        "maxProperties": 2,
    },
    "either": {
        "type": "object",
        "properties": {"a": STRING, "b": STRING},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "strict": {"type": "object", "properties": {"a": STRING}, "strict": True},
    "bad_type": {"type": "any"},
    "file_type": {"type": "file", "description": "a file"},
    "empty_enum": {"type": "string", "enum": []},
    "null_bound": {"type": "string", "maxLength": None, "enum": None},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 1},
    "missing_ref": {"$ref": "#/$defs/Missing"},
    "remote_ref": {"$ref": "https://example.com/schema.json"},
    "local_ref": {"$ref": "#/properties/other"},
    "anchor": {"$ref": "#place"},
    "legacy_ref": {"$ref": "#/definitions/Legacy"},
    "titles": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "numbers": {"oneOf": [{"const": 1, "title": "one"}, {"const": 2, "title": "two"}]},
    "overlapping_patterns": {
        "type": "object",
        "patternProperties": {"^a": INTEGER, "b$": STRING},
        "additionalProperties": False,
    },
}
MCP_DEFS: Node = {"Legacy": {"type": "string", "maxLength": 4}}
JAVA: dict[str, Node] = {
    "int": {"type": "integer", "format": "int32"},
    "long": {"type": "integer", "format": "int64"},
    "double": {"type": "number", "format": "double"},
    "string_opt": {"type": ["string", "null"]},
    "enum": {"type": "string", "enum": ["CELSIUS", "FAHRENHEIT"]},
    "list": {"type": "array", "items": {"type": "string"}},
    "set": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "raw_map": {"type": "object"},
    "object": {},
    "date": {"type": "string", "format": "date"},
    "instant": {"type": "string", "format": "date-time"},
    "zoned": {"type": "string", "format": "zoned-date-time"},
    "big_decimal": {"type": "number"},
    "bytes": {"type": "string", "contentEncoding": "base64"},
    "pattern": {"type": "string", "pattern": "[A-Z]{3}"},
    "possessive": {"type": "string", "pattern": "^\\w++$"},
    "size": {"type": "string", "minLength": 1, "maxLength": 20},
    "max_int": {"type": "string", "minLength": 0, "maxLength": 2**31 - 1},
    "max_items": {"type": "array", "items": STRING, "minItems": 0, "maxItems": 50},
    "draft_4_bound": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    "draft_4_off": {"type": "integer", "maximum": 9, "exclusiveMaximum": False},
    "long_max": {"type": "integer", "maximum": 9223372036854775807},
    "decimal_bound": {"type": "number", "minimum": 0.5, "maximum": 9.5},
    "nullable": {"type": "string", "nullable": True},
    "nullable_ref": {"nullable": True, "allOf": [{"$ref": "#/$defs/Point-1"}]},
    "required_flag": {"type": "string", "required": True},
    "id": {"type": "object", "id": "urn:jsonschema:Point", "properties": {"x": INTEGER}},
    "ref_sibling": {"$ref": "#/$defs/Point-1", "description": "where"},
    "ref_generic": {"$ref": "#/$defs/Page(Point)"},
    "ref_array": {"type": "array", "items": {"$ref": "#/$defs/List<Point>"}},
    "self": {"$ref": "#/$defs/Person"},
    "sub_types": {
        "anyOf": [
            {"allOf": [{"$ref": "#/$defs/Cat-1"}, {"required": ["@type"]}]},
            {"allOf": [{"$ref": "#/$defs/Dog-1"}, {"required": ["@type"]}]},
        ]
    },
    "swagger_tagged": {
        "oneOf": [{"$ref": "#/$defs/Cat-1"}, {"$ref": "#/$defs/Dog-1"}],
        "discriminator": {"propertyName": "@type"},
    },
    "inherited": {
        "allOf": [
            {"$ref": "#/$defs/Point-1"},
            {"type": "object", "properties": {"label": STRING}},
        ]
    },
    "const": {"const": "fixed"},
    "optional": {"anyOf": [NULL, {"$ref": "#/$defs/Point-1"}]},
    "xml": {"type": "string", "xml": {"name": "a"}, "externalDocs": {"url": "https://e.com"}},
    "example": {"type": "integer", "example": 3, "x-kotlin": True},
    "no_extra": {"type": "object", "properties": {"a": STRING}, "additionalProperties": False},
}
JAVA_DEFS: Node = {
    "Point-1": POINT,
    "Page(Point)": {"type": "object", "properties": {"total": {"type": "integer"}}},
    "List<Point>": {"type": "array", "items": {"$ref": "#/$defs/Point-1"}},
    "Person": {
        "type": "object",
        "properties": {"name": STRING, "friend": {"$ref": "#/$defs/Person"}},
    },
    "Cat-1": _cat("cat", "@type"),
    "Dog-1": _cat("dog", "@type"),
}
DOTNET: dict[str, Node] = {
    "int": INTEGER,
    "nullable_int": {"type": ["integer", "null"]},
    "string": {"type": ["string", "null"]},
    "double": NUMBER,
    "number_or_text": {
        "type": ["string", "number"],
        "pattern": "^-?(?:0|[1-9]\\d*)(?:\\.\\d+)?(?:[eE][+-]?\\d+)?$",
    },
    "int_or_text": {"type": ["string", "integer"], "pattern": "^-?(?:0|[1-9]\\d*)$"},
    "named_floats": {"anyOf": [NUMBER, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
    "enum": {"enum": ["Sunny", "Rainy"]},
    "enum_null": {"enum": ["Sunny", None]},
    "enum_int": {"type": "integer", "enum": [0, 1, 2], "x-enumNames": ["A", "B", "C"]},
    "guid": {"type": "string", "format": "uuid"},
    "datetime": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "timespan": {
        "type": "string",
        "$comment": "Represents a System.TimeSpan value.",
        "pattern": "^-?(\\d+\\.)?\\d{2}:\\d{2}:\\d{2}(\\.\\d{1,7})?$",
    },
    "version": {
        "$comment": "Represents a version string.",
        "type": "string",
        "pattern": "^\\d+(\\.\\d+){1,3}$",
    },
    "char": {"type": "string", "minLength": 1, "maxLength": 1},
    "uri": {"type": "string", "format": "uri"},
    "bytes": {"type": "string", "format": "byte"},
    "list": {"type": ["array", "null"], "items": STRING},
    "dictionary": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    "json_element": True,  # type: ignore[dict-item]
    "json_node": {},
    "default": {"type": "integer", "default": 5, "description": "a number"},
    "self": {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}},
    "self_property": {"$ref": "#/properties/other", "description": "the same"},
    "poly": {
        "anyOf": [
            {"properties": {"$type": {"const": "a"}, "x": INTEGER}, "required": ["$type"]},
            {"properties": {"$type": {"const": "b"}, "y": STRING}, "required": ["$type"]},
        ]
    },
    "type_with_required": {
        "type": "object",
        "required": ["$type"],
        "anyOf": [
            {"properties": {"$type": {"const": "a"}}},
            {"properties": {"$type": {"const": "b"}}},
        ],
    },
    "njson_null": {"oneOf": [NULL, {"$ref": "#/definitions/Address"}]},
    "njson_ref": {"oneOf": [{"$ref": "#/definitions/Address"}]},
    "njson_text": {"type": ["null", "string"], "maxLength": 30},
    "njson_decimal": {"type": "number", "format": "decimal"},
    "njson_range": {"type": "integer", "format": "int32", "maximum": 100.0, "minimum": 0.0},
    "njson_inherit": {
        "allOf": [
            {"$ref": "#/definitions/Address"},
            {"type": "object", "additionalProperties": False, "properties": {"Floor": INTEGER}},
        ]
    },
    "njson_abstract": {"$ref": "#/definitions/Shape"},
    "njson_generic": {"$ref": "#/definitions/PagedListOf`1[System.Int32]"},
    "required_length": {"type": "string", "minLength": 1, "maxLength": 2147483647},
    "regex": {"type": "string", "pattern": "^(?<year>\\d{4})$"},
    "atomic": {"type": "string", "pattern": "^(?>a+)$"},
    "not_null": {"not": {"type": "null"}},
    "obsolete": {"type": "string", "deprecated": True, "x-deprecatedMessage": "no"},
}
DOTNET_DEFS: Node = {
    "Address": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"Street": {"type": ["null", "string"]}, "No": {"type": "integer"}},
    },
    "Shape": {
        "type": "object",
        "discriminator": "kind",
        "x-abstract": True,
        "required": ["kind"],
        "properties": {"kind": STRING},
    },
    "PagedListOf`1[System.Int32]": {"type": "array", "items": INTEGER},
}


def _pydantic(name: str, fields: Node) -> Node:
    return {
        "$defs": PYDANTIC_DEFS,
        "properties": {key: _titled(key, node) for key, node in fields.items()},
        "required": [key for key, node in fields.items() if "default" not in node],
        "title": f"{name}Arguments",
        "type": "object",
    }


def _closed(fields: Node, definitions: Node) -> Node:
    """An object of the newest draft with these properties, all required, and no others."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _zod(name: str, fields: Node) -> Node:
    return _closed(fields, ZOD_DEFS)


def _mcp(name: str, fields: Node) -> Node:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": fields,
        "required": [*fields][:1],
        "definitions": MCP_DEFS,
    }


def _java(name: str, fields: Node) -> Node:
    return _closed(fields, JAVA_DEFS)


def _dotnet(name: str, fields: Node) -> Node:
    return {
        "title": name,
        "description": f"Calls {name}",
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "definitions": DOTNET_DEFS,
    }


LIBRARIES: dict[str, tuple[Callable[[str, Node], Node], dict[str, Node], Node]] = {
    "pydantic": (_pydantic, PYDANTIC, INTEGER),
    "zod": (_zod, ZOD, {"type": "boolean"}),
    "mcp": (_mcp, MCP, {"type": "string", "maxLength": 3}),
    "java": (_java, JAVA, {"type": "boolean"}),
    "dotnet": (_dotnet, DOTNET, {"type": ["integer", "null"]}),
}
WHOLE: dict[str, Node] = {
    "root-none": {"type": "object"},
    "root-empty": {},
    "root-closed": {"type": "object", "properties": {}, "additionalProperties": False},
    "root-optional-object": {"type": ["object", "null"], "properties": {"a": STRING}},
    "root-array": {"type": "array", "items": STRING},
    "root-union": {"anyOf": [POINT, {"type": "object", "properties": {"name": STRING}}]},
    "root-tagged": {"type": "object", "oneOf": [_cat("a"), _cat("b")]},
    "root-ref": {"$ref": "#/$defs/Point", "$defs": {"Point": POINT}},
    "root-self": _tree("x")
    | {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
}
"""Parameters whose root is the point."""


def schemas() -> Iterator[tuple[str, Node]]:
    """Names and schemas, each library's fields one by one, and then eight at a time."""
    for library, (wrap, fields, other) in LIBRARIES.items():
        for name, node in fields.items():
            given = {"value": node, "other": other}
            yield f"{library}-{name}", copy.deepcopy(wrap(name, given))
        several = [*fields.items()]
        for start in range(0, len(several) - 7, 8):
            chosen = dict(several[start : start + 8]) | {"other": other}
            yield f"{library}-several-{start}", copy.deepcopy(wrap("several", chosen))
    yield from copy.deepcopy(WHOLE).items()


def tool(name: str, schema: Node) -> Node:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def followed(schema: Node, places: Iterable[str]) -> Node:
    """The schema without the keywords at these places (JSON pointers within it)."""
    schema = copy.deepcopy(schema)
    for place in sorted(places, key=len, reverse=True):
        *path, last = (_unescaped(part) for part in place.split("/")[1:]) if place else [""]
        node: Any = schema
        try:
            for part in path:
                node = node[int(part) if isinstance(node, list) else part]
            if not place:
                schema = {"type": "object"}
            elif path and (path[-1] in _OF_NAMES or isinstance(node, list)):
                node[int(last) if isinstance(node, list) else last] = True
                if path[-1] == "properties":
                    _without_required(schema, path[:-1], last)
            else:
                del node[last]
        except (KeyError, IndexError, TypeError):
            continue  # It is inside of another that has gone.
    return schema


_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")


def _without_required(schema: Any, path: list[str], name: str) -> None:
    for part in path:
        schema = schema[int(part) if isinstance(schema, list) else part]
    schema["required"] = [item for item in schema.get("required", ()) if item != name]


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`, but for other languages' syntax, which Python's `re` does not read."""
    with contextlib.suppress(re.error):
        if isinstance(value, str) and not re.search(pattern, value):
            yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _is_multiple(validator: Any, of: Any, value: Any, schema: Any) -> Iterator[Any]:
    """The keyword `multipleOf`, of numbers as they are written: 7.77 / 0.01 is no whole float."""
    if not validator.is_type(value, "number"):
        return
    if not math.isfinite(value) or Fraction(str(value)) % Fraction(str(of)):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {of!r}")


def _with_prefix_items(node: Any) -> Any:
    """A schema whose tuples are all written as the draft of 2020 has them: one may mix both
    ways.
    """
    if isinstance(node, list):
        return [_with_prefix_items(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: _with_prefix_items(value) for name, value in node.items()}
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node["items"] = node.pop("additionalItems", True)
    return node


def fault(arguments: Any, schema: Node) -> str:
    """Why arguments do not satisfy what is followed of a schema; empty if they do."""
    text = json.dumps(_with_prefix_items(schema))
    text = re.sub('"(maxLength|enum)": null', r'"x-\1": 0', text)
    draft_4 = '"exclusiveMinimum": true' in text or '"exclusiveMaximum": false' in text
    validator = jsonschema.Draft4Validator if draft_4 else jsonschema.Draft202012Validator
    text = text.replace('"required": true', '"x": 0')
    checked = jsonschema.validators.extend(
        validator, {"pattern": _matches, "multipleOf": _is_multiple}
    )
    errors = checked(json.loads(text)).iter_errors(arguments)
    return next((f"{error.message} at {error.json_path}"[:300] for error in errors), "")
