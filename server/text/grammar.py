"""Compiles the constraints of structured output to llguidance grammars, and checks them before they
reach the engine.

Invariant: a returned grammar has been compiled, and tried for some tokens, under the engine's own
limits; a constraint that cannot be honoured is refused, never ignored. What a compilation costs has
no bound of its own: it runs in a worker process (server.text.worker_process). It knows no dialects.
"""

import json
import random

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from msgspec.structs import replace

from server import guidance
from server.text import json_schema
from server.text.calls.arguments import Unsatisfiable
from server.text.calls.rules import CallRules, Compiled

TRIED_PATHS = 4
TRIED_TOKENS = 16


class GrammarCompiler:
    """Compiles and checks grammars for one tokenizer; refuses them where there is none."""

    def __init__(self, tokenizer: LLTokenizer | None) -> None:
        self.tokenizer = tokenizer

    def compile(self, kind: str, source: str) -> Compiled:
        """The grammar for protocol.Submit. Raises ValueError with a message for the client."""
        if self.tokenizer is None:
            raise ValueError(
                "is not supported: this model's tokenizer cannot be used for structured output"
            )
        if kind == "calls":
            return self._calls(msgspec.json.decode(source, type=CallRules), self.tokenizer)
        grammar = _grammar(kind, source)
        problem = _check(grammar, self.tokenizer)
        if problem is not None:
            raise ValueError(problem)
        return Compiled(grammar)

    def _calls(self, rules: CallRules, tokenizer: LLTokenizer) -> Compiled:
        """The grammar of calls. A function whose schema cannot be followed at all takes any
        object.
        """
        compiled, problem = _tried(rules, tokenizer)
        if problem is None:
            return compiled
        functions, refused = [], []
        for name, schema in rules.functions:
            if _tried(replace(rules, functions=[(name, schema)], text=None), tokenizer)[1]:
                schema = {"type": "object"}
                refused.append(name)
            functions.append((name, schema))
        compiled, remaining = _tried(replace(rules, functions=functions), tokenizer)
        if not refused or remaining is not None:
            raise ValueError(problem)
        return replace(compiled, relaxed=compiled.relaxed + refused)


def _tried(rules: CallRules, tokenizer: LLTokenizer) -> tuple[Compiled, str | None]:
    """The grammar of calls, and its problem as `_check` words it."""
    relaxed: list[str] = []
    try:
        grammar = LLMatcher.grammar_from_lark(rules.lark(relaxed))
    except (Unsatisfiable, RecursionError):
        return Compiled(""), "cannot be satisfied by anything, or is nested too deeply"
    if rules.text:
        text = _grammar(*rules.text)
        named = json.loads(text)["grammars"][0] if text[0] == "{" else {"lark_grammar": text}
        calls = {"lark_grammar": grammar}
        grammar = json.dumps({"grammars": [calls, named | {"name": "text"}]})
    return Compiled(grammar, [*dict.fromkeys(relaxed)]), _check(grammar, tokenizer)


def _grammar(kind: str, text: str) -> str:
    """The llguidance grammar of a constraint. Raises ValueError with a message for the client."""
    if kind == "json":
        try:
            text = json.dumps(json_schema.prepare(json_schema.parse(text)), allow_nan=False)
        except json.JSONDecodeError:
            raise ValueError("is a text that is not JSON") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return LLMatcher.grammar_from_json_schema(text, overrides=json_schema.GUIDANCE)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(map(json.dumps, json.loads(text)))
        )
    if "::=" in text:  # GBNF's, unless it stands in a text of Lark's.
        try:
            text = any_to_lark(text)
        except Exception as error:
            raise ValueError(f"is neither Lark nor GBNF: {str(error)[:120]}") from None
    return LLMatcher.grammar_from_lark(text)


def _check(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """The problem of a grammar, worded for the client; None if it works. Generates several texts as
    the engine would: one of the lowest allowed token ids, one of the highest, and others of random
    ones with fixed seeds.
    """
    for path in range(TRIED_PATHS):
        matcher = guidance.new_matcher(tokenizer, grammar)
        if matcher.is_error():
            return _client_message(matcher.get_error())
        rng = random.Random(path)
        for _ in range(TRIED_TOKENS):
            matcher.consume_tokens(matcher.compute_ff_tokens())
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not allowed:
                return "is too complex to be followed, or nothing satisfies it"
            highest = allowed.bit_length() - 1
            start = rng.randint(0, highest) if path > 1 else path * highest
            rest = allowed >> start
            token = start + (rest & -rest).bit_length() - 1
            if token in tokenizer.eos_tokens or matcher.is_stopped():
                break
            matcher.consume_token(token)
    return None


def _client_message(error: str) -> str:
    """The message for the client about an error of llguidance, whose own text may hold parts of the
    grammar and internal state.
    """
    if "too big" in error or "too many" in error or "too complex" in error or "limit" in error:
        return "is too large or too complex"
    if "regex" in error:
        return (
            "is not a regular expression that can be followed; look-around and back-references "
            "are not supported"
        )
    if "nsatisfiable" in error:
        return "cannot be satisfied by anything"
    return f"cannot be compiled: {ascii(' '.join(error.split())[:120])[1:-1]}"
