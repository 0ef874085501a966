"""Prepares JSON schemas for llguidance: keeps the keywords that it follows, and refuses or leaves
out those that it does not, by keyword, value and place.

An object that names properties and leaves out `additionalProperties` is closed: it gets
`additionalProperties` false, unless it is combined with other schemas. A oneOf with exclusive
branches becomes an anyOf. An unknown format is not enforced, as in the standard, and annotations are
left out. Numbers have at most 16 digits, and values of any kind a bounded depth. Invariant: every
value that satisfies the prepared schema satisfies the given one but for what was left out. No I/O.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

MAX_MULTIPLE = 1000
"""Largest multipleOf without its decimal point (0.25 counts as 25): the lexer has a state for each
remainder."""
MAX_BRANCHES = 64
"""Largest number of branches of a oneOf: each pair of them is compared."""
MAX_ANY_DEPTH = 8
"""Levels of arrays and objects in a value that has no schema."""
GUIDANCE: Any = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
"""llguidance's options: models may write flexible whitespace without end; a key with \\u would not be
compared with declared ones."""
EXACT = 2**53
"""llguidance reads numbers as floats, which represent integers exactly only below this."""
MAX_INTEGER = 9 * 10**18
"""Largest integer of a schema without bounds: it has 64 bits."""
_LENIENT: Any = {"lenient": True}
_EXACT = (
    *("const", "enum", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats as regular expressions: llguidance's own allow 29 February in any year and a leap second in
any minute."""
_DIGITS = "-0123456789"
_BEGINNINGS = {
    "null": "n",
    "boolean": "tf",
    "integer": _DIGITS,
    "number": _DIGITS,
    "string": '"',
    "array": "[",
    "object": "{",
}
"""Type -> the first characters of its values in JSON."""

Node = dict[str, Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    key: (words, fits)
    for keys, words, fits in (
        (
            "type",
            f"one of {', '.join(_BEGINNINGS)}, or a list of these",
            lambda value: (
                bool(value)
                and all(isinstance(name, str) and name in _BEGINNINGS for name in (value if isinstance(value, list) else [value]))
            ),
        ),
        ("const", "a value", lambda value: True),
        ("enum allOf anyOf oneOf", "a list with items", lambda v: isinstance(v, list) and bool(v)),
        ("prefixItems", "a list", lambda value: isinstance(value, list)),
        ("items", "a schema", lambda value: isinstance(value, dict | bool | list)),
        (
            "additionalProperties additionalItems",
            "a schema",
            lambda value: isinstance(value, dict | bool),
        ),
        ("properties patternProperties", "an object", lambda value: isinstance(value, dict)),
        (
            "required",
            "a list of names",
            lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        ),
        ("$ref pattern format", "a text", lambda value: isinstance(value, str)),
        ("minimum maximum multipleOf", "a number", _is_number),
        (
            "exclusiveMinimum exclusiveMaximum",
            "a number",
            lambda value: isinstance(value, bool) or _is_number(value),
        ),
        (
            "minLength maxLength minItems maxItems minProperties maxProperties",
            "an integer of at least 0",
            lambda value: _is_number(value) and value >= 0 and value % 1 == 0,
        ),
    )
    for key in keys.split()
}
"""The keywords that are followed -> their values in words, and whether a value is one."""
_UNFOLLOWED = {
    "not",
    "if",
    "uniqueItems",
    "contains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
}
"""The standard's other assertions; all other keywords are annotations."""
_NAMES = ("#/$defs/number", f"#/$defs/any{MAX_ANY_DEPTH}", "#/$defs/integer")
_SCALARS: list[Node] = [{"$ref": _NAMES[0]}, {"type": ["null", "boolean", "string"]}]
_SHARED: dict[str, Node] = {
    "integer": {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER},
    "number": {
        "anyOf": [
            {
                "type": "number",
                "multipleOf": 10.0**-places,
                "exclusiveMinimum": -(10 ** (16 - places)),
                "exclusiveMaximum": 10 ** (16 - places),
            }
            for places in (0, 3, 6, 10)
        ]
    },
    "any0": {"anyOf": _SCALARS},
}
for _depth in range(MAX_ANY_DEPTH):
    _inner = {"$ref": f"#/$defs/any{_depth}"}
    _SHARED[f"any{_depth + 1}"] = {
        "anyOf": [
            *_SCALARS,
            {"type": "array", "items": _inner},
            {"type": "object", "additionalProperties": _inner},
        ]
    }
