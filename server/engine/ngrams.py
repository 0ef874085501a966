"""Drafts by n-grams (prompt lookup, Saxena 2023): where the last tokens of a sequence occurred
before, the tokens that followed them there are the draft. It knows nothing of models, pages or
steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from server.engine.drafts import DraftLength, divide

if TYPE_CHECKING:
    from server.engine import sequence as engine

ORDERS = (3, 2)
"""n of the n-grams looked up, longest first; the last only while recent drafts have been
accepted."""
INITIAL_BACKOFF = 3
"""After a first draft that was wrong none is made for 15 tokens. Text without repetition then
wastes 2 % of its rows; an initial backoff of 4 would cost greedy code a tenth of its accepted
tokens."""


class Drafter(DraftLength):
    """Drafts tokens of one sequence. Each `output` passed to `draft` extends the one before."""

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(INITIAL_BACKOFF)
        self._tokens = list(prompt)
        self._num_prompt = len(self._tokens)
        self._continuations: dict[tuple[int, ...], int] = {}
        """n-gram -> the position after its last occurrence."""
        self._num_indexed = 0

    def draft(self, output: Sequence[int], most: int) -> list[int]:
        """Up to `most` draft tokens that may follow prompt and output; none without a repetition,
        or during a backoff.
        """
        most = self.length(len(output), most)
        if most < 1:
            return []
        self._tokens += output[len(self._tokens) - self._num_prompt :]
        self._index()
        for order in ORDERS if self._backoff < INITIAL_BACKOFF else ORDERS[:1]:
            place = self._continuations.get(tuple(self._tokens[-order:]))
            if place is not None:
                return self._copy(place, most)
        return []

    def _index(self) -> None:
        """Adds the n-grams of new tokens, except those at the end of the text, which nothing
        follows yet.
        """
        tokens = self._tokens
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for order in ORDERS:
                if end >= order:
                    self._continuations[tuple(tokens[end - order : end])] = end
        self._num_indexed = len(tokens)

    def _copy(self, place: int, count: int) -> list[int]:
        """`count` tokens from position `place` on; past the end of the text the copied tokens
        repeat.
        """
        draft = self._tokens[place : place + count]
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft


class NGrams:
    """Drafts for every sequence by a drafter of its own."""

    def __init__(
        self, begin: "Callable[[engine.Sequence], Drafter]" = lambda s: Drafter(s.prompt)
    ) -> None:
        self.begin = begin

    def draft(self, wanted: "Mapping[engine.Sequence, int]", budget: int) -> dict[int, list[int]]:
        """As in server.engine.drafts.Drafts."""
        drafts = {
            sequence.id: cast(Drafter, sequence.drafter).draft(sequence.output, most)
            for sequence, most in wanted.items()
        }
        shares = divide(budget, {id: len(draft) for id, draft in drafts.items() if draft})
        return {id: drafts[id][:count] for id, count in shares.items()}

    def end(self, sequence: "engine.Sequence") -> None:
        """Nothing is kept but by the sequence."""
