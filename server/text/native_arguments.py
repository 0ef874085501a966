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
from typing import Any

from llguidance import regex_to_lark

from server.text.json_schema import GUIDANCE, MAX_ANY_DEPTH, Cannot, Node, number, problem, target

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
FOLLOWED = frozenset(("type", "enum", "const", "anyOf", *(name for names in OF_TYPES.values() for name in names)))
_IGNORED = {"$comment", "$defs", "format"}
_KEY = re.compile(r'[^:,{}\[\]<>"|\\\x00-\x1f]+')


class Unsatisfiable(Exception):
    """No value satisfies a schema."""


class RuleWriter:
    """Adds the rules of one schema to `rules`, whose names begin with `prefix`. `quote`: what encloses
    texts, in Lark.
    """

    def __init__(self, root: Node, quote: str, prefix: str, rules: dict[str, str], cannot: Cannot) -> None:
        self._root = root
        self._quote = quote
        self._prefix = prefix
        self._rules = rules
        self._cannot = cannot
        self._references: dict[str, str] = {}

    def value(self, node: Any, at: str = "#") -> str:
        """The expression of what satisfies a schema. `at`: its JSON pointer. Raises Unsatisfiable."""
        if node is False:
            raise Unsatisfiable
        if node is True or not node.keys() - _IGNORED:
            return self._any(MAX_ANY_DEPTH)
        if "$ref" in node and not node.keys() - _IGNORED - {"$ref"}:
            return self._reference(node["$ref"])
        node = self._merged(node, at)
        for name in sorted(node.keys() - FOLLOWED):
            self._cannot(f"{at}/{name}", node.pop(name), "this model's format cannot follow it")
        if "enum" in node or "const" in node:
            values = [v for v in node.get("enum", [node.get("const")]) if self._takes(node, v)]
            return _either(map(self._literal, values))
        if "anyOf" in node:
            rest = {name: value for name, value in node.items() if name != "anyOf"}
            branches = [{"allOf": [branch, rest]} if rest else branch for branch in node["anyOf"]]
            return self._first_of(branches, f"{at}/anyOf")
        types = _types(node)
        kinds = sorted(types - ({"integer"} if "number" in types else set()))
        return _either(self._typed(kind, node, at) for kind in kinds)

    def _first_of(self, branches: list[Any], at: str) -> str:
        """The expression of what satisfies one of several schemas, without those that nothing does."""
        written = []
        for i, branch in enumerate(branches):
            try:
                written.append(self.value(branch, f"{at}/{i}"))
            except Unsatisfiable:
                continue
        return _either(written)

    def _takes(self, node: Node, value: Any) -> bool:
        """Whether a value that the `enum` or `const` of a schema lists satisfies its other keywords, and
        can be written."""
        others = {name: item for name, item in node.items() if name not in ("enum", "const")}
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        return _is_writable(value) and (not others or not problem(definitions | {"allOf": [others, {"const": value}]}))

    def _rule(self, text: str, terminal: bool = False) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        name = name.upper() if terminal else name
        self._rules[name] = text
        return name

    def _any(self, depth: int) -> str:
        """The rule of any value with at most `depth` levels of arrays and objects."""
        name = f"any{depth}"
        if name not in self._rules:
            self._rules["ANY_KEY"] = "/[A-Za-z_][0-9A-Za-z_]{0,63}/"
            types = ("number", "boolean", "null")
            scalars = [f"{self._quote} /(?s:.*)/ {self._quote}", *(_json({"type": t}) for t in types)]
            self._rules[name] = " | ".join(scalars)
            if depth:
                inner = self._any(depth - 1)
                pair = self._rule(f'ANY_KEY ":" {inner}')
                self._rules[name] += f' | "[" ({inner} ("," {inner})*)? "]"'
                self._rules[name] += f' | "{{" ({pair} ("," {pair})*)? "}}"'
        return name

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            node = target(self._root, reference)
            self._references[reference] = name = self._rule("")
            at = reference if node is False else node.get("$comment", reference)
            self._rules[name] = self.value(node, at)
        return self._references[reference]

    def _merged(self, node: Any, at: str) -> Node:
        """The schema with what it is combined with, by `$ref` or `allOf`, in one object of keywords."""
        if isinstance(node, bool):
            return {} if node else {"enum": []}
        others = [target(self._root, node["$ref"])] if "$ref" in node else []
        left_out = {*_IGNORED, "$ref", "allOf"}
        merged = {name: value for name, value in node.items() if name not in left_out}
        for other in (*others, *node.get("allOf", ())):
            self._merge(merged, self._merged(other, at), at)
        return merged

    def _merge(self, merged: Node, part: Node, at: str) -> None:
        others, more = (node.get("additionalProperties", True) for node in (merged, part))
        listed, added = (node.get("properties", {}) for node in (merged, part))
        properties = {name: _both(listed.get(name, others), added.get(name, more)) for name in listed | added}
        merged |= {"properties": properties} if properties else {}
        if "additionalProperties" in merged or "additionalProperties" in part:
            merged["additionalProperties"] = _both(others, more)
        for name, value in part.items():
            if name in ("properties", "additionalProperties"):
                continue
            if name not in merged or merged[name] == value:
                merged[name] = value
            elif name in _COMBINED:
                merged[name] = _COMBINED[name](merged[name], value)
            else:
                self._cannot(f"{at}/{name}", value, "it is combined with another")

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value) if value else ''} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_joined(map(self._literal, value))} "]"'
        if isinstance(value, dict):
            pairs = (f"{json.dumps(name + ':')} {self._literal(value[name])}" for name in sorted(value, key=str.lower))
            return f'"{{" {_joined(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    def _typed(self, kind: str, node: Node, at: str) -> str:
        if kind == "string":
            return self._string(node)
        if kind == "array":
            return self._array(node, at)
        if kind == "object":
            return self._object(node, at)
        bounds = {name: node[name] for name in OF_TYPES[kind] if name in node}
        if bounds and problem({"type": kind} | bounds):
            raise Unsatisfiable
        return _json({"type": kind} | bounds)

    def _string(self, node: Node) -> str:
        parts = []
        if "minLength" in node or "maxLength" in node:
            parts.append(f"/(?s:.{{{node.get('minLength', 0)},{node.get('maxLength', '')}}})/")
        lengths = {name: node[name] for name in ("minLength", "maxLength") if name in node}
        patterns = _patterns(node)
        if patterns and problem({"type": "string", **lengths, "allOf": [{"pattern": item} for item in patterns]}):
            raise Unsatisfiable
        for pattern in patterns:
            pattern = regex_to_lark(pattern, "dw")
            start = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            body = pattern if start else pattern.removeprefix("^")
            parts.append(f"/{start}(?:{body}".removesuffix("" if end else "$") + f"){end}/")
        text = self._rule(" & ".join(parts) or "/(?s:.*)/", terminal=True)
        return f"{self._quote} {text} {self._quote}"

    def _array(self, node: Node, at: str) -> str:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most is not None and most < least:
            raise Unsatisfiable
        items = node.get("items", True)
        if isinstance(items, list):
            self._cannot(f"{at}/items", items, "one schema for all items is followed")
            items = {"anyOf": items} if items else True
        try:
            item = self._rule(self.value(items, f"{at}/items")) if most != 0 else ""
        except Unsatisfiable:
            if least:
                raise
            most = 0
        if most == 0:
            return '"[" "]"'
        # A range cannot end at 0.
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f'("," {item}){times}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, node: Node, at: str) -> str:
        others = node.get("additionalProperties", True)
        required = node.get("required", ())
        properties = dict.fromkeys(required, others) | node.get("properties", {})
        if properties:
            return self._listed(properties, required, at)
        try:
            value = self.value(others, f"{at}/additionalProperties")
        except Unsatisfiable:
            return '"{" "}"'
        self._any(0)
        pair = self._rule(f'ANY_KEY ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _listed(self, properties: Node, names: Iterable[str], at: str) -> str:
        """An object of these properties and no others. `rest`: what may follow a property; `first`: the
        properties from it on.
        """
        rest, first, required = "", "", {*names}
        for name in sorted(properties, key=str.lower, reverse=True):
            place = f"{at}/properties/{name}"
            if not _KEY.fullmatch(name):
                why = "calls in this model's format take no such name; use letters, digits, _ and -"
                self._cannot(place, name, why)
                required.discard(name)
                continue
            try:
                value = self.value(properties[name], place)
            except Unsatisfiable:
                if name in required:
                    raise
                continue
            pair = self._rule(f"{json.dumps(name + ':')} {value}")
            begun = f"{pair} {rest}"
            first = begun if name in required or not first else f"{begun} | {first}"
            is_required = name in required
            rest = self._rule(f'"," {pair} {rest}' if is_required else f'("," {pair})? {rest}')
        if not first:
            return '"{" "}"'
        body = self._rule(first)
        return f'"{{" {body} "}}"' if required else f'"{{" ({body})? "}}"'


def _patterns(node: Node) -> list[str]:
    """The patterns of a merged schema, which may have several."""
    given = node.get("pattern", [])
    return [given] if isinstance(given, str) else given


def _both(a: Any, b: Any) -> Any:
    """The schema of what satisfies two."""
    if a in (True, {}) or a == b:
        return b
    return a if b in (True, {}) else {"allOf": [a, b]}


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "required": lambda a, b: [*a, *b],
    "pattern": lambda a, b: [*_patterns({"pattern": a}), *_patterns({"pattern": b})],
    "type": lambda a, b: sorted(_types({"type": a}) & _types({"type": b})),
    "enum": lambda a, b: [item for item in a if item in b],
    "anyOf": lambda a, b: [{"allOf": [one, other]} for one in a for other in b],
    **dict.fromkeys(("minLength", "minItems", "minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maximum", "exclusiveMaximum"), min),
}
"""Keywords -> the value that says what two values say together."""


def _is_writable(value: Any) -> bool:
    """Whether the keys of a value can be written bare."""
    if isinstance(value, dict):
        return all(_KEY.fullmatch(key) and _is_writable(value[key]) for key in value)
    return not isinstance(value, list) or all(map(_is_writable, value))


def _json(schema: Node) -> str:
    """The expression of numbers, booleans and null, which are written as in JSON."""
    schema = number(schema) if schema["type"] in ("number", "integer") else schema
    return f"%json {json.dumps(schema | {'x-guidance': GUIDANCE})}"


def _types(node: Node) -> set[str]:
    """The types that a schema allows; for one that names none, those that its keywords are about, or
    all.
    """
    named = node.get("type")
    if named is not None:
        types = {named} if isinstance(named, str) else set(named)
        return types | ({"integer"} if "number" in types else set())
    about = {kind for kind, names in OF_TYPES.items() if node.keys() & {*names}}
    return about or {*OF_TYPES}


def _either(alternatives: Iterable[str]) -> str:
    listed = [*dict.fromkeys(alternatives)]
    if not listed:
        raise Unsatisfiable
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def _joined(items: Iterable[str]) -> str:
    return ' "," '.join(items)
