"""Calls of tools that are drawn at random under the grammar of their schemas, and checked."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.guidance import new_matcher
from server.text.calls.formats import WRAPPER, CallFormat, format_of
from server.text.calls.parser import Calls, ReplyParser, ends_in_thought
from server.text.calls.rules import CallRules, Compiled
from server.text.codec import Detokenizer, TextCodec
from server.text.service import Source
from tests.support.inline_workers import Compiler
from tests.support.tool_schemas import fault, followed

MODES = ("auto", "required", "named")
MOST_TOKENS = 500


def parsed(
    codec: TextCodec, form: CallFormat, calls: Calls, tokens: list[int], prompt: Iterable[int] = ()
) -> tuple[str, str, Any]:
    """What the parser makes of an output: text, thought and calls."""
    parser = ReplyParser(form, calls, ends_in_thought(form, [*prompt]))
    detokenizer = Detokenizer(codec)
    text, thought, found = "", "", dict[int, list[str]]()
    for index, token in enumerate(tokens):
        special, is_last = token in codec.special_ids, index == len(tokens) - 1
        new = "" if special else detokenizer.push(token)
        new += detokenizer.flush() if is_last else ""
        piece = parser.push(token, new, special, is_last)
        text, thought = text + piece.text, thought + piece.thought
        for delta in piece.calls:
            found.setdefault(delta.index, [delta.name or "", ""])[1] += delta.arguments
    return text, thought, [(name, json.loads(arguments)) for name, arguments in found.values()]


def drawn(
    compiler: Compiler, grammar: str, ends: Iterable[int], rng: random.Random, most: int = 400
) -> list[int] | None:
    """Random tokens under a grammar, where what closes something is likelier; None where they do
    not end.
    """
    matcher, output, ends = new_matcher(compiler.tokenizer, grammar), list[int](), {*ends}
    closing = {*compiler.tokenizer.tokenize_str('"}]'), *range(12)}
    while len(output) < most:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert mask and not matcher.is_error(), matcher.get_error()
        allowed = [id for id in range(mask.bit_length()) if mask >> id & 1]
        likelier = [id for id in allowed if id in closing]
        output.append(rng.choice(likelier if likelier and rng.random() < 0.4 else allowed))
        if output[-1] in ends:
            return output
        assert matcher.consume_token(output[-1])
    return None


@dataclass
class Found:
    """Counts of what was drawn, what was wrong, and what was relaxed of each schema."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    relaxed: dict[str, list[str]] = field(default_factory=dict)


class Draws:
    """Draws calls in the format of one checkpoint."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.form = format_of(codec) or WRAPPER
        self.compiler = Compiler(codec)
        stops = (stop for stop in self.form.stops if isinstance(stop, int))
        self._ends = (*codec.end_token_ids, *stops)
        self.found = Found()

    async def compile(self, rules: CallRules) -> Compiled:
        written = msgspec.json.encode(rules).decode()
        return await self.compiler.compiled(Source("calls", written, "tools"))

    async def check(self, name: str, schema: Any, mode: str, seed: int) -> None:
        """Draws calls of a function of this schema beside another one, and notes what is wrong."""
        found, counts, place = self.found, self.found.counts, f"{name} ({mode})"
        functions = [(name, schema)]
        if mode != "named":
            functions.append(("other", {"type": "object", "properties": {}}))
        rules = CallRules(self.form, functions, mode != "named", mode == "auto")
        counts["requests"] += 1
        try:
            compiled = await self.compile(rules)
        except Exception as error:
            found.wrong.append(f"{place}: refused: {error}"[:400])
            return
        if compiled.relaxed:
            found.relaxed[name] = compiled.relaxed
        try:
            output = drawn(
                self.compiler, compiled.grammar, self._ends, random.Random(seed), MOST_TOKENS
            )
            if output is None:
                counts["cut"] += 1
                return
            text, _, calls = parsed(self.codec, self.form, "required", output)
        except (AssertionError, ValueError) as error:
            found.wrong.append(f"{place}: {type(error).__name__} {error}"[:400])
            return
        counts["drawn"] += 1
        counts["calls"] += len(calls)
        if text or not calls or (mode == "named" and len(calls) != 1):
            found.wrong.append(f"{place}: {len(calls)} calls and the text {text!r}"[:400])
        places = [item.removeprefix(name) for item in compiled.relaxed]
        rest = followed(schema, places)
        for called, arguments in calls:
            if called == name and (why := fault(arguments, rest)):
                found.wrong.append(f"{place}: {arguments}: {why}"[:600])
