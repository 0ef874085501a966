"""Rules of a Lark grammar for arguments that are not written as JSON: texts stand between two marks, and keys are bare.

That is how FunctionGemma and Gemma 4 write them: {city:<escape>Rome<escape>,days:3,units:[true]}, with the keys in the order of Jinja's
dictsort. It reads schemas that server.text.json_schema has prepared. Invariant: what a rule matches satisfies its schema, which may allow
more; a keyword that it does not follow is refused. `format` is an annotation here, as in the standard.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from server.text.json_schema import GUIDANCE, Node, refuse, target

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "format",
        "nullable",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
    ]
)
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPES = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": NUMERIC,
    "integer": NUMERIC,
    "boolean": (),
    "null": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""The keywords that are followed, by the type that they are about."""
KEYWORDS = frozenset(("type", "enum", "const", "anyOf", *(name for names in OF_TYPES.values() for name in names)))
_KEY = re.compile(r'[^\s:,{}\[\]<>"|\\]+')


class RuleWriter:
    """Adds the rules of one schema to `rules`, whose names begin with `prefix`. `quote`: what encloses texts, in Lark."""

    def __init__(self, root: Node, quote: str, prefix: str, rules: dict[str, str]) -> None:
        self._root = root
        self._quote = quote
        self._prefix = prefix
        self._rules = rules
        self._references: dict[str, str] = {}

    def value(self, node: Any, at: str = "#") -> str:
        """The expression of what satisfies a schema. `at`: its JSON pointer. Raises SchemaError."""
        if isinstance(node, list):
            raise refuse(at, node, "only one schema for all items is supported")
        if node is False:
            raise refuse(at, node, "no value satisfies it")
        if node is True or not node.keys() - ANNOTATIONS:
            return self._any()
        if "$ref" in node and not node.keys() - ANNOTATIONS - {"$ref"}:
            return self._reference(node["$ref"])
        node = self._merged(node, at)
        for name in sorted(node.keys() - ANNOTATIONS - KEYWORDS):
            raise refuse(f"{at}/{name}", node[name], "calls in this model's format cannot be held to it; leave it out")
        if "enum" in node or "const" in node:
            values = [value for value in node.get("enum", [node.get("const")]) if self._takes(node, value)]
            if not values:
                raise refuse(at, node, "no value satisfies it")
            return _either(map(self._literal, values))
        if "anyOf" in node:
            rest = {name: value for name, value in node.items() if name != "anyOf"}
            bare = not rest.keys() - ANNOTATIONS
            branches = enumerate(node["anyOf"])
            return _either(self.value(branch if bare else {"allOf": [branch, rest]}, f"{at}/anyOf/{i}") for i, branch in branches)
        types = _types(node)
        return _either(self._typed(kind, node, at) for kind in sorted(types - ({"integer"} if "number" in types else set())))

    def _takes(self, node: Node, value: Any) -> bool:
        """Whether a value that the `enum` or `const` of a schema lists satisfies the other keywords."""
        others = {name: item for name, item in node.items() if name != "enum"}
        definitions = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return not problem(definitions | {"allOf": [others, {"const": value}]})

    def _rule(self, text: str, terminal: bool = False) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        name = name.upper() if terminal else name
        self._rules[name] = text
        return name

    def _any(self) -> str:
        if "any" not in self._rules:
            self._rules["ANY_KEY"] = "/[A-Za-z_][0-9A-Za-z_]*/"
            self._rules["any"] = (
                f"{self._quote} /(?s:.*)/ {self._quote} | {_json({'type': ['number', 'boolean', 'null']})} | "
                '"[" (any ("," any)*)? "]" | "{" (any_pair ("," any_pair)*)? "}"'
            )
            self._rules["any_pair"] = 'ANY_KEY ":" any'
        return "any"

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = name = self._rule("")
            self._rules[name] = self.value(target(self._root, reference), reference)
        return self._references[reference]

    def _merged(self, node: Any, at: str) -> Node:
        """The schema with what it is combined with, by `$ref` or `allOf`, in one object of keywords."""
        if isinstance(node, bool):
            return {} if node else {"enum": []}
        others = [target(self._root, node["$ref"])] if "$ref" in node else []
        parts = [{name: value for name, value in node.items() if name not in ("$ref", "allOf")}]
        parts += [self._merged(other, at) for other in (*others, *node.get("allOf", ()))]
        merged: Node = {}
        for part in parts:
            for name, value in part.items():
                if name == "required":
                    merged[name] = [*merged.get(name, ()), *value]
                elif merged.get(name, value) == value:
                    merged[name] = value
                elif name not in ANNOTATIONS:
                    raise refuse(f"{at}/{name}", value, "it is combined with another in a way that is not supported")
        # It is about names beside the properties of its own part.
        closed = [part for part in parts if part.get("additionalProperties", True) is not True]
        if any(part.get("properties", {}) != merged.get("properties", {}) for part in closed):
            raise refuse(f"{at}/additionalProperties", merged["additionalProperties"], "it is combined with properties of another schema")
        return merged

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value) if value else ''} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_joined(map(self._literal, value))} "]"'
        if isinstance(value, dict):
            pairs = (f"{json.dumps(_key(name, '#') + ':')} {self._literal(value[name])}" for name in sorted(value, key=str.lower))
            return f'"{{" {_joined(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    def _typed(self, kind: str, node: Node, at: str) -> str:
        if kind == "string":
            return self._string(node)
        if kind == "array":
            return self._array(node, at)
        if kind == "object":
            return self._object(node, at)
        return _json({"type": kind} | {name: node[name] for name in OF_TYPES[kind] if name in node})

    def _string(self, node: Node) -> str:
        parts = []
        if "minLength" in node or "maxLength" in node:
            parts.append(f"/(?s:.{{{node.get('minLength', 0)},{node.get('maxLength', '')}}})/")
        if "pattern" in node:
            pattern: str = regex_to_lark(node["pattern"], "dw")
            start = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            parts.append(f"/{start}(?:{pattern.removeprefix('^') if not start else pattern}".removesuffix("" if end else "$") + f"){end}/")
        return f"{self._quote} {self._rule(' & '.join(parts) or '/(?s:.*)/', terminal=True)} {self._quote}"

    def _array(self, node: Node, at: str) -> str:
        item = self._rule(self.value(node.get("items", True), f"{at}/items"))
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most is not None and most < least:
            raise refuse(at, node, "no value satisfies it")
        if most == 0:
            return '"[" "]"'
        # A range cannot end at 0.
        more = "" if most == 1 else f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, node: Node, at: str) -> str:
        others = node.get("additionalProperties", True)
        properties = dict.fromkeys(node.get("required", ()), others) | node.get("properties", {})
        if not properties:
            if others is False:
                return '"{" "}"'
            self._any()
            pair = self._rule(f'ANY_KEY ":" {self.value(others, f"{at}/additionalProperties")}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        return self._listed(properties, frozenset(node.get("required", ())), at)

    def _listed(self, properties: Node, required: frozenset[str], at: str) -> str:
        """An object of these properties and no others. `rest`: what may follow a property; `first`: the properties from it on."""
        rest, first = "", ""
        for name in sorted(properties, key=str.lower, reverse=True):
            value = self.value(properties[name], f"{at}/properties/{name}")
            pair = self._rule(f"{json.dumps(_key(name, f'{at}/properties') + ':')} {value}")
            begun = f"{pair} {rest}"
            first = begun if name in required or not first else f"{begun} | {first}"
            rest = self._rule(f'"," {pair} {rest}' if name in required else f'("," {pair})? {rest}')
        body = self._rule(first)
        return f'"{{" {body} "}}"' if required else f'"{{" ({body})? "}}"'


def problem(schema: Node) -> str:
    """What is wrong with a schema, or that nothing satisfies it, in llguidance's words; empty if it is sound but for unknown keywords."""
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"lenient": True}))


def _json(schema: Node) -> str:
    """The expression of numbers, booleans and null, which are written as in JSON."""
    return f"%json {json.dumps(schema | {'x-guidance': GUIDANCE})}"


def _key(name: str, at: str) -> str:
    if not _KEY.fullmatch(name):
        raise refuse(at, name, "calls in this model's format take no such name of a property; use letters, digits, _ and -")
    return name


def _types(node: Node) -> set[str]:
    """The types that a schema allows; for one that names none, those that its keywords are about, or all."""
    named = node.get("type")
    if named is not None:
        return {named} if isinstance(named, str) else set(named)
    about = {kind for kind, names in OF_TYPES.items() if node.keys() & {*names}}
    return about or {*OF_TYPES}


def _either(alternatives: Iterable[str]) -> str:
    listed = [*dict.fromkeys(alternatives)]
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def _joined(items: Iterable[str]) -> str:
    return ' "," '.join(items)
