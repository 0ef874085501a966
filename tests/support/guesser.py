"""A drafter that asks the simulated model itself and is sometimes wrong, so that drafts are
accepted even in short histories.
"""

import random
from collections.abc import Callable

from server.engine.ngrams import Drafter

RIGHT = 0.7
"""Fraction of its draft tokens that are right."""


class Guesser(Drafter):
    """`give` computes the next token. It has no backoff and does not adapt."""

    def __init__(self, prompt: list[int], give: Callable[[list[int]], int]) -> None:
        self._prompt = prompt
        self._give = give
        self._random = random.Random(len(prompt)).random

    def draft(self, output: list[int], most: int) -> list[int]:  # type: ignore[override]
        tokens = [*self._prompt, *output]
        known = len(tokens)
        while len(tokens) < known + most and self._random() > 0.2:
            token = self._give(tokens)
            tokens.append(token if self._random() < RIGHT else token ^ 1)
        return tokens[known:]

    def record_outcome(self, num_output: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted and num_drafted
