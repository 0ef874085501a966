"""Tool calls of one checkpoint: what each request with tools needs, all of it from the checkpoint's
format. It knows no dialects, and compiles nothing: grammars are compiled by a job from their rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from server.protocol import Opening
from server.text.calls.formats import WRAPPER, format_of, opening_of
from server.text.calls.parser import Calls, ReplyParser, ends_in_thought
from server.text.calls.rules import CallRules
from server.text.codec import TextCodec
from server.text.conversation import names_tools


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan of a request for its calls and thoughts. `parser`: makes the parser of one reply;
    None where all of the output is text.
    """

    parser: Callable[[], ReplyParser] | None
    rules: str = ""
    """The source of the grammar (of the kind `calls`); empty: the output is free."""
    opening: Opening | None = None
    """Begins the part of the output that the grammar is of; None: all of it is."""
    stops: tuple[int, ...] = ()
    """Stop tokens of the request."""
    ignored: tuple[str, ...] = ()
    """Parts of the body that are not followed."""


class ToolCalls:
    """The tool calls of one checkpoint, which may have no format of its own for them."""

    def __init__(self, codec: TextCodec) -> None:
        self.form = format_of(codec)
        """The format in which this model writes calls; None if it has none."""
        self._opening = None if self.form is None else opening_of(self.form, codec)
        self._is_described = names_tools(codec.files.chat_template or "")

    def plan(
        self,
        prompt: Sequence[int],
        calls: Calls,
        functions: list[tuple[str, dict[str, Any]]],
        parallel: bool,
        text: tuple[str, str] | None,
        stops: tuple[int, ...],
    ) -> CallPlan:
        """The plan of a request that may (`auto`) or has to (`required`) call `functions`. `text`:
        the constraint on an output without calls. `stops`: its stop tokens.
        """
        form, is_open = self.form or WRAPPER, calls == "auto"
        if self.form is None and is_open:
            return CallPlan(None, stops=stops, ignored=() if self._is_described else ("tools",))
        mode: Calls = "first" if is_open and text else calls
        parser = partial(ReplyParser, form, mode, ends_in_thought(form, prompt))
        if calls == "none":
            return CallPlan(parser if form.thought else None, stops=stops)
        rules = CallRules(form, functions, parallel, mode == "auto", text if is_open else None)
        written = msgspec.json.encode(rules).decode()
        ends = tuple(stop for stop in form.stops if isinstance(stop, int))
        # As stop strings do, those of the request end no output that is calls alone.
        stops = (*stops, *ends) if is_open else ends
        return CallPlan(parser, written, self._opening if mode == "auto" else None, stops)
