"""Prepares JSON schemas for llguidance: keeps the keywords that it follows, and refuses or leaves
out those that it does not, by keyword, value and place. llguidance itself says which these are.

An object that names properties and leaves out `additionalProperties` is closed: it gets
`additionalProperties` false, unless it is combined with other schemas. The branches of a oneOf have
no value in common. An unknown format is not enforced, as in the standard, and annotations are
left out. Numbers have at most 16 digits, and values of any kind a bounded depth. Invariant: every
value that satisfies the prepared schema satisfies the given one but for what was left out. No I/O.
"""

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

MAX_MULTIPLE = 1000
"""Largest multipleOf without its decimal point (0.25 counts as 25): the lexer has a state for each
remainder."""
MAX_BRANCHES = 64
"""Most branches of a oneOf: each pair of them is compared."""
MAX_ANY_DEPTH = 8
"""Levels of arrays and objects in a value that has no schema."""
GUIDANCE: Any = {
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": True,
}
"""llguidance's options: models may write flexible whitespace without end; a key with \\u would not
be compared with declared ones; which branches of a oneOf have values in common is checked here."""
EXACT = 2**53
"""llguidance reads numbers as floats, which represent integers exactly only below this."""
MAX_INTEGER = 9 * 10**18
"""Largest integer of a schema without bounds: it has 64 bits."""
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
"""Bounds of a number."""
_EXACT = (*_LOW, *_HIGH, "const", "enum", "multipleOf")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats as regular expressions: llguidance's own allow 29 February in any year and a leap second
in any minute."""
Node = dict[str, Any]
_SCHEMAS: dict[str, type | UnionType] = {
    "properties": dict,
    "patternProperties": dict,
    "items": dict | bool | list,
    "prefixItems": list,
    "additionalItems": dict | bool,
    "additionalProperties": dict | bool,
    **dict.fromkeys(_IN_PLACE, list),
}
"""Keywords with schemas in their values -> the types of these values."""
_FOLLOWED = {
    *_SCHEMAS,
    *_EXACT,
    *("$ref", "type", "required", "pattern", "format", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
}
"""The keywords that are followed. llguidance tells which others assert something."""
_OVERLAP = (
    "one value could satisfy two branches; use anyOf, or give each branch a property with its own "
    "const;"
    f" at most {MAX_BRANCHES} branches are supported"
)
_PROPERTIES = (
    "patterns must not overlap; a count needs all properties to be required, and names "
    "that cannot repeat"
)
NUMBERS: list[Node] = [
    {
        "type": "number",
        "multipleOf": 10.0**-places,
        "exclusiveMinimum": -(10 ** (16 - places)),
        "exclusiveMaximum": 10 ** (16 - places),
    }
    for places in (0, 3, 6, 10)
]
_SCALARS: list[Node] = [{"$ref": "#/$defs/number"}, {"type": ["null", "boolean", "string"]}]
SHARED: dict[str, Node] = {
    "integer": {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER},
    "number": {"type": "number", "anyOf": NUMBERS},
    "any0": {"anyOf": _SCALARS},
}
"""Schemas of numbers with at most 16 digits, and of any value. llguidance's own let a model write
digits, and open arrays, without end; a multipleOf is what bounds the digits after a point."""
for _depth in range(MAX_ANY_DEPTH):
    _inner = {"$ref": f"#/$defs/any{_depth}"}
    _levels = [
        {"type": "array", "items": _inner},
        {"type": "object", "additionalProperties": _inner},
    ]
    SHARED[f"any{_depth + 1}"] = {"anyOf": [*_SCALARS, *_levels]}
ANY: Node = {"$ref": f"#/$defs/any{MAX_ANY_DEPTH}"}
"""The schema of a value of any kind, with the definitions of SHARED."""


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
    return _problem(json.dumps(schema))


@lru_cache(256)
def _problem(text: str, lenient: bool = False) -> str:
    options: Any = {"lenient": lenient, "coerce_one_of": True}
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text, overrides=options))


def prepare(schema: Any, cannot: Cannot = refuse, formats: bool = True) -> Node:
    """The schema for llguidance. `formats`: they are enforced, where they are known. Raises
    SchemaError.
    """
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON schema, which is an object")
    return _SchemaRewriter(schema, cannot, formats).run()


def _target(root: Node, reference: str) -> Any:
    """The schema that a `$ref` names. Raises LookupError, TypeError or ValueError if there is
    none.
    """
    node: Any = root
    names = [unquote(name) for name in reference.split("/")]
    if names[0] != "#":
        raise LookupError
    for name in names[1:]:
        key = int(name) if isinstance(node, list) else name.replace("~1", "/").replace("~0", "~")
        node = node[key]
    return node


class _SchemaRewriter:
    def __init__(self, root: Node, cannot: Cannot, formats: bool) -> None:
        self._root = root
        self._cannot = cannot
        self._formats = formats
        self._definitions: dict[tuple[str, bool], str] = {}
        """Reference, and whether its schema is combined with others -> the definition's name."""
        self._written: Node = {}

    def run(self) -> Node:
        prepared = self._schema(self._root, "#", True)
        text = json.dumps([prepared, self._written])
        if any(f'"#/$defs/{name}"' in text for name in SHARED):
            self._written |= SHARED
        return prepared | ({"$defs": self._written} if self._written else {})  # type: ignore[no-any-return]

    def _schema(self, node: Any, at: str, alone: bool) -> Any:
        """The prepared form of a schema. `alone`: it is not combined with others."""
        if not isinstance(node, dict):
            if not isinstance(node, bool):
                self._cannot(at, node, "a schema is an object, true or false")
            return False if node is False else ANY
        node = self._followed(node, at)
        if not node:
            return ANY
        applicators = len(node.get("allOf", ())) + len(
            node.keys() & {"anyOf", "oneOf", "$ref", "properties"}
        )
        alone = alone and applicators <= 1
        prepared: Node = {}
        for key, value in node.items():
            if (item := self._value(key, value, f"{at}/{key}", alone)) is not None:
                prepared[key] = item
        name = prepared.pop("format", None)
        name = name if self._formats else None
        if name in _FORMATS:
            prepared["format"] = name
        elif name in _PATTERNS:
            _combine(prepared, {"pattern": _PATTERNS[name]})
        self._finish_object(prepared, at, alone)
        _bound(prepared, at, alone and not node.keys() & {*_IN_PLACE, "$ref"})
        return prepared or ANY

    def _followed(self, node: Node, at: str) -> Node:
        """The keywords of a schema that can be followed."""
        kept: Node = {}
        if "$id" in node and at != "#":
            self._cannot(f"{at}/$id", node["$id"], "only the whole schema may have one")
        node = _as_others(node)
        for key, value in node.items():
            if _says_nothing(key, value, node):
                continue
            if why := _why_not(key, value):
                self._cannot(f"{at}/{key}", value, why)
            elif key in _FOLLOWED:
                kept[key] = value
        if kept and not isinstance(kept.get("items"), list):
            kept.pop("additionalItems", None)  # It has no meaning then, and hides prefixItems.
        if "const" in kept:
            const = kept.pop("const")
            kept["enum"] = [item for item in kept.get("enum", [const]) if item == const]
        return kept

    def _value(self, key: str, value: Any, at: str, alone: bool) -> Any:
        """The prepared value of a keyword; None where it is left out."""
        if key == "$ref":
            return self._reference(value, at, alone)
        if key not in _SCHEMAS:
            return value
        if key not in _IN_PLACE:
            if not alone and value in (True, {}):
                return True
            alone = True
        if key in ("properties", "patternProperties"):
            return {
                name: self._schema(item, f"{at}/{_escaped(name)}", True)
                for name, item in value.items()
            }
        if not isinstance(value, list):
            return self._schema(value, at, alone)
        value = self._exclusive(value, at) if key == "oneOf" else value
        branches = [self._schema(item, f"{at}/{i}", alone) for i, item in enumerate(value)]
        if key == "allOf":
            return [branch for branch in branches if branch != ANY] or None
        return branches

    def _exclusive(self, branches: list[Any], at: str) -> list[Any]:
        """The branches of a oneOf, where tags are required. They must have no value in common."""
        document = {
            name: item
            for name, item in self._root.items()
            if name not in _FOLLOWED and isinstance(item, dict)
        }
        tagged = [self._tagged(branch) for branch in branches]
        overlap = len(branches) > MAX_BRANCHES
        for i in range(0 if overlap else len(branches)):
            both = [tagged[i], {"anyOf": branches[:i] + branches[i + 1 :]}]
            overlap |= not _problem(
                json.dumps(document | {"allOf": both}), lenient=True
            ).startswith("Unsatisfiable")
        if overlap:
            self._cannot(at, branches, _OVERLAP)
        return tagged

    def _tagged(self, node: Any) -> Any:
        """A branch of a oneOf, where properties with a const are required: they tell branches
        apart.
        """
        try:
            found = _target(self._root, node["$ref"]) if "$ref" in node else node
            tags = [name for name, item in found["properties"].items() if "const" in item]
            return found | {"required": [*found.get("required", ()), *tags]} if tags else node
        except (AttributeError, LookupError, TypeError, ValueError):
            return node

    def _reference(self, reference: str, at: str, alone: bool) -> str | None:
        """The new name of a reference's target; None if there is none."""
        key = unquote(reference), alone
        if key not in self._definitions:
            try:
                node = _target(self._root, reference)
            except (LookupError, TypeError, ValueError):
                why = "no schema of its own has this place; nothing is fetched, so give it whole"
                # Messages do not repeat addresses of other documents, which may be paths of this
                # machine.
                self._cannot(at, reference if reference.startswith("#") else "...", why)
                return None
            self._definitions[key] = name = f"d{len(self._definitions)}"
            prepared = self._schema(node, key[0], alone)
            self._written[name] = (
                prepared if prepared is False else {"$comment": key[0], **prepared}
            )
        return f"#/$defs/{self._definitions[key]}"

    def _finish_object(self, prepared: Node, at: str, alone: bool) -> None:
        """Closes an object, and checks the keywords about its properties together."""
        required = prepared.get("required", [])
        if "properties" in prepared:
            if not {"type", "enum"} & prepared.keys():
                prepared["type"] = "object"
            if alone and "additionalProperties" not in prepared:
                others = [name for name in required if name not in prepared["properties"]]
                prepared["properties"] |= dict.fromkeys(others, ANY)
                prepared["additionalProperties"] = False
        names = dict.fromkeys(prepared.get("properties", ()), True)
        patterns = dict.fromkeys(prepared.get("patternProperties", ()), True)
        is_open = prepared.get("additionalProperties") is not False or bool(patterns)
        rest = {
            "type": "object",
            "properties": names,
            "required": required,
            "additionalProperties": is_open,
        }
        for key in prepared.keys() & {"patternProperties", "minProperties", "maxProperties"}:
            count = prepared[key] if key == "minProperties" and is_open else 0
            if count > len({*required}) + 1 or problem(
                rest | {key: patterns if key[0] == "p" else prepared[key]}
            ):
                left_out = prepared.pop(key)
                self._cannot(f"{at}/{key}", left_out, _PROPERTIES)
                if key == "patternProperties" and prepared.get("additionalProperties") is False:
                    # Else the names that the patterns are of would be left out as well.
                    self._cannot(f"{at}/additionalProperties", False, _PROPERTIES)
                    prepared["additionalProperties"] = {"anyOf": [*left_out.values()]}


