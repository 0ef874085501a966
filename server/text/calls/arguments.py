"""Rules of a Lark grammar for arguments that are not written as JSON: texts stand between two
marks, and keys are bare.

That is how FunctionGemma and Gemma 4 write them: {city:<escape>Rome<escape>,days:3,units:[true]},
with the keys in the order of Jinja's dictsort. It reads schemas that server.text.json_schema has
prepared, and follows of them types, listed values, references, alternatives, items, properties, and
bounds of numbers, lengths and counts. Invariant: what a rule matches satisfies its schema, which
may allow more, but for the keywords that `cannot` was told.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import Any

from server.text.json_schema import ANY, GUIDANCE, SHARED, Cannot, Node, problem

_SCALARS = {"number", "integer", "boolean", "null"}
"""Types whose values are written as in JSON."""
_FOLLOWED = {
    *("type", "minLength", "maxLength", "items", "minItems", "maxItems"),
    *("properties", "required", "additionalProperties"),
}
_KEY = re.compile(r'[^:,{}\[\]<>"|\\\x00-\x1f]+')


class Unsatisfiable(Exception):
    """No value satisfies a schema."""


class RuleWriter:
    """Adds the rules of one schema to `rules`, whose names begin with `prefix`. `quote`: what
    encloses texts, in Lark.
    """

    def __init__(
        self, root: Node, quote: str, prefix: str, rules: dict[str, str], cannot: Cannot
    ) -> None:
        self._definitions = SHARED | root.get("$defs", {})
        self._quote = quote
        self._prefix = prefix
        self._rules = rules
        self._cannot = cannot
        self._numbers = count()
        """Of rules without a name; none is given twice, also where a rule is taken back."""

    def value(self, node: Any, at: str = "#") -> str:
        """The expression of what satisfies a schema. `at`: its JSON pointer. Raises
        Unsatisfiable.
        """
        if not isinstance(node, dict):
            if not node:
                raise Unsatisfiable
            node = ANY
        at = node.get("$comment", at)
        node = {name: item for name, item in node.items() if name not in ("$comment", "$defs")}
        if node.keys() == {"$ref"}:
            return self._reference(node["$ref"])
        if "enum" in node:
            return self._first_of(self._listed, ((node, value) for value in node["enum"]))
        given = node.get("type", [])
        types = [given] if isinstance(given, str) else given
        if types and {*types} <= _SCALARS:
            return self._scalar(node)
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            branches = (
                [{name: node[name]}] if name == "$ref" and name in node else node.get(name, [])
            )
            others = {
                key
                for key in node
                if not all(self._says(branch, key, node[key]) for branch in branches)
            } - {name}
            if branches and (name != "allOf" or len(branches) == 1) and not (others and types):
                self._leave_out(node, others, at)
                return self._first_of(
                    self.value, ((b, f"{at}/{name}/{i}") for i, b in enumerate(branches))
                )
        self._leave_out(node, node.keys() - _FOLLOWED, at)
        return (
            self._first_of(self._typed, ((kind, node, at) for kind in types))
            if types
            else self.value(ANY)
        )

    def _says(self, branch: Any, key: str, value: Any) -> bool:
        """Whether a schema has a keyword of this value, also by what it refers to."""
        if branch and "$ref" in branch:
            branch = self._definitions[branch["$ref"].removeprefix("#/$defs/")]
        return bool(branch) and branch.get(key) == value

    def _leave_out(self, node: Node, names: Iterable[str], at: str) -> None:
        for name in sorted(names):
            self._cannot(f"{at}/{name}", node[name], "this model's format cannot follow it")

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

    def _rule(self, text: str) -> str:
        name = f"{self._prefix}{next(self._numbers)}"
        self._rules[name] = text
        return name

    def _reference(self, reference: str) -> str:
        name = reference.removeprefix("#/$defs/")
        rule = name if name in SHARED else self._prefix + name
        if rule not in self._rules:
            self._rules[rule] = ""
            try:
                self._rules[rule] = self.value(self._definitions[name])
            except Unsatisfiable:
                del self._rules[rule]
                raise
        return rule

    def _scalar(self, node: Node) -> str:
        node = node | {"$defs": self._definitions} if "$ref" in json.dumps(node) else node
        if problem(node):
            raise Unsatisfiable
        return f"%json {json.dumps(node | {'x-guidance': GUIDANCE})}"

    def _listed(self, node: Node, value: Any) -> str:
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
            pairs = (
                f"{_key(name)} {self._literal(value[name])}"
                for name in sorted(value, key=str.lower)
            )
            return f'"{{" {_joined(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    def _typed(self, kind: str, node: Node, at: str) -> str:
        if kind == "string":
            length = f"{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}"
            return f"{self._quote} /(?s:.{length})/ {self._quote}"
        if kind == "object":
            return self._object(node, at)
        return self._array(node, at) if kind == "array" else self._scalar({"type": kind})

    def _array(self, node: Node, at: str) -> str:
        least, most, items = node.get("minItems", 0), node.get("maxItems"), node.get("items", True)
        if isinstance(items, list):
            self._cannot(f"{at}/items", items, "one schema for all items is followed")
            items = True
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
        """An object of the listed properties and no others. `rest`: what may follow a property;
        `first`: the properties from it on.
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


def _joined(items: Iterable[str]) -> str:
    return ' "," '.join(items)
