"""Grammars: what a grammar, or the seam of a healed prompt, allows next; token by token, as bit masks over the vocabulary.

llguidance does the parsing. Invariant: a mask, and whether a limit is reached, depend on the grammar and the output alone.
It knows nothing of how a grammar was asked for: server.text.grammar has checked it under the same limits.
"""

from functools import cached_property
from pathlib import Path
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from model.spec import CheckpointError
from server import guidance
from server.engine.sequence import Constraint, ConstraintFailed


class Asked(Protocol):
    """The part of protocol.Submit that this module reads."""

    @property
    def grammar(self) -> str: ...
    @property
    def healed(self) -> str: ...
    @property
    def output(self) -> list[int]: ...


class Grammars:
    """The grammars of one model's tokenizer. `ends`: what ends a text that satisfies a grammar."""

    def __init__(self, path: Path, ends: list[int]) -> None:
        self._path = path
        self._ends = ends

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Raises CheckpointError."""
        try:
            return guidance.read_tokenizer(self._path, self._ends)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def constraint(self, asked: Asked) -> Constraint | None:
        """The constraint of a submission, after the output it comes with; None where it has none. Raises ConstraintFailed."""
        if asked.grammar:
            return GrammarConstraint(self._matcher(asked.grammar), asked.output)
        if not asked.healed:
            return None
        matcher = self._matcher(LLMatcher.grammar_from_regex(f"(?s:{_literal(asked.healed)}.*)"))
        return HealingConstraint(self.tokenizer, matcher, asked.healed, asked.output)

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = guidance.new_matcher(self.tokenizer, grammar)
        _check(matcher)
        return matcher


class GrammarConstraint:
    """A grammar to be satisfied from the first token of the output to its last."""

    def __init__(self, matcher: LLMatcher, output: list[int]) -> None:
        self._matcher = matcher
        self.mask: bytes | None = None
        self.forced: list[int] = []
        self._consume([])
        # Masks fill the lexer's tables, which have limits. A replayed sequence computes those that it computed before, or it would have
        # more left than at the same token without the replay.
        position = 0
        while position + len(self.forced) < len(output):
            position += len(self.forced) + 1
            self.advance(output[position - 1])
        del self.forced[: len(output) - position]

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
