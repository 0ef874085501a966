"""Constraints on the next token, as bit masks over the vocabulary.

A constraint comes from a grammar (structured output, calls of tools), which may begin after an
opening, or from token healing: prompt text that was cut off and must be generated again. llguidance
does the parsing. Invariant: a mask, and whether a limit is exceeded, depend on the grammar and the
output alone. Each grammar has already been compiled under the same limits (server.text.grammar).
"""

import re
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

from server import guidance, protocol
from server.errors import TOO_COMPLEX, ConstraintFailed


class Grammars:
    """Makes the constraints of one tokenizer. `before_mask` is called before each mask is
    computed.
    """

    def __init__(
        self, tokenizer: LLTokenizer, before_mask: Callable[[], object] = lambda: None
    ) -> None:
        self.tokenizer = tokenizer
        self._before_mask = before_mask

    def constraint(
        self, asked: protocol.Begin | protocol.Submit
    ) -> "GrammarConstraint | HealingConstraint | None":
        """The constraint of a grammar, or of token healing if there is none, advanced over the
        output so far; None before the grammar's opening. Raises ConstraintFailed.
        """
        self._before_mask()
        if asked.grammar:
            start = 0 if asked.opening is None else self._end_of(asked.opening, asked.output)
            return (
                None
                if start is None
                else GrammarConstraint(
                    self._matcher(asked.grammar), asked.output[start:], self._before_mask
                )
            )
        matcher = self._matcher(LLMatcher.grammar_from_regex(f"(?s:{re.escape(asked.healed)}.*)"))
        return HealingConstraint(self.tokenizer, matcher, asked.healed, asked.output)

    def _end_of(self, opening: protocol.Opening, output: list[int]) -> int | None:
        """The number of tokens up to the first opening; None without one."""
        text = opening.text.encode()
        for end in (index + 1 for index, token in enumerate(output) if token in opening.tokens):
            # No token is shorter than a byte.
            if self.tokenizer.decode_bytes(output[max(0, end - len(text)) : end]).endswith(text):
                return end
        return None

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = guidance.new_matcher(self.tokenizer, grammar)
        _check(matcher)
        return matcher


class GrammarConstraint:
    """The whole output must match a grammar."""

    def __init__(
        self, matcher: LLMatcher, output: list[int], before_mask: Callable[[], object]
    ) -> None:
        self._matcher = matcher
        self._before_mask = before_mask
        self.mask: bytes | None = None
        self.forced: list[int] = []
        self._consume([])
        # Computing a mask uses up the lexer's limits. A replay computes the same masks again, so
        # that a limit is exceeded at the same token as without the replay.
        position = 0
        while position + len(self.forced) < len(output):
            position += len(self.forced) + 1
            self.advance(output[position - 1])
        del self.forced[: len(output) - position]

    def advance(self, token: int) -> None:
        """Updates `mask` and `forced` after a sampled token. Raises ConstraintFailed."""
        self._consume([token])

    def _consume(self, tokens: list[int]) -> None:
        self._before_mask()
        self._matcher.consume_tokens(tokens)
        self.forced = self._matcher.compute_ff_tokens()
        self._matcher.consume_tokens(self.forced)
        self.mask = self._matcher.compute_bitmask()
        _check(self._matcher)


class HealingConstraint:
    """The output must begin with the text that was cut off the prompt, in any tokens; after that it
    is free and the mask is None.
    """

    def __init__(
        self, tokenizer: LLTokenizer, matcher: LLMatcher, text: str, output: list[int]
    ) -> None:
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
        raise ConstraintFailed(TOO_COMPLEX)
