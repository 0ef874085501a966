"""Grammars: what a grammar, or the seam of a healed prompt, allows next; token by token, as bit masks over the vocabulary.

llguidance does the parsing. A matcher is a pure function of grammar and tokens so far, so a replayed sequence goes on where it was.
It knows nothing of requests or of how a grammar was asked for: server.grammar has checked it under the same limits.
"""

from pathlib import Path
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from model.spec import CheckpointError
from server.engine.sequence import Constraint, ConstraintFailed
from server.protocol import GRAMMAR_LIMITS

CACHED = 32
"""Compiled grammars kept: requests of one kind come in numbers."""


class Asked(Protocol):
    """The part of protocol.Submit that this module reads."""

    @property
    def grammar(self) -> str: ...
    @property
    def end_token_ids(self) -> list[int]: ...
    @property
    def healed(self) -> str: ...
    @property
    def output(self) -> list[int]: ...


class Grammars:
    """The grammars of one model's tokenizer, which is read when the first is asked for."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: dict[str, LLMatcher] = {}

    def prepare(self, ends: tuple[int, ...]) -> None:
        """Reads the tokenizer now: of a large one that takes seconds, which no step should. Raises CheckpointError."""
        try:
            self._tokenizer(ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the library's is no Exception.
            raise CheckpointError(f"{self._path}: not a tokenizer whose tokens can be constrained ({type(error).__name__})") from None

    def constraint(self, asked: Asked) -> Constraint | None:
        """What a submission asks for, behind the output it comes with; None for most. Raises ConstraintFailed."""
        if not asked.grammar and not asked.healed:
            return None
        tokenizer = self._tokenizer(tuple(asked.end_token_ids))
        if asked.grammar:
            return GrammarConstraint(self._matcher(tokenizer, asked.grammar), asked.output)
        matcher = self._matcher(tokenizer, LLMatcher.grammar_from_regex(f"(?s:{_literal(asked.healed)}.*)"))
        return HealingConstraint(tokenizer, matcher, asked.healed, asked.output)

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        if ends not in self._tokenizers:
            text = self._path.read_text(encoding="utf-8")
            self._tokenizers[ends] = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(ends) or None)
        return self._tokenizers[ends]

    def _matcher(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)  # type: ignore[arg-type]
            compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            _check(compiled)
        self._compiled[grammar] = compiled  # Behind the others: the first in the dict is the longest unused.
        if len(self._compiled) > CACHED:
            del self._compiled[next(iter(self._compiled))]
        return compiled.deep_copy()


class GrammarConstraint:
    """A grammar to be satisfied from the first token of the output to its last."""

    def __init__(self, matcher: LLMatcher, output: list[int]) -> None:
        self._matcher = matcher
        self.mask: bytes | None = None
        self.forced: list[int] = []
        self._consume(output)

    def advance(self, token: int) -> None:
        self._consume([token])

    def _consume(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens)
        self.forced = self._matcher.compute_ff_tokens()
        self._matcher.consume_tokens(self.forced)
        self.mask = self._matcher.compute_bitmask()
        _check(self._matcher)


class HealingConstraint:
    """The text that was cut off the end of a prompt, to be written again, in whatever tokens; then anything."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, text: str, output: list[int]) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._missing = len(text.encode())
        self.mask: bytes | None = None
        self.forced: list[int] = []
        self._consume(output)

    def advance(self, token: int) -> None:
        if self._missing > 0:
            self._consume([token])

    def _consume(self, tokens: list[int]) -> None:
        self._missing -= len(self._tokenizer.decode_bytes(tokens))
        self.mask = None
        if self._missing > 0:
            self._matcher.consume_tokens(tokens)
            self.mask = self._matcher.compute_bitmask()
            _check(self._matcher)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ConstraintFailed("its grammar became too complex to be followed further")


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)