def _combine(prepared: Node, other: Node) -> None:
    """Makes values satisfy another schema too."""
    if prepared.keys().isdisjoint(other):
        prepared |= other
    else:
        prepared["allOf"] = [*prepared.get("allOf", ()), other]


def _bound(prepared: Node, at: str, alone: bool) -> None:
    """Bounds what could be written without end: numbers, and values of any kind."""
    if "enum" in prepared:
        return
    if alone and "type" not in prepared:
        about = {
            "array": {"items", "prefixItems"},
            "object": {"patternProperties", "additionalProperties"},
        }
        if types := [kind for kind, keys in about.items() if keys & prepared.keys()]:
            prepared["type"] = types
        else:
            _combine(prepared, ANY)
    given = prepared.get("type", [])
    types = [given] if isinstance(given, str) else given
    if alone and "object" in types:
        prepared.setdefault("additionalProperties", ANY)
    if alone and "array" in types and not isinstance(prepared.get("items"), list):
        prepared.setdefault("items", ANY)
    others = [kind for kind in types if kind not in ("number", "integer")]
    if others and others != types:
        number = prepared | {"type": [kind for kind in types if kind not in others]}
        branches = [number, prepared | {"type": others}]
        _bound_digits(number)
        prepared.clear()
        prepared["anyOf"] = [branch | {"$comment": at} for branch in branches]
    elif types and not others:
        _bound_digits(prepared)


