"""Builds the grammar of calls of tools, in a format of server.text.calls.formats, as Lark for
llguidance.

Invariant: a text of the grammar is read by server.text.calls.parser as calls whose arguments
satisfy the schemas of their functions, which may allow more, but for the keywords that were left
out. Those are told; a schema is never refused. It knows no tokenizer.
"""

import json
from typing import Any

import msgspec

from server.text import json_schema
from server.text.calls.arguments import RuleWriter
from server.text.calls.formats import CallFormat, Mark
from server.text.json_schema import Node

MAX_CALLS = 128
"""Most calls of one output: a message with them is accepted in the next request."""
SPACED = json_schema.GUIDANCE | {"item_separator": ", ", "key_separator": ": "}
"""With spaces as Python's json.dumps writes them, which models have learnt from."""


class Compiled(msgspec.Struct, frozen=True):
    """A grammar for protocol.Submit. `relaxed`: places of keywords in the schemas of tools that it
    does not follow, each of which begins with the function's name.
    """

    grammar: str
    relaxed: list[str] = []


class CallRules(msgspec.Struct, frozen=True):
    """Rules for calls: of these functions, one or with `parallel` several, all of the output or
    what follows an opening (`opened`). `text`: the kind and source of a constraint on an output
    without calls, and on the text before them.
    """

    form: CallFormat
    functions: list[tuple[str, Node]]
    """Names and the schemas of their arguments."""
    parallel: bool
    opened: bool
    text: tuple[str, str] | None = None

    def lark(self, relaxed: list[str]) -> str:
        """The grammar. The places of keywords that are not followed are added to `relaxed`. Raises
        Unsatisfiable and RecursionError.
        """
        form, rules = self.form, dict[str, str]()
        marks = form.begin, form.separator, form.end, form.tail
        begin, separator, end, tail = map(json.dumps, marks)
        opening, closing = _written(form.opening), _written(form.closing)
        functions = enumerate(self.functions)
        call = [self._call(number, *function, rules, relaxed) for number, function in functions]
        times = f"{{0,{MAX_CALLS - 1}}}"
        several = f"({separator} call){times}" if form.is_list and self.parallel else ""
        more = f"({separator} {opening} unit){times}" if self.parallel and not form.is_list else ""
        stop = f"({' | '.join(map(_written, form.stops))})?" if form.stops else ""
        rules["call"] = f"({' | '.join(call)}) {tail}"
        rules["unit"] = f"{begin} call {several} {end} {closing}"
        rules["calls"] = f"{'' if self.opened else opening} unit {more} {stop}"
        rules["start"] = "calls | @text" if self.text else "calls"
        return "\n".join(f"{name}: {text}" for name, text in rules.items())

    def _call(
        self,
        number: int,
        name: str,
        schema: Node,
        rules: dict[str, str],
        relaxed: list[str],
    ) -> str:
        """A call without its tail."""

        def cannot(at: str, value: Any, why: str) -> None:
            relaxed.append(f"{name}{at.removeprefix('#')}")

        if schema.get("type") != "object":
            if "object" not in str(schema.get("type", "object")):
                cannot("#/type", schema["type"], "arguments are an object")
            schema = schema | {"type": "object"}
        prepared = json_schema.prepare(schema, cannot, formats=not self.form.quote)
        if self.form.quote:
            quote, prefix = _written(self.form.quote), f"f{number}_"
            arguments = RuleWriter(prepared, quote, prefix, rules, cannot).value(prepared)
        else:
            arguments = f"%json {json.dumps(prepared | {'x-guidance': SPACED})}"
        rules[f"arguments_{number}"] = arguments
        return f"{json.dumps(self.form.before + name + self.form.after)} arguments_{number}"


def _written(mark: Mark) -> str:
    """A mark in Lark."""
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark)