"""Schemas of numbers with at most 16 digits, and of any value. llguidance's own let a model write
digits, and open arrays, without end; a multipleOf is what bounds the digits after a point."""


ANYTHING: Node = {"$ref": _NAMES[1], "$defs": _SHARED}
"""The schema of a value of any kind."""


class SchemaError(ValueError):
    """A schema that is not supported; the message is for the client."""


Cannot = Callable[[str, Any, str], None]
"""Called with the JSON pointer of a keyword that cannot be followed, its value, and why. Either it
raises SchemaError, or the keyword is left out."""


def refuse(at: str, value: Any, why: str) -> None:
    """Raises the error for a keyword. `at`: its JSON pointer."""
    pointer = json.dumps(at)[1:-1]
    shown = f"{pointer.rpartition('/')[2]} {json.dumps(value)[:40]} at {pointer[-60:]}"
    raise SchemaError(f"has {shown}: {why}")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise SchemaError("has a number that is not finite, or has more than 308 digits")
    return int(text) if text.lstrip("-").isdigit() else value


def parse(text: str) -> Any:
    """Parses JSON. Raises JSONDecodeError, and SchemaError for non-finite numbers."""
    return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)


def problem(schema: Any) -> str:
    """What llguidance says against a schema; empty if there are values that satisfy it."""
    text, lenient = json.dumps(schema), _LENIENT
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text, overrides=lenient))


def prepare(schema: Any, cannot: Cannot = refuse, is_json: bool = True) -> Node:
    """The schema for llguidance. `is_json`: values are written as JSON, so numbers and values of
    any kind get their bounds here. Raises SchemaError.
    """
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON schema, which is an object")
    return _SchemaRewriter(schema, cannot, is_json).run()


def target(root: Node, reference: str) -> Any:
    """The schema that a `$ref` names. Raises LookupError, TypeError or ValueError if there is none."""
    node: Any = root
    names = [unquote(name) for name in reference.split("/")]
    if names[0] != "#":
        raise LookupError
    for name in names[1:]:
        key = int(name) if isinstance(node, list) else name.replace("~1", "/").replace("~0", "~")
        node = node[key]
    return node


