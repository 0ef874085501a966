"""Rules of a Lark grammar for arguments that are not written as JSON: texts stand between two marks,
and keys are bare.

That is how FunctionGemma and Gemma 4 write them: {city:<escape>Rome<escape>,days:3,units:[true]}, with
the keys in the order of Jinja's dictsort. It reads schemas that server.text.json_schema has prepared.
Invariant: what a rule matches satisfies its schema, which may allow more, but for the keywords that
`cannot` was told. `format` is an annotation here, as in the standard.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from llguidance import regex_to_lark

from server.text.json_schema import ANY, GUIDANCE, SHARED, Cannot, Node, problem

_LEFT_OUT = ("prefixItems", "additionalItems", "patternProperties", "minProperties", "maxProperties")
_SCALARS = {"number", "integer", "boolean", "null"}
"""Types whose values are written as in JSON."""
_TYPES = (*sorted(_SCALARS - {"number"}), "string", "array", "object")
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRICTER: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}
"""Bounds -> the one of two that holds."""
_KEY = re.compile(r'[^:,{}\[\]<>"|\\\x00-\x1f]+')


class Unsatisfiable(Exception):
    """No value satisfies a schema."""


class _Conflict(Exception):
    """Schemas that are combined say different things by the same keyword."""


class RuleWriter:
    """Adds the rules of one schema to `rules`, whose names begin with `prefix`. `quote`: what encloses
    texts, in Lark.
    """

    def __init__(self, root: Node, quote: str, prefix: str, rules: dict[str, str], cannot: Cannot) -> None:
        self._definitions = SHARED | root.get("$defs", {})
        self._quote = quote
        self._prefix = prefix
        self._rules = rules
        self._cannot = cannot

    def value(self, node: Any, at: str = "#") -> str:
        """The expression of what satisfies a schema. `at`: its JSON pointer. Raises Unsatisfiable."""
        node = ANY if node is True else node
        if node and node.keys() <= {"$ref", "$comment", "$defs"}:
            return self._reference(node["$ref"].removeprefix("#/$defs/"))
        node = self._merged(node, at)
        if "enum" in node:
            return self._first_of(self._enumerated, ((node, value) for value in node["enum"]))
        types = {*_listed(node.get("type", []))}
        if types and types <= _SCALARS and "$ref" not in (text := json.dumps(node | {"x-guidance": GUIDANCE})):
            if problem(node):
                raise Unsatisfiable
            return f"%json {text}"
        for name in node.keys() & {"anyOf", "oneOf"}:
            branches, rest = node[name], {key: value for key, value in node.items() if key != name}
            try:
                if rest:
                    branches = [self._flat({"allOf": [branch, rest]}) for branch in branches]
            except _Conflict:
                self._cannot(f"{at}/{name}", branches, "it is combined with others")
                return self.value(rest, at)
            return self._first_of(self.value, ((b, f"{at}/{name}/{i}") for i, b in enumerate(branches)))
        for name in _LEFT_OUT:
            if name in node:
                self._cannot(f"{at}/{name}", node[name], "this model's format cannot follow it")
        return self._first_of(self._typed, ((kind, node, at) for kind in types or _TYPES))

    def _first_of(self, write: Callable[..., str], alternatives: Iterable[Any]) -> str:
        """The expression of what one of several alternatives writes, without those that nothing
        satisfies.
        """
        written: dict[str, None] = {}
        for arguments in alternatives:
            with suppress(Unsatisfiable):
                written[write(*arguments)] = None
        if not written:
            raise Unsatisfiable
        return f"({' | '.join(written)})"

    def _rule(self, text: str, terminal: bool = False) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        name = name.upper() if terminal else name
        self._rules[name] = text
        return name

    def _reference(self, name: str) -> str:
        rule = name if name in SHARED else self._prefix + name
        if rule not in self._rules:
            self._rules[rule] = ""
            node = self._definitions[name]
            try:
                self._rules[rule] = self.value(node, node and node.get("$comment", "#"))
            except Unsatisfiable:
                del self._rules[rule]
                raise
        return rule

    def _merged(self, node: Any, at: str) -> Node:
        """The schema and what it is combined with, by `$ref` or `allOf`, as one object of keywords."""
        try:
            return self._flat(node)
        except _Conflict:
            for name in node.keys() & {"$ref", "allOf"}:
                self._cannot(f"{at}/{name}", node[name], "it is combined with others")
            return self._flat({name: item for name, item in node.items() if name not in ("$ref", "allOf")})

    def _flat(self, node: Any) -> Node:
        """As `_merged`. Raises _Conflict."""
        if not isinstance(node, dict):
            return {} if node else {"enum": []}
        parts = [*node.get("allOf", ())]
        if "$ref" in node:
            parts.append(self._definitions[node["$ref"].removeprefix("#/$defs/")])
        left_out = ("$ref", "allOf", "$comment", "$defs", "format")
        own = {name: value for name, value in node.items() if name not in left_out}
        return _united([own, *map(self._flat, parts)])

    def _enumerated(self, node: Node, value: Any) -> str:
        """A value that an `enum` lists. Raises Unsatisfiable where other keywords forbid it."""
        if problem(node | {"enum": [value], "$defs": self._definitions}):
            raise Unsatisfiable
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value) if value else ''} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_joined(map(self._literal, value))} "]"'
        if isinstance(value, dict):
            pairs = (f"{_key(name)} {self._literal(value[name])}" for name in sorted(value, key=str.lower))
            return f'"{{" {_joined(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    def _typed(self, kind: str, node: Node, at: str) -> str:
        if kind == "string":
            return f"{self._quote} {self._text(node)} {self._quote}"
        if kind == "array":
            return self._array(node, at)
        if kind == "object":
            return self._object(node, at)
        return self.value({"type": kind} | {name: node[name] for name in _NUMERIC if name in node})

    def _text(self, node: Node) -> str:
        parts = [f"/(?s:.{{{node.get('minLength', 0)},{node.get('maxLength', '')}}})/"]
        patterns = _listed(node.get("pattern", []))
        lengths = {name: node[name] for name in ("minLength", "maxLength") if name in node}
        if problem({"type": "string", **lengths, "allOf": [{"pattern": item} for item in patterns]}):
            raise Unsatisfiable
        for pattern in patterns:
            pattern = regex_to_lark(pattern, "dw")
            start = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            body = pattern.removeprefix("^").removesuffix("" if end else "$")
            parts.append(f"/{start}(?:{body}){end}/")
        return self._rule(" & ".join(parts), terminal=True)

    def _array(self, node: Node, at: str) -> str:
        least, most, items = node.get("minItems", 0), node.get("maxItems"), node.get("items", True)
        if isinstance(items, list):
            self._cannot(f"{at}/items", items, "one schema for all items is followed")
            items = {"anyOf": items} if items else True
        try:
            item = self._rule(self.value(items, f"{at}/items"))
        except Unsatisfiable:
            item, most = "", 0
        if most is not None and most < least:
            raise Unsatisfiable
        if most == 0:
            return '"[" "]"'
        # A range cannot end at 0.
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f'("," {item}){times}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, node: Node, at: str) -> str:
        """An object of the listed properties and no others. `rest`: what may follow a property; `first`:
        the properties from it on.
        """
        others, required = node.get("additionalProperties", True), {*node.get("required", ())}
        properties = dict.fromkeys(node.get("required", ()), others) | node.get("properties", {})
        rest, first = "", ""
        if not properties:
            return self._map(others, f"{at}/additionalProperties")
        for name in sorted(properties, key=str.lower, reverse=True):
            place = f"{at}/properties/{name}"
            if not _KEY.fullmatch(name):
                self._cannot(place, name, "calls in this model's format take no such name")
                required.discard(name)
                continue
            try:
                pair = self._rule(f"{_key(name)} {self.value(properties[name], place)}")
            except Unsatisfiable:
                if name in required:
                    raise
                continue
            begun = f"{pair} {rest}"
            first = begun if name in required or not first else f"{begun} | {first}"
            rest = self._rule(f'"," {begun}' if name in required else f'("," {pair})? {rest}')
        if not first:
            return '"{" "}"'
        body = self._rule(first)
        return f'"{{" {body} "}}"' if required else f'"{{" ({body})? "}}"'

    def _map(self, values: Any, at: str) -> str:
        try:
            value = self.value(values, at)
        except Unsatisfiable:
            return '"{" "}"'
        self._rules["ANY_KEY"] = "/[A-Za-z_][0-9A-Za-z_]{0,63}/"
        pair = self._rule(f'ANY_KEY ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'


def _key(name: str) -> str:
    """A bare key in Lark. Raises Unsatisfiable where calls cannot have it."""
    if not _KEY.fullmatch(name):
        raise Unsatisfiable
    return json.dumps(f"{name}:")


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _united(parts: list[Node]) -> Node:
    """The keywords of several schemas as those of one. Raises _Conflict."""
    united: Node = {}
    names = {name for part in parts for name in part.get("properties", ())}
    for part in parts:
        if "additionalProperties" in part and names - part.get("properties", {}).keys():
            raise _Conflict
        for key, value in part.items():
            given: Any = united.setdefault(key, value)
            if key in ("required", "pattern") and given != value:
                united[key] = [*_listed(given), *_listed(value)]
            elif key == "properties" and all(given.get(name, item) == item for name, item in value.items()):
                united[key] = given | value
            elif key in _STRICTER:
                united[key] = _STRICTER[key](given, value)
            elif given != value:
                raise _Conflict
    return united


def _joined(items: Iterable[str]) -> str:
    return ' "," '.join(items)
