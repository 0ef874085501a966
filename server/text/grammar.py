"""What a client asks its output to look like, to a grammar that the engine can follow; checked here, under limits, before it gets there.

Invariant: a grammar that `compile` returns has been compiled and tried for some tokens with the engine's own limits, so it costs the engine
no more than that; what cannot be had is refused, and never served without its constraint. Compiling runs in a thread and drops the
interpreter's lock, so streams go on meanwhile. It knows nothing of dialects.
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
    """A constraint as it was asked for: a JSON schema, a regular expression, a Lark grammar, or a list of texts. `field` is its name."""

    kind: Kind
    value: Any
    field: str


class GrammarCompiler:
    """Sources to grammars for one tokenizer; the same source is compiled once, and one at a time: what floods this waits for itself.

    The tokenizer is read when this is made. Raises ConfigurationError.
    """

    def __init__(self, codec: TextCodec, timeout: float, open_objects: bool = False) -> None:
        self._timeout = timeout
        self._open_objects = open_objects
        self._thread = ThreadPoolExecutor(1)
        self._checks: dict[str, asyncio.Future[str | None]] = {}
        """Grammar -> what is wrong with it; the oldest first."""
        try:
            self._tokenizer = guidance.read_tokenizer(codec.path, list(codec.end_token_ids))
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    async def compile(self, source: Source) -> str:
        """A grammar as protocol.Submit carries it. Raises InvalidRequest that names the field."""
        try:
            grammar = _grammar(source, self._open_objects)
        except ValueError as error:
            raise InvalidRequest(f"`{source.field}` {error}", param=source.field) from None
        check = self._checks.get(grammar)
        if check is None or (check.done() and check.exception() is not None):  # An exception was no verdict on the grammar.
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
        """What is wrong with a grammar, for the client; None where it works. Several texts are tried, each as the engine would follow it:
        of the allowed tokens the lowest id each time, the highest, and one by chance, from fixed seeds.
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
    """A constraint as llguidance reads it, within the bound on its size. Raises ValueError with the message for the client."""
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
        # Free whitespace invites models to write nothing else; \u would spell a declared key in a way that is not compared with it.
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'})
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if source.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))
    if "::=" in text:
        raise ValueError(f"has ::= as in GBNF at character {text.index('::=')}; it must be a Lark grammar")
    return LLMatcher.grammar_from_lark(text)


def _client_message(error: str) -> str:
    """llguidance's message holds parts of the grammar and of its own state; of those only the names of keywords leave this process."""
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