class _SchemaRewriter:
    def __init__(self, root: Node, cannot: Cannot, is_json: bool) -> None:
        self._root = root
        self._cannot = cannot
        self._any: Node = {"$ref": _NAMES[1]} if is_json else {}
        self._is_json = is_json
        self._definitions: dict[tuple[str, bool], str] = {}
        """Reference, and whether its schema is combined with others -> the definition's name."""
        self._written: Node = {}
        self._known_forms: dict[int, set[str]] = {}

    def run(self) -> Node:
        prepared = self._schema(self._root, "#", True)
        if any(name in json.dumps([prepared, self._written]) for name in _NAMES):
            self._written |= _SHARED
        return prepared | ({"$defs": self._written} if self._written else {})  # type: ignore[no-any-return]

    def _schema(self, node: Any, at: str, alone: bool) -> Any:
        """The prepared form of a schema. `alone`: it is not combined with others."""
        if not isinstance(node, dict):
            if not isinstance(node, bool):
                self._cannot(at, node, "a schema is an object, true or false")
            return False if node is False else self._any
        node = self._followed(node, at)
        if not node:
            return self._any
        applicators = len(node.get("allOf", ())) + len(node.keys() & {"anyOf", "oneOf", "$ref", "properties"})
        alone = alone and applicators <= 1
        prepared: Node = {}
        for key, value in node.items():
            if (item := self._value(key, value, f"{at}/{key}", alone)) is not None:
                prepared[key] = item
        besides = [{"anyOf": prepared.pop("oneOf")}] if "oneOf" in prepared else []
        if (name := prepared.pop("format", None)) in _FORMATS:
            prepared["format"] = name
        elif name in _PATTERNS:
            besides.append({"pattern": _PATTERNS[name]})
        self._finish_object(prepared, at, alone)
        if self._is_json:
            besides += self._bounds(prepared, alone and not node.keys() & {*_IN_PLACE, "$ref"})
        return prepared | ({"allOf": prepared.get("allOf", []) + besides} if besides else {})

    def _followed(self, node: Node, at: str) -> Node:
        """The keywords of a schema that can be followed."""
        kept: Node = {}
        if "$id" in node and at != "#":
            self._cannot(f"{at}/$id", node["$id"], "only the whole schema may have one")
        node = _as_others(node)
        for key, value in node.items():
            if _says_nothing(key, value):
                continue
            if why := _why_not(key, value, node):
                self._cannot(f"{at}/{key}", value, why)
            elif key in _SHAPES:
                kept[key] = int(value) if _SHAPES[key][0].startswith("an integer") else value
        if kept and not isinstance(kept.get("items"), list):
            kept.pop("additionalItems", None)  # It has no meaning then, and hides prefixItems.
        if "pattern" in kept and problem({"type": "string", "pattern": kept["pattern"]}):
            why = "it is no regular expression that can be followed: no look-around, no \\1"
            self._cannot(f"{at}/pattern", kept.pop("pattern"), why)
        return kept

    def _value(self, key: str, value: Any, at: str, alone: bool) -> Any:
        """The prepared value of a keyword; None where it is left out."""
        if key in ("properties", "patternProperties"):
            return {name: self._schema(item, f"{at}/{_escaped(name)}", True) for name, item in value.items()}
        if key == "$ref":
            return self._reference(value, at, alone)
        if key not in _INNER + _IN_PLACE:
            return value
        if key in _INNER:
            if not alone and value in (True, {}):
                return True
            alone = True
        if not isinstance(value, list):
            return self._schema(value, at, alone)
        if key == "oneOf" and (name := self._discriminator(value, at)):
            value = [self._resolved(item) for item in value]
            value = [item | {"required": [*item.get("required", ()), name]} if item else item for item in value]
        branches = [self._schema(item, f"{at}/{i}", alone) for i, item in enumerate(value)]
        if key == "allOf":
            return [branch for branch in branches if branch != self._any] or None
        return branches

    def _reference(self, reference: str, at: str, alone: bool) -> str | None:
        """The new name of a reference's target; None if there is none."""
        key = unquote(reference), alone
        if key not in self._definitions:
            try:
                node = target(self._root, reference)
            except (LookupError, TypeError, ValueError):
                why = "no schema of its own has this place; nothing is fetched, so give it whole"
                # Messages do not repeat addresses of other documents, which may be paths of this machine.
                self._cannot(at, reference if reference.startswith("#") else "...", why)
                return None
            self._definitions[key] = name = f"d{len(self._definitions)}"
            prepared = self._schema(node, key[0], alone)
            self._written[name] = prepared if prepared is False else {"$comment": key[0], **prepared}
        return f"#/$defs/{self._definitions[key]}"

    def _finish_object(self, prepared: Node, at: str, alone: bool) -> None:
        """Closes an object, and checks the keywords about its properties together."""
        required = prepared.get("required", [])
        if "properties" in prepared:
            if not {"type", "const", "enum"} & prepared.keys():
                prepared["type"] = "object"
            if alone and "additionalProperties" not in prepared:
                names = {name: True for name in required if name not in prepared["properties"]}
                prepared["properties"] |= {name: self._any for name in names}
                prepared["additionalProperties"] = False
        patterns = prepared.get("patternProperties", {})
        if problem({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}):
            why = "its regular expressions overlap, or cannot be followed"
            self._cannot(f"{at}/patternProperties", prepared.pop("patternProperties"), why)
            if "additionalProperties" in prepared:
                self._cannot(f"{at}/additionalProperties", False, why)
            prepared["additionalProperties"] = {"anyOf": [*patterns.values()]}
        for key in prepared.keys() & {"minProperties", "maxProperties"}:
            if why := _why_not_counted(key, prepared):
                self._cannot(f"{at}/{key}", prepared.pop(key), why)

    def _bounds(self, prepared: Node, alone: bool) -> list[Node]:
        """Bounds what could be written without end: numbers, and values of any kind. Returns schemas
        to be combined with this one.
        """
        if prepared.keys() & {"const", "enum"}:
            return []
        about = {"array": {"items", "prefixItems"}, "object": {"patternProperties", "additionalProperties"}}
        if alone and "type" not in prepared:
            prepared |= {"type": [k for k, keys in about.items() if keys & prepared.keys()]}
        names = {*([given] if isinstance(given := prepared.pop("type", []), str) else given)}
        if not names:
            return [self._any] if alone else []
        prepared["type"] = given
        if alone and "object" in names:
            prepared.setdefault("additionalProperties", self._any)
        if alone and "array" in names and not isinstance(prepared.get("items"), list):
            prepared.setdefault("items", self._any)
        return _bounded_digits(prepared, names) if names & {"number", "integer"} else []

    def _resolved(self, node: Any) -> Node:
        """Follows a chain of references to a schema; an empty one for true and false."""
        for _ in range(64):
            if isinstance(node, dict) and "$ref" in node:
                node = target(self._root, node["$ref"])
        return node if isinstance(node, dict) else {}

    def _discriminator(self, nodes: list[Any], at: str) -> str:
        """The property whose values tell the object branches of a oneOf apart; empty if the branches
        differ in type, or a value could satisfy two branches."""
        if len(nodes) > MAX_BRANCHES:
            why = f"at most {MAX_BRANCHES} branches are supported; use anyOf"
            self._cannot(at, len(nodes), why)
            return ""
        try:
            key, overlap = self._compared(nodes)
        except (AttributeError, LookupError, TypeError, ValueError):
            key, overlap = "", True
        if overlap:
            why = "one value could satisfy two branches; use anyOf, or give each branch a property with its own const"
            self._cannot(at, nodes, why)
        return key

    def _compared(self, nodes: list[Any]) -> tuple[str, bool]:
        forms = [self._forms(node) for node in nodes]
        objects = [self._resolved(node).get("properties", {}) for node, form in zip(nodes, forms, strict=True) if form == {"{"}]
        key = ""
        if len(objects) > 1:
            key = next(
                (name for name in objects[0] if not _overlap([self._forms(properties.get(name)) for properties in objects])),
                "",
            )
        others = [form for form in forms if form != {"{"} or not key]
        return key, _overlap(others + [{"{"}] * bool(key))

    def _forms(self, node: Any) -> set[str]:
        """The forms of a schema, by which `_overlap` compares it with others: the JSON text and ";" of
        each value that const or enum lists; for any other schema the first characters that the JSON of
        its values can have. Cached.
        """
        if id(node) not in self._known_forms:
            self._known_forms[id(node)] = _written_forms(self._resolved(node))
        return self._known_forms[id(node)]