def _bound_digits(prepared: Node) -> None:
    """Bounds numbers, the only values of a schema."""
    kind = prepared["type"] = "number" if "number" in prepared["type"] else "integer"
    low, high = (
        [prepared[key] for key in keys if _is_number(prepared.get(key))] for keys in (_LOW, _HIGH)
    )
    if len(prepared) == 1:
        # All such properties share one rule of the grammar, whose size is bounded.
        prepared["$ref"] = f"#/$defs/{prepared.pop('type')}"
    elif kind == "number" and "multipleOf" not in prepared:
        # Else there may be none of few digits.
        if not (low and high and max(low) + 1e-9 > min(high)):
            _combine(prepared, {"anyOf": NUMBERS})
    else:
        if not low:
            prepared["minimum"] = -MAX_INTEGER
        if not high:
            prepared["maximum"] = MAX_INTEGER


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _why_not(key: str, value: Any) -> str:
    """Why a keyword cannot be followed; empty if it can, or is an annotation."""
    if key in _SCHEMAS:
        fits = isinstance(value, _SCHEMAS[key]) and (key not in _IN_PLACE or value)
        return "" if fits else "it is not of the standard's form"
    if key in ("$ref", "format"):
        return "" if isinstance(value, str) else "it must be a text"
    said = "" if key == "$schema" else problem({key: value})
    if key not in _FOLLOWED:
        return "it cannot be followed; leave it out" if said.startswith("Unimplemented") else ""
    if said:
        return ascii(said.partition("\n")[0][:80])[1:-1]
    if key not in _EXACT:
        return ""
    text, numbers = json.dumps(value, ensure_ascii=False), list[str]()
    json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
    if any(abs(float(number)) >= EXACT for number in numbers):
        return f"numbers from {EXACT} on are not exact; use a text, or leave the bound out"
    if re.search(r"(?<!\\)(?:\\\\)*\\u00|\x7f", text):
        return "it holds a control character, which cannot be generated"
    return _why_not_multiple(value) if key == "multipleOf" else ""


