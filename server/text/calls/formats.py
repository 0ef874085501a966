"""Formats in which models write calls of tools and thoughts: a table, and the choice of the one that a checkpoint uses.

A format is data, read by the builder of its grammar (rules) and by the parser of replies (parser). Invariant: a mark is a
token of the vocabulary, and never text that spells it; only a format without such tokens has a text as its opening. It knows no tools.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from server.protocol import Opening
from server.text.codec import TextCodec

Mark = str | int
"""A mark's text, or its token id after `format_of`."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls are written as `opening` `begin` call `end` `closing`, with `separator` between two of them, or between several calls inside
    of one such pair if `is_list`. A call is `before` NAME `after` ARGUMENTS `tail`.
    """

    name: str = ""
    opening: Mark = ""
    closing: Mark = ""
    before: str = '{"name": "'
    after: str = '", "arguments": '
    tail: str = "}"
    begin: str = ""
    separator: str = ""
    end: str = ""
    is_list: bool = False
    quote: Mark = ""
    """What encloses texts in arguments, whose keys are bare then; empty: arguments are JSON."""
    stops: tuple[Mark, ...] = ()
    """Further tokens that end the turn after calls."""
    thought: Mark = ""
    thought_end: Mark = ""
    thought_head: str = ""
    """What follows `thought` and is no part of the thought."""


_PATTERN = re.compile(r"(?P<space>\\s\*)?(?P<mark>(?:[\w<]|\\[^\w])+>)(?P<before>(?:\w|\\?[: ])*)(?:\(\?P<name>\S+\))?")
"""An `open_pattern` that is a mark, perhaps after white space, and perhaps with a text and the function's name after it."""
MARKS = ("opening", "closing", "quote", "thought", "thought_end")
"""The fields that are marks, where they are not empty."""
FUNCTION_GEMMA = CallFormat(
    "functiongemma", "<start_function_call>", "<end_function_call>", "call:", "", "", quote="<escape>", stops=("<start_function_response>",)
)
GEMMA_4 = CallFormat(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    "call:",
    "",
    "",
    quote='<|"|>',
    stops=("<|tool_response>",),
    thought="<|channel>",
    thought_end="<channel|>",
    thought_head="thought\n",
)
JAMBA = CallFormat("jamba", "<tool_calls>", "</tool_calls>", begin="[\n    ", separator=",\n    ", end="\n]", is_list=True)
GRANITE = CallFormat("granite", "<function_call>", begin=" ", separator="\n")
WRAPPER = CallFormat("json", begin="[", separator=", ", end="]", is_list=True)
"""For models without a format of their own, where a call is required: a JSON array of calls is the whole output."""


def format_of(codec: TextCodec) -> CallFormat | None:
    """The format of a checkpoint, None for one that has none: all of its marks are in the vocabulary, or its opening in the template."""
    described = _described(codec.files.response_template)
    for known in filter(None, (described, FUNCTION_GEMMA, GEMMA_4, JAMBA, GRANITE)):
        ids: dict[str, Any] = {name: codec.token_id(mark) for name in MARKS if (mark := getattr(known, name))}
        if None not in ids.values():
            stops = map(codec.token_id, map(str, known.stops))
            return replace(known, stops=tuple(id for id in stops if id is not None), **ids)
    return GRANITE if codec.is_bytes and str(GRANITE.opening) in (codec.files.chat_template or "") else None


class _Field(msgspec.Struct):
    """A field of transformers' `response_template`: what begins and ends it in a reply, and how it is read."""

    open: str = ""
    open_pattern: str = ""
    close: str | list[str] = []
    content_args: "_Syntax" = msgspec.field(default_factory=lambda: _Syntax())
    transform: dict[str, Any] = {}


class _Syntax(msgspec.Struct):
    string_delims: list[tuple[str, str]] = []


class _Template(msgspec.Struct):
    fields: dict[str, _Field] = {}


def _described(template: Any) -> CallFormat | None:
    """The format of a `response_template`, if it describes calls in one of the two syntaxes that there are grammars for."""
    try:
        fields = msgspec.convert(template or {}, _Template).fields
    except msgspec.ValidationError:
        fields = {}
    calls, thought = fields.get("tool_calls", _Field()), fields.get("reasoning_content", _Field())
    pattern = _PATTERN.fullmatch(calls.open_pattern or re.escape(calls.open))
    function, delimiters = calls.transform.get("function"), calls.content_args.string_delims
    if pattern is None or not isinstance(calls.close, str):
        return None
    mark, before = (re.sub(r"\\(.)", r"\1", part) for part in pattern.group("mark", "before"))
    common: Any = {"closing": calls.close}
    if isinstance(thought.close, str):
        begun, bracket, head = thought.open.partition(">")
        common |= {"thought": begun + bracket, "thought_head": head, "thought_end": thought.close}
    if function == "{content}" and not before:
        return CallFormat("response_template", mark, separator="\n" if pattern["space"] else "", **common)
    if function == {"name": "{name}", "arguments": "{content}"} and before and delimiters and len({*delimiters[0]}) == 1:
        ends = fields.get("content", _Field()).close
        stops = (ends,) if isinstance(ends, str) else tuple(ends)
        return CallFormat("response_template", mark, before=before, after="", tail="", quote=delimiters[0][0], stops=stops, **common)
    return None


def opening_of(known: CallFormat, codec: TextCodec) -> Opening:
    """What the engine has to look for. Of an opening that is a text: the tokens that may end it, which are part of it or end in it."""
    if isinstance(known.opening, int):
        return Opening([known.opening])
    text = known.opening.encode()
    spelt = ((id, codec.raw_bytes(id)) for id in range(codec.largest_id + 1))
    return Opening([id for id, token in spelt if token and (text.endswith(token) or token.endswith(text))], known.opening)
