"""Compiles the constraints of structured output to llguidance grammars, and checks them before they reach the engine.

Invariant: a returned grammar has been compiled, and tried for some tokens, under the engine's own limits; a constraint that cannot be
honoured is refused, never ignored. Compilation runs in a thread and releases the GIL, so that streams continue. It knows no dialects.
"""

import asyncio
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

from server import guidance
from server.errors import ConfigurationError, InvalidRequest
from server.text import json_schema
from server.text.codec import TextCodec

MAX_SOURCE_CHARS = 2**16
TRIED_PATHS = 4
TRIED_TOKENS = 16
CACHED = 256
_UNSUPPORTED = re.compile(r'Unimplemented keys: \[((?:"[A-Za-z$-]{1,40}"(?:, )?)+)\]')

Kind = Literal["json", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True)
class Source:
    """A constraint of a request: a JSON schema, a regular expression, a Lark grammar, or a list of texts. `field`: its name in errors."""

    kind: Kind
    value: Any
    field: str


class GrammarCompiler:
    """Compiles and checks grammars for one tokenizer. Results are cached, and a single thread compiles, so that many expensive grammars
    delay only one another.

    The constructor reads the tokenizer. Raises ConfigurationError.
    """

    def __init__(self, codec: TextCodec, timeout: float, open_objects: bool = False) -> None:
        self._timeout = timeout
        self._open_objects = open_objects
        self._thread = ThreadPoolExecutor(1)
        self._checks: dict[str, asyncio.Future[str | None]] = {}
        """Grammar -> its check, whose result is the problem or None; oldest first."""
        try:
            self._tokenizer = guidance.read_tokenizer(codec.path, list(codec.end_token_ids))
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    async def compile(self, source: Source) -> str:
        """The grammar for protocol.Submit. Raises InvalidRequest that names the field."""
        try:
            grammar = _grammar(source, self._open_objects)
        except ValueError as error:
            raise InvalidRequest(f"`{source.field}` {error}", param=source.field) from None
        check = self._checks.get(grammar)
        # An exception of a check says nothing about the grammar, which is then checked again.
        if check is None or (check.done() and check.exception() is not None):
            if len(self._checks) >= CACHED:
                del self._checks[next(iter(self._checks))]
            check = self._checks[grammar] = asyncio.get_running_loop().run_in_executor(self._thread, self._check, grammar)
        try:
            problem = await asyncio.wait_for(asyncio.shield(check), self._timeout)
        except TimeoutError:
            problem = f"could not be compiled within {self._timeout:g} s; simplify it, or try again when the server is less busy"
        if problem is not None:
            raise InvalidRequest(f"`{source.field}` {problem}", param=source.field)
        return grammar

    def _check(self, grammar: str) -> str | None:
        """The problem of a grammar, worded for the client; None if it works. Generates several texts as the engine would: one of the lowest
        allowed token ids, one of the highest, and others of random ones with fixed seeds.
        """
        for path in range(TRIED_PATHS):
            matcher = guidance.new_matcher(self._tokenizer, grammar)
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
                if token in self._tokenizer.eos_tokens or matcher.is_stopped():
                    break
                matcher.consume_token(token)
        return None


def _grammar(source: Source, open_objects: bool) -> str:
    """The llguidance grammar of a constraint. Raises ValueError with a message for the client."""
    try:
        text = source.value if isinstance(source.value, str) else json.dumps(source.value)
        if len(text) > MAX_SOURCE_CHARS:
            raise ValueError(f"is longer than {MAX_SOURCE_CHARS} characters. Given: {len(text)}")
        if source.kind == "json":
            text = json.dumps(json_schema.prepare(json_schema.parse(text), open_objects), allow_nan=False)
    except json.JSONDecodeError:
        raise ValueError("is a text that is not JSON") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if source.kind == "json":
        # With flexible whitespace models may write whitespace without end; a key with \u escapes would not be compared with declared ones.
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'})
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if source.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))
    if "::=" in text:
        raise ValueError(f"has ::= as in GBNF at character {text.index('::=')}; it must be a Lark grammar")
    return LLMatcher.grammar_from_lark(text)


def _client_message(error: str) -> str:
    """The message for the client about an error of llguidance, whose own text may hold parts of the grammar and internal state."""
    unsupported = _UNSUPPORTED.search(error)
    if unsupported:
        return f"uses JSON schema keywords that are not supported: {unsupported[1].replace(chr(34), '')}"
    if "too big" in error or "too many" in error or "too complex" in error or "limit" in error:
        return "is too large or too complex"
    if "min/maxProperties" in error:
        return "uses minProperties or maxProperties where some properties are optional; require them all, or leave the bound out"
    if "regex" in error:
        return "is not a regular expression that can be followed; look-around and back-references are not supported"
    if "nsatisfiable" in error:
        return "cannot be satisfied by anything"
    return "cannot be compiled"
