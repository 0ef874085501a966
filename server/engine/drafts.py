"""Drafter: guesses a sequence's next tokens from its own text, to be checked together in one step (prompt lookup, Saxena 2023).

A step that reads all weights for one token computes a few more at nearly the same cost. Where the last tokens stood before, what followed
them then is guessed to follow again; the model draws at every place as ever, so a guess can be wasted and can never change an outcome.
How much is guessed follows what became of earlier guesses. It knows no model, page or step.
"""

from collections.abc import Mapping, Sequence

MAX_SPECULATIVE_STEP = 16
"""Tokens of a step that has drafts: in larger ones arithmetic costs more than reading the weights, and another row is not free."""
MAX_DRAFT = 12
"""Tokens of a draft: the longer, the less likely its end, and one sequence alone nearly fills MAX_SPECULATIVE_STEP."""
INITIAL_DRAFT = 1
"""Tokens of a sequence's first draft: it costs the least where nothing repeats, and whole lines are copied soon enough by doubling."""
ORDERS = (3, 2)
"""Tokens that must have stood together before, the more telling first; two are enough only where guesses have come true of late."""
INITIAL_BACKOFF, MAX_BACKOFF = 3, 8
"""A draft that fails whole is followed by a rest of 2 ** doubt - 1 tokens, at first 15, at most 255: two rows in a hundred are wasted on
what repeats nothing. With one more to begin with, greedy code gets a tenth fewer of its tokens from drafts.
"""
BACKOFF_RECOVERY = 2
"""Doubt that goes when anything of a draft comes true, against 1 that comes when nothing does: one guess in three is worth its rows."""


class Drafter:
    """One sequence's. `prompt` and every `output` that it is asked with are the same text, which only grows."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._num_prompt = len(self._tokens)
        self._continuations: dict[tuple[int, ...], int] = {}
        """What stood together -> where it went on last."""
        self._num_indexed = 0
        self._length = INITIAL_DRAFT
        self._backoff = INITIAL_BACKOFF
        self._paused_until = 0

    def draft(self, output: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow prompt and output; none where nothing recurs, or while it rests."""
        most = min(most, self._length)
        if most < 1 or len(output) < self._paused_until:
            return []
        self._tokens += output[len(self._tokens) - self._num_prompt :]
        self._index()
        for order in ORDERS if self._backoff < INITIAL_BACKOFF else ORDERS[:1]:
            place = self._continuations.get(tuple(self._tokens[-order:]))
            if place is not None:
                return self._copy(place, most)
        return []

    def _index(self) -> None:
        """Takes in what has come since; the last tokens' own place is not known yet, as nothing follows them."""
        tokens = self._tokens
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for order in ORDERS:
                if end >= order:
                    self._continuations[tuple(tokens[end - order : end])] = end
        self._num_indexed = len(tokens)

    def _copy(self, place: int, count: int) -> list[int]:
        """What follows from a place on; behind the text's end, its own beginning: what has a period goes on with it."""
        draft = self._tokens[place : place + count]
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def record_outcome(self, num_output: int, num_drafted: int, num_accepted: int) -> None:
        """Learns from a draft, behind an output that is now `num_output` long, how much to guess next and when."""
        if num_accepted == num_drafted:
            self._length = max(self._length, min(MAX_DRAFT, 2 * num_drafted))
        else:
            self._length = num_accepted + 1
        if num_accepted:
            self._backoff = max(0, self._backoff - BACKOFF_RECOVERY)
        else:
            self._backoff = min(MAX_BACKOFF, self._backoff + 1)
            self._paused_until = num_output + 2**self._backoff - 1


def divide(room: int, wishes: Mapping[int, int]) -> dict[int, int]:
    """Who gets how much of `room`: what was wished for, or an equal part where that is less; earlier ones have what does not divide."""
    shares: dict[int, int] = {}
    for id in sorted(wishes, key=lambda id: wishes[id]):
        shares[id] = min(wishes[id], -(-room // (len(wishes) - len(shares))))
        room -= shares[id]
    return shares
