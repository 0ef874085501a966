"""Formats in which models write calls of tools and thoughts: a table, and the choice of the one
that a checkpoint uses.

A format is data, read by the builder of its grammar (rules) and by the parser of replies (parser).
Invariant: a mark is a token of the vocabulary, and never text that spells it; only a format without
such tokens has a text as its opening. It knows no tools.
"""

from dataclasses import dataclass, replace
from typing import Any

from server.protocol import Opening
from server.text.codec import TextCodec

Mark = str | int
"""A mark's text, or its token id after `format_of`."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls are written as `opening` `begin` call `end` `closing`, with `separator` between two of
    them, or between several calls inside of one such pair if `is_list`. A call is `before` NAME
    `after` ARGUMENTS `tail`.
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


MARKS = ("opening", "closing", "quote", "thought", "thought_end")
"""The fields that are marks, where they are not empty."""
FUNCTION_GEMMA = CallFormat(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    "call:",
    "",
    "",
    quote="<escape>",
    stops=("<start_function_response>",),
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
GRANITE = CallFormat("granite", "<function_call>", begin=" ", separator="\n")
WRAPPER = CallFormat("json", begin="[", separator=", ", end="]", is_list=True)
"""For models without a format of their own, where a call is required: a JSON array of calls is the
whole output."""


def format_of(codec: TextCodec) -> CallFormat | None:
    """The format of a checkpoint, None for one that has none: all of its marks are in the
    vocabulary, or its opening in the template.
    """
    for known in (FUNCTION_GEMMA, GEMMA_4, GRANITE):
        ids: dict[str, Any] = {
            name: codec.token_id(mark) for name in MARKS if (mark := getattr(known, name))
        }
        if None not in ids.values():
            stops = map(codec.token_id, map(str, known.stops))
            return replace(known, stops=tuple(id for id in stops if id is not None), **ids)
    return (
        GRANITE
        if codec.is_bytes and str(GRANITE.opening) in (codec.files.chat_template or "")
        else None
    )


def opening_of(known: CallFormat, codec: TextCodec) -> Opening:
    """What the engine has to look for. Of an opening that is a text: the tokens that may end it,
    which are part of it or end in it.
    """
    if isinstance(known.opening, int):
        return Opening([known.opening])
    text = known.opening.encode()
    spelt = ((id, codec.raw_bytes(id)) for id in range(codec.largest_id + 1))
    return Opening(
        [id for id, token in spelt if token and (text.endswith(token) or token.endswith(text))],
        known.opening,
    )