def number(bounds: Node) -> Node:
    """The schema of a number or an integer with these keywords, whose values have few digits."""
    prepared = dict(bounds)
    besides = _bounded_digits(prepared, {prepared["type"]})
    return prepared | ({"allOf": besides, "$defs": _SHARED} if besides else {})


def _bounded_digits(prepared: Node, names: set[str]) -> list[Node]:
    low, high = (
        [prepared[key] for key in keys if _is_number(prepared.get(key))]
        for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if "number" in names and "multipleOf" not in prepared:
        if low and high and max(low) + 1e-9 > min(high):
            return []  # Between them there may be no number of few digits.
        others = sorted(names - {"number", "integer"})
        bounded = {"$ref": _NAMES[0]}
        return [{"anyOf": [bounded, {"type": others}]} if others else bounded]
    if not low and not high and names == {"integer"} and prepared.keys() <= {"type"}:
        del prepared["type"]  # All such properties share one rule of the grammar, whose size is bounded.
        return [{"$ref": "#/$defs/integer"}]
    if not low:
        prepared["minimum"] = -MAX_INTEGER
    if not high:
        prepared["maximum"] = MAX_INTEGER
    return []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _zero(text: str) -> float:
    """A float with -0.0 as 0.0."""
    return float(text) + 0.0


def _written_forms(node: Node) -> set[str]:
    """The forms (see `_forms`) of a schema that is not a reference."""
    if {"const", "enum"} & node.keys():
        listed = json.dumps(node.get("enum", [node.get("const")]))
        values = json.loads(listed, parse_int=_zero, parse_float=_zero)
        return {json.dumps(value, sort_keys=True) + ";" for value in values}
    types = node.get("type", [*_BEGINNINGS])
    names = [types] if isinstance(types, str) else types
    return {*"".join(_BEGINNINGS[kind] for kind in names)}


def _overlap(values: list[set[str]]) -> bool:
    """Whether two of the schemas with these forms may have a value in common."""
    seen: set[str] = set()
    """The forms of earlier schemas, and "?c" where one of their listed values begins with c."""
    for forms in values:
        if any(form in seen or form[0] in seen or f"?{form}" in seen for form in forms):
            return True
        seen |= forms | {f"?{form[0]}" for form in forms if form[1:]}
    return False


def _why_not(key: str, value: Any, node: Node) -> str:
    """Why a keyword cannot be followed; empty if it can, or asserts nothing."""
    if key in _UNFOLLOWED:
        return "it cannot be followed; leave it out" if _asserts(key, value, node) else ""
    if key not in _SHAPES:
        return ""
    words, fits = _SHAPES[key]
    if not fits(value):
        return f"it must be {words}"
    if key not in _EXACT:
        return ""
    text, numbers = json.dumps(value, ensure_ascii=False), list[str]()
    json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
    if any(abs(float(number)) >= EXACT for number in numbers):
        return f"numbers from {EXACT} on are not exact; use a text, or leave the bound out"
    if re.search(r"(?<!\\)(?:\\\\)*\\u00|\x7f", text):
        return "it holds a control character, which cannot be generated"
    return _why_not_multiple(abs(value)) if key == "multipleOf" else ""


def _why_not_multiple(multiple: float) -> str:
    scaled, digits = float(multiple), 0
    while scaled % 1:
        scaled, digits = scaled * 10, digits + 1
    # llguidance computes the digits in this way; if that gives another number than the given one, it
    # would enforce the other.
    exact = Decimal(scaled) == Decimal(str(multiple)).scaleb(digits)
    if 0 < scaled <= MAX_MULTIPLE and exact:
        return ""
    return f"only numbers whose digits make up to {MAX_MULTIPLE} are supported"


def _why_not_counted(key: str, node: Node) -> str:
    """Why `minProperties` or `maxProperties` of an object cannot be followed; empty if it can."""
    required, patterns = len({*node.get("required", ())}), "patternProperties" in node
    is_open = node.get("additionalProperties") is not False or patterns
    if key == "minProperties" and is_open and node[key] > required + 1:
        return "it would count names that may repeat; list more names under `required`"
    optional = node.get("properties", {}).keys() - {*node.get("required", ())}
    is_needed = key == "maxProperties" or node[key] > required
    if optional and is_needed and (is_open or node[key] != required + 1):
        return "minProperties or maxProperties need all properties to be required"
    return ""


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a keyword stands for its absence: null, a boolean `required` (draft 3), or a bound that
    is beyond all numbers that are written.
    """
    if key == "required" or not _is_number(value):
        return (value is None and key != "const") or (key == "required" and isinstance(value, bool))
    low = key in ("minimum", "exclusiveMinimum") and value < -MAX_INTEGER
    return low or (key in ("maximum", "exclusiveMaximum") and value > MAX_INTEGER)


def _as_others(node: Node) -> Node:
    """A schema with `unevaluatedProperties`, `unevaluatedItems` and a list of `propertyNames` in terms
    of the keywords that are followed, where these say the same.
    """
    combined = node.keys() & {*_IN_PLACE, "$ref", "if", "dependentSchemas", "patternProperties"}
    for name, same in (("Properties", "additionalProperties"), ("Items", "items")):
        if f"unevaluated{name}" in node and not combined and same not in node:
            node = node | {same: node[f"unevaluated{name}"], f"unevaluated{name}": True}
    names: Any = node.get("propertyNames")
    listed = names.get("enum") if isinstance(names, dict) else None
    if not isinstance(listed, list) or node.keys() & {"properties", "patternProperties", "$ref"}:
        return node
    values = node.get("additionalProperties", True)
    properties = {name: values for name in listed if isinstance(name, str)}
    others = {name: item for name, item in names.items() if name != "enum"}
    rest = {"propertyNames": others, "additionalProperties": False}
    return node | {"properties": properties} | rest


def _asserts(key: str, value: Any, node: Node) -> bool:
    """Whether a keyword of `_UNFOLLOWED` forbids any value."""
    if key == "if":
        return bool({"then", "else"} & node.keys())
    if key in ("not", "uniqueItems"):
        return value is not False
    if key == "contains":
        return node.get("minContains") != 0 or "maxContains" in node
    if isinstance(value, dict):
        if key in ("dependentRequired", "dependentSchemas", "dependencies"):
            return any(item not in ([], {}, True) for item in value.values())
        return any(name in _UNFOLLOWED or (name in _SHAPES and (name, item) != ("type", "string")) for name, item in value.items())
    return value is not True
