"""Drafter: n-gram speculative decoding (prompt lookup, Saxena 2023). It drafts a sequence's next
tokens from the sequence's own text.

A decode step is bound by reading the weights, so verifying a few draft tokens costs little more
than computing one token. Where the last tokens occurred before, the tokens that followed them there
are the draft. The model still samples at every position, so a wrong draft wastes time but never
changes the output. The draft length adapts to how many tokens were accepted. It knows nothing of
models, pages or steps.
"""

from collections.abc import Mapping, Sequence

MAX_SPECULATIVE_STEP = 16
"""Most tokens in a step with drafts: larger steps are bound by arithmetic, where draft tokens are
not free."""
MAX_DRAFT = 12
"""Most tokens in a draft: the last tokens of a long draft are rarely accepted."""
INITIAL_DRAFT = 1
"""Tokens in a first draft: cheap where the text does not repeat; accepted drafts double it."""
ORDERS = (3, 2)
"""n of the n-grams looked up, longest first; the last only while recent drafts have been
accepted."""
INITIAL_BACKOFF, MAX_BACKOFF = 3, 8
"""After a draft of which no token was accepted, no draft is made for 2 ** backoff - 1 tokens: 15 at
first, at most 255. Text without repetition then wastes 2 % of its rows; an initial backoff of 4
would cost greedy code a tenth of its accepted tokens.
"""
BACKOFF_RECOVERY = 2
"""Decrease of the backoff when any token of a draft is accepted; it grows by 1 when none is."""


class Drafter:
    """The drafter of one sequence. Each `output` passed to `draft` extends the one before."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._num_prompt = len(self._tokens)
        self._continuations: dict[tuple[int, ...], int] = {}
        """n-gram -> the position after its last occurrence."""
        self._num_indexed = 0
        self._length = INITIAL_DRAFT
        self._backoff = INITIAL_BACKOFF
        self._paused_until = 0

    def draft(self, output: Sequence[int], most: int) -> list[int]:
        """Up to `most` draft tokens that may follow prompt and output; none without a repetition,
        or during a backoff.
        """
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

    def record_outcome(self, num_output: int, num_drafted: int, num_accepted: int) -> None:
        """Adapts draft length and backoff to the outcome of a draft; the output now has
        `num_output` tokens.
        """
        if num_accepted == num_drafted:
            self._length = max(self._length, min(MAX_DRAFT, 2 * num_drafted))
        else:
            self._length = num_accepted + 1
        if num_accepted:
            self._backoff = max(0, self._backoff - BACKOFF_RECOVERY)
        else:
            self._backoff = min(MAX_BACKOFF, self._backoff + 1)
            self._paused_until = num_output + 2**self._backoff - 1


def divide(budget: int, wishes: Mapping[int, int]) -> dict[int, int]:
    """Divides a token budget: each id gets its wish, or an equal part if that is less; the smallest
    wishes get the remainder.
    """
    shares: dict[int, int] = {}
    for id in sorted(wishes, key=lambda id: wishes[id]):
        shares[id] = min(wishes[id], -(-budget // (len(wishes) - len(shares))))
        budget -= shares[id]
    return shares
