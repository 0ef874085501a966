"""Prepares JSON schemas for llguidance: rewrites keywords that it does not follow exactly, or refuses them with keyword, value and place.

An object that names properties and leaves out `additionalProperties` is closed: it gets `additionalProperties` false, unless it is
combined with other schemas, or is the target of a $ref that is. A oneOf with exclusive branches becomes an anyOf. An unknown format is not
enforced, as in the standard. Invariant: every value that satisfies the prepared schema satisfies the given one. No I/O.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_MULTIPLE = 1000
"""Largest multipleOf without its decimal point (0.25 counts as 25): the lexer has a state for each remainder."""
MAX_BRANCHES = 64
"""Largest number of branches of a oneOf: each pair of them is compared."""
GUIDANCE: Any = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
"""llguidance's options: models may write flexible whitespace without end; a key with \\u would not be compared with declared ones."""
EXACT = 2**53
"""llguidance reads numbers as floats, which represent integers exactly only below this."""
_EXACT = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats as regular expressions: llguidance's own allow 29 February in any year and a leap second in any minute."""
_DIGITS = "-0123456789"
_BEGINNINGS = {"null": "n", "boolean": "tf", "integer": _DIGITS, "number": _DIGITS, "string": '"', "array": "[", "object": "{"}
"""Type -> the first characters of its values in JSON."""


Node = dict[str, Any]


class SchemaError(ValueError):
    """A schema that is not supported; the message is for the client."""


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise SchemaError("has a number that is not finite, or has more than 308 digits")
    return int(text) if text.lstrip("-").isdigit() else value


def parse(text: str) -> Any:
    """Parses JSON. Raises JSONDecodeError, and SchemaError for non-finite numbers."""
    return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)


def prepare(schema: Any, open_objects: bool) -> Node:
    """The schema for llguidance. `open_objects`: objects without `additionalProperties` allow further properties. Raises SchemaError."""
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON schema, which is an object")
    if "x-guidance" in schema:
        raise SchemaError("has the key x-guidance, which is not supported")
    try:
        return _SchemaRewriter(schema, not open_objects).run()
    except (AttributeError, LookupError, TypeError):  # A value of the wrong type, such as a list for an object.
        raise SchemaError("has a keyword with a value of the wrong type, or a reference to nothing") from None


def refuse(at: str, value: Any, why: str) -> SchemaError:
    """The error for a keyword. `at`: its JSON pointer."""
    pointer = json.dumps(at)[1:-1]
    return SchemaError(f"has {pointer.rpartition('/')[2]} {json.dumps(value)[:40]} at {pointer[-60:]}: {why}")


def target(root: Node, reference: str) -> Any:
    """The schema that a `$ref` names."""
    node: Any = root
    for name in unquote(reference).split("/")[1:]:
        items = {str(i): item for i, item in enumerate(node)} if isinstance(node, list) else node
        node = items[name.replace("~1", "/").replace("~0", "~")]
    return node