def _why_not_multiple(multiple: float) -> str:
    scaled = float(multiple)
    while scaled % 1:  # As llguidance computes the digits: where that is not exact, they are many.
        scaled *= 10
    if 0 < scaled <= MAX_MULTIPLE:
        return ""
    return f"only numbers whose digits make up to {MAX_MULTIPLE} are supported"


def _says_nothing(key: str, value: Any, node: Node) -> bool:
    """Whether a keyword forbids no value, or stands for its absence: null, a boolean `required`
    (draft 3), or a bound that is beyond all numbers that are written.
    """
    if value is None:
        return key != "const"
    if key in (*_LOW, *_HIGH) and _is_number(value):
        return bool(value < -MAX_INTEGER if key in _LOW else value > MAX_INTEGER)
    if key in ("then", "else", "minContains", "maxContains"):
        return True  # They belong to another one.
    if key == "if":
        return not {"then", "else"} & node.keys()
    if key in ("not", "uniqueItems", "required"):
        return value is False or (key, value) == ("required", True)
    if key == "contains":
        return node.get("minContains") == 0 and "maxContains" not in node
    return key not in _FOLLOWED and value in (
        True,
        {},
        {"type": "string"} if key == "propertyNames" else True,
    )


def _as_others(node: Node) -> Node:
    """A schema with `unevaluatedProperties` and a list of `propertyNames` in terms of the keywords
    that are followed, where these say the same.
    """
    combined = {
        *_IN_PLACE,
        "$ref",
        "if",
        "dependentSchemas",
        "patternProperties",
        "additionalProperties",
    }
    if "unevaluatedProperties" in node and not node.keys() & combined:
        others = node["unevaluatedProperties"]
        node = node | {"additionalProperties": others, "unevaluatedProperties": True}
    names: Any = node.get("propertyNames")
    listed = names.get("enum") if isinstance(names, dict) else None
    if not isinstance(listed, list) or node.keys() & {"properties", "patternProperties", "$ref"}:
        return node
    values = node.get("additionalProperties", True)
    properties = {name: values for name in listed if isinstance(name, str)}
    others = {name: item for name, item in names.items() if name != "enum"}
    return node | {"properties": properties, "additionalProperties": False, "propertyNames": others}
