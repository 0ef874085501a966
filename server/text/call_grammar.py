"""Builds the grammar of calls of tools, in a format of server.text.call_formats, as Lark for llguidance.

Invariant: a text of the grammar is read by server.text.reply_parser as calls whose arguments satisfy the schemas of their functions, which
may allow more. A schema that cannot be followed is refused. It knows no tokenizer.
"""

import json

import msgspec

from server.text import json_schema
from server.text.call_formats import CallFormat, Mark
from server.text.json_schema import Node, SchemaError
from server.text.native_arguments import RuleWriter, problem

SPACED = json_schema.GUIDANCE | {"item_separator": ", ", "key_separator": ": "}
"""With spaces as Python's json.dumps writes them, which models have learnt from."""


class CallRules(msgspec.Struct, frozen=True):
    """What calls may be: of these functions, one or with `parallel` any number, all of the output or what follows an opening (`opened`)."""

    form: CallFormat
    functions: list[tuple[str, Node]]
    """Names and the schemas of their arguments."""
    parallel: bool
    opened: bool

    def lark(self, open_objects: bool) -> str:
        """The grammar. Raises SchemaError."""
        form, rules = self.form, dict[str, str]()
        begin, separator, end, tail = map(json.dumps, (form.begin, form.separator, form.end, form.tail))
        opening, closing = _written(form.opening), _written(form.closing)
        call = [self._call(number, name, schema, rules, open_objects) for number, (name, schema) in enumerate(self.functions)]
        rules["call"] = f"({' | '.join(call)}) {tail}"
        rules["unit"] = f"{begin} call {f'({separator} call)*' if form.is_list and self.parallel else ''} {end} {closing}"
        more = f"({separator} {opening} unit)*" if self.parallel and not form.is_list else ""
        stop = f"({' | '.join(map(_written, form.stops))})?" if form.stops else ""
        rules["start"] = f"{'' if self.opened else opening} unit {more} {stop}"
        return "\n".join(f"{name}: {text}" for name, text in rules.items())

    def _call(self, number: int, name: str, schema: Node, rules: dict[str, str], open_objects: bool) -> str:
        """A call without its tail."""
        try:
            prepared = json_schema.prepare(schema, open_objects)
            if prepared.setdefault("type", "object") != "object":
                raise SchemaError("has another type than object")
            if self.form.quote:
                if problem(prepared):
                    raise SchemaError("is no JSON Schema, has a pattern that is not supported, or cannot be satisfied by anything")
                arguments = RuleWriter(prepared, _written(self.form.quote), f"f{number}_", rules).value(prepared)
            else:
                arguments = f"%json {json.dumps(prepared | {'x-guidance': SPACED})}"
        except SchemaError as error:
            raise SchemaError(f"holds the function {name}, whose schema {error}") from None
        rules[f"arguments_{number}"] = arguments
        return f"{json.dumps(self.form.before + name + self.form.after)} arguments_{number}"


def _written(mark: Mark) -> str:
    """A mark in Lark."""
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark)