class _SchemaRewriter:
    def __init__(self, root: Node, closing: bool) -> None:
        self._root = root
        self._closing = closing
        self._open_references: set[str] = set()
        """References to schemas that are combined with others, and so must stay open for the others' properties."""
        self._known_pointers: set[str] = set()
        """JSON pointers of all schemas, as references name them."""
        self._references: dict[str, str] = {}
        """Reference -> JSON pointer of the place that uses it."""
        self._known_forms: dict[int, set[str]] = {}

    def run(self) -> Node:
        # A $ref in a schema that stays open keeps its target open too. Each round finds these one reference further on, four at most.
        for _ in range(4):
            num_open = len(self._open_references)
            prepared: Node = self._schema(self._root, "#", self._closing)
            if len(self._open_references) == num_open:
                break
        for reference, at in self._references.items():
            if unquote(reference) not in self._known_pointers:
                raise SchemaError(
                    f"has a $ref at {json.dumps(at)[1:-1][-60:]} to no schema of its own; nothing is fetched, so give it whole"
                )
        return prepared

    def _schema(self, node: Any, at: str, closing: bool) -> Any:
        """The prepared form of a schema. `closing`: whether objects without `additionalProperties` are closed."""
        if not isinstance(node, dict):
            return node
        _check(node, at)
        self._known_pointers.add(at)
        combined = len(node.get("allOf", ())) + sum(key in node for key in ("anyOf", "oneOf", "$ref", "properties")) > 1
        closing = closing and not combined and at not in self._open_references
        if "$ref" in node and not closing:
            self._open_references.add(node["$ref"])
        prepared = {key: self._value(key, value, f"{at}/{key}", closing) for key, value in node.items()}
        if not isinstance(node.get("items"), list):
            prepared.pop("additionalItems", None)  # It has no meaning then, and makes llguidance ignore prefixItems.
        besides = [{"anyOf": prepared.pop("oneOf")}] if "oneOf" in node else []
        if (name := prepared.pop("format", None)) in _FORMATS:
            prepared["format"] = name
        elif name in _PATTERNS:
            besides.append({"pattern": _PATTERNS[name]})
        required = node.get("required", [])
        if "properties" in node:
            if not {"type", "const", "enum"} & node.keys():
                prepared["type"] = "object"
            if closing and "additionalProperties" not in node:
                prepared["properties"] |= {name: True for name in required if name not in node["properties"]}
                prepared["additionalProperties"] = False
        is_open = prepared.get("additionalProperties") is not False or "patternProperties" in node
        if is_open and node.get("minProperties", 0) > len(required) + 1:
            raise refuse(
                f"{at}/minProperties", node["minProperties"], "it would count names that may repeat; list more names under `required`"
            )
        return prepared | ({"allOf": prepared.get("allOf", []) + besides} if besides else {})

    def _value(self, key: str, value: Any, at: str, closing: bool) -> Any:
        """The prepared value of a keyword. `closing` applies to subschemas of the same instance."""
        if key in _NAMED:
            escaped = {name: name.replace("~", "~0").replace("/", "~1") for name in value}
            return {name: self._schema(item, f"{at}/{escaped[name]}", self._closing) for name, item in value.items()}
        if key == "$ref":
            self._references[value] = at
        if key not in _INNER + _IN_PLACE:
            return value
        closing = self._closing if key in _INNER else closing
        if not isinstance(value, list):
            return self._schema(value, at, closing)
        branches = [self._schema(item, f"{at}/{i}", closing) for i, item in enumerate(value)]
        if key == "oneOf" and (name := self._discriminator(value, at)):
            return [{"allOf": [branch], "required": [name]} for branch in branches]
        return branches

    def _resolved(self, node: Any) -> Node:
        """Follows a chain of references to a schema; an empty one for true and false."""
        for _ in range(64):
            if isinstance(node, dict) and "$ref" in node:
                node = target(self._root, node["$ref"])
        return node if isinstance(node, dict) else {}

    def _discriminator(self, nodes: list[Any], at: str) -> str:
        """The property whose values tell the object branches of a oneOf apart; empty if the branches differ in type. Raises SchemaError if
        a value could satisfy two branches.
        """
        if len(nodes) > MAX_BRANCHES:
            raise refuse(at, len(nodes), f"at most {MAX_BRANCHES} branches are supported; use anyOf")
        forms = [self._forms(node) for node in nodes]
        objects = [self._resolved(node).get("properties", {}) for node, form in zip(nodes, forms, strict=True) if form == {"{"}]
        key = ""
        if len(objects) > 1:
            key = next((name for name in objects[0] if not _overlap([self._forms(properties.get(name)) for properties in objects])), "")
        if _overlap([form for form in forms if form != {"{"} or not key] + [{"{"}] * bool(key)):
            raise refuse(at, nodes, "one value could satisfy two branches; use anyOf, or give each branch a property with its own const")
        return key

    def _forms(self, node: Any) -> set[str]:
        """The forms of a schema, by which `_overlap` compares it with others: the JSON text and ";" of each value that const or enum
        lists; for any other schema the first characters that the JSON of its values can have. Cached.
        """
        if id(node) not in self._known_forms:
            self._known_forms[id(node)] = _written_forms(self._resolved(node))
        return self._known_forms[id(node)]


def _zero(text: str) -> float:
    """A float with -0.0 as 0.0."""
    return float(text) + 0.0


def _written_forms(node: Node) -> set[str]:
    """The forms (see `_forms`) of a schema that is not a reference."""
    if {"const", "enum"} & node.keys():
        values = json.loads(json.dumps(node.get("enum", [node.get("const")])), parse_int=_zero, parse_float=_zero)
        return {json.dumps(value, sort_keys=True) + ";" for value in values}
    types = node.get("type", [*_BEGINNINGS])
    return {*"".join(_BEGINNINGS[kind] for kind in ([types] if isinstance(types, str) else types))}


def _overlap(values: list[set[str]]) -> bool:
    """Whether two of the schemas with these forms may have a value in common."""
    seen: set[str] = set()
    """The forms of earlier schemas, and "?c" where one of their listed values begins with c."""
    for forms in values:
        if any(form in seen or form[0] in seen or f"?{form}" in seen for form in forms):
            return True
        seen |= forms | {f"?{form[0]}" for form in forms if form[1:]}
    return False


def _check(node: Node, at: str) -> None:
    """Raises SchemaError for keyword values that llguidance would read as other values."""
    if "$id" in node and at != "#":
        raise refuse(f"{at}/$id", node["$id"], "only the whole schema may have one")
    for key in node.keys() & {*_EXACT}:
        text, numbers = json.dumps(node[key], ensure_ascii=False), list[str]()
        json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
        if any(abs(float(number)) >= EXACT for number in numbers):
            raise refuse(f"{at}/{key}", node[key], f"numbers from {EXACT} on are not exact; use a text, or leave the bound out")
        if re.search(r"(?<!\\)(?:\\\\)*\\u00|\x7f", text):
            raise refuse(f"{at}/{key}", node[key], "it holds a control character, which cannot be generated")
    if multiple := abs(node.get("multipleOf", 0)):
        scaled, digits = float(multiple), 0
        while scaled % 1:
            scaled, digits = scaled * 10, digits + 1
        # llguidance computes the digits in this way; if that gives another number than the given one, it would enforce the other.
        if scaled > MAX_MULTIPLE or Decimal(scaled) != Decimal(str(multiple)).scaleb(digits):
            raise refuse(f"{at}/multipleOf", multiple, f"only numbers whose digits make up to {MAX_MULTIPLE} are supported")
