"""What a client asks its output to look like, to a grammar that the engine can follow; checked here, under limits, before it gets there.

Invariant: a grammar that `compile` returns has been compiled and tried for some tokens with the engine's own limits, so it costs the engine
no more than that; what cannot be had is refused, and never served without its constraint. Compiling runs in a thread and drops the
interpreter's lock, so streams go on meanwhile. It knows nothing of dialects.
"""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from server.errors import InvalidRequest
from server.protocol import GRAMMAR_LIMITS
from server.text import TextCodec

MAX_SOURCE_CHARS = 2**16
MAX_NESTING = 64
TRIED_TOKENS = 8
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
    """Sources to grammars for one tokenizer; the same source is compiled once, and one at a time: what floods this waits for itself."""

    def __init__(self, codec: TextCodec, vocab_size: int, end_token_ids: tuple[int, ...], timeout: float) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._timeout = timeout
        self._tokenizer: Any = None
        self._thread = ThreadPoolExecutor(1)
        self._checks: dict[str, asyncio.Future[str | None]] = {}
        """Grammar -> what is wrong with it; the oldest first."""

    async def compile(self, source: Source) -> str:
        """A grammar as protocol.Submit carries it. Raises InvalidRequest that names the field."""
        grammar = _grammar(source, _source_text(source))
        loop = asyncio.get_running_loop()
        if self._tokenizer is None:
            await loop.run_in_executor(self._thread, self._read_tokenizer)
        check = self._checks.get(grammar)
        if check is None or (check.done() and check.exception() is not None):  # An exception was no verdict on the grammar.
            if len(self._checks) >= CACHED:
                del self._checks[next(iter(self._checks))]
            check = self._checks[grammar] = loop.run_in_executor(self._thread, self._check, grammar)
        try:
            problem = await asyncio.wait_for(asyncio.shield(check), self._timeout)
        except TimeoutError:
            problem = f"could not be compiled within {self._timeout:g} s; simplify it, or try again when the server is less busy"
        if problem is not None:
            raise InvalidRequest(f"`{source.field}` {problem}", param=source.field)
        return grammar

    def _read_tokenizer(self) -> None:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            ends = list(self._end_token_ids) or None
            self._tokenizer = LLTokenizer(self._codec.tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=ends)

    def _check(self, grammar: str) -> str | None:
        """What is wrong with a grammar, for the client; None where it works."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return _in_our_words(matcher.get_error())
        for _ in range(TRIED_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not allowed:
                return "is too complex to be followed, or nothing satisfies it"
            longest = allowed.bit_length() - 1
            if longest in self._end_token_ids or matcher.is_stopped():
                break
            matcher.consume_token(longest)
            matcher.consume_tokens(matcher.compute_ff_tokens())
        return "is too complex to be followed" if matcher.is_error() else None


def _source_text(source: Source) -> str:
    """The constraint as one text, within the bounds on its size."""
    value = source.value
    if source.kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"`{source.field}` is a text that is not JSON", param=source.field) from None
    if source.kind == "json":
        if not isinstance(value, dict):
            raise InvalidRequest(f"`{source.field}` must be a JSON schema, which is an object", param=source.field)
        if "x-guidance" in value:
            raise InvalidRequest(f"`{source.field}`: the key x-guidance is not supported", param=source.field)
        if "properties" in value and "type" not in value:
            value = {"type": "object"} | value  # As TGI's own example leaves it out.
        if _nesting(value) > MAX_NESTING:
            raise InvalidRequest(f"`{source.field}` is nested deeper than {MAX_NESTING}", param=source.field)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_SOURCE_CHARS:
        raise InvalidRequest(f"`{source.field}` is longer than {MAX_SOURCE_CHARS} characters. Given: {len(text)}", param=source.field)
    return text


def _nesting(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING:
        depth += 1
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level = inner
    return depth


def _grammar(source: Source, text: str) -> str:
    from llguidance import LLMatcher

    if source.kind == "json":
        # Free whitespace invites models to write nothing else.
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if source.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))
    return LLMatcher.grammar_from_lark(text)


def _in_our_words(error: str) -> str:
    """llguidance's message holds parts of the grammar and of its own state; of those only the names of keywords leave this process."""
    unsupported = _UNSUPPORTED.search(error)
    if unsupported:
        return f"uses JSON schema keywords that are not supported: {unsupported[1].replace(chr(34), '')}"
    if "too big" in error or "too many" in error or "too complex" in error or "limit" in error:
        return "is too large or too complex"
    if "regex" in error:
        return "is not a regular expression that can be followed; look-around and back-references are not supported"
    if "retrieving it failed" in error:
        return "refers to a schema elsewhere; nothing is fetched, so give it whole"
    if "nsatisfiable" in error:
        return "cannot be satisfied by anything"
    return "cannot be compiled"
