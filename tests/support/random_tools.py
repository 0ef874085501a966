"""Random functions with schemas that every format of calls takes, requests of them, and a check of
what comes back.
"""

import json
import random
from typing import Any

from tests.support.tool_schemas import fault

KEYS = ["city", "Days", "unit", "x_y", "a", "Zeta", "b2", "na-me", "über", "城市", "国家"]
WORDS = [
    "ok",
    "Zürich",
    'say "hi"',
    "a\\b",
    "{x:1}",
    "<escape>",
    "line\nbreak",
    "",
    "42",
    "true",
    "\u20ac\u4f60\U0001f600",
]
WRITABLE = [word for word in WORDS if word != "<escape>"]
"""A text that is forced and spells a special token is refused: llguidance would force that
token."""
PATTERNS = ["^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "[xy]", "^a/b?$"]


class Tools:
    """A source of random functions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def tools(self) -> list[dict[str, Any]]:
        names = self.rng.sample(
            ["get", "get_weather", "set-mode", "f", "a.b", "Find2"], self.rng.randint(1, 4)
        )
        tools = []
        for name in names:
            function: dict[str, Any] = {"name": name}
            if self.rng.random() < 0.7:
                function["description"] = self.rng.choice(WORDS)
            if self.rng.random() < 0.9:
                function["parameters"] = self.object(0)
            tools.append({"type": "function", "function": function})
        return tools

    def object(self, depth: int) -> dict[str, Any]:
        keys = self.rng.sample(KEYS, self.rng.randint(0 if depth else 1, 4))
        schema = {"type": "object", "properties": {key: self.value(depth + 1) for key in keys}}
        if self.rng.random() < 0.8:
            schema["required"] = [key for key in keys if self.rng.random() < 0.6]
            if self.rng.random() < 0.2:
                schema["required"].append("later")  # type: ignore[attr-defined]
        if self.rng.random() < 0.3:
            schema["additionalProperties"] = self.rng.choice([True, {"type": "integer"}])
        return schema

    def value(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        simple: list[dict[str, Any]] = [
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 9},
            {"type": "integer", "minimum": rng.randint(-20, 0), "maximum": rng.randint(0, 200)},
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.5},
            {"type": "boolean", "description": "yes or no"},
            {"type": [rng.choice(["integer", "boolean"]), "null"], "title": "t"},
            {"enum": rng.sample([*WRITABLE, 1, 2.5, None, False, -3], 4)},
            {"const": rng.choice([*WRITABLE, {"a": [1, "b"]}])},
            {
                "type": rng.choice(["integer", "string", "boolean", "null"]),
                "enum": [*WRITABLE, 1.0, 0, 3, True, None],
            },
            {"enum": [1, 5, "abcdef", "d"], "minimum": 3, "maxLength": 1},
            {
                "enum": ["x", "y", 2],
                "anyOf": [{"const": "y"}, {"type": "integer"}],
                "allOf": [{"maximum": 2}],
            },
            {"enum": ["2024-02-29", "foo"], "format": "date"},
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            {
                "allOf": [
                    {"allOf": [{"type": "integer"}, {"minimum": 1}]},
                    {"maximum": 9, "title": "t"},
                ],
                "description": "a few",
            },
            {
                "type": "object",
                "allOf": [
                    {"required": ["later"]},
                    {"allOf": [{"additionalProperties": {"type": "integer"}}]},
                ],
            },
        ]
        kind = rng.choice(["simple", "array", "object", "anyOf"] if depth < 3 else ["simple"])
        if kind == "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": self.value(depth + 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        if kind == "anyOf":
            return {"anyOf": [self.value(depth + 1), self.value(depth + 1)]}
        return self.object(depth) if kind == "object" else rng.choice(simple)


def problems(
    message: dict[str, Any],
    finish: str,
    tools: list[dict[str, Any]],
    followed: dict[str, Any] | None = None,
) -> list[str]:
    """What is wrong with the calls of a finished message; the last call of one that `max_tokens`
    has cut is not looked at. `followed`: name -> the part of the function's schema that is
    followed, by default all of it.
    """
    calls = message.get("tool_calls", [])
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0})
        for tool in tools
    }
    schemas |= followed or {}
    found = []
    for call in calls[: len(calls) - (finish == "length")]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
            if why := fault(arguments, schemas[function["name"]]):
                found.append(f"{function}: {why}")
            if not isinstance(arguments, dict):
                found.append(f"{arguments} is no object")
        except (KeyError, ValueError) as error:
            found.append(f"{function}: {type(error).__name__} {str(error)[:200]}")
    if finish not in ("length", "tool_calls" if calls else "stop"):
        found.append(f"{len(calls)} calls and the finish reason {finish}")
    return found
