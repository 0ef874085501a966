"""Speculative decoding: how many tokens to draft for a sequence, and what every way of drafting has
in common (server.engine.ngrams, server.engine.draft_model).

A decode step is bound by reading the weights, so verifying a few draft tokens costs little more
than computing one token. The model still samples at every position, so a wrong draft wastes time
but never changes the output. The draft length adapts to how many tokens were accepted. It knows
nothing of models, pages or steps.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.engine.sequence import Sequence

MAX_SPECULATIVE_STEP = 16
"""Most tokens in a step with drafts: larger steps are bound by arithmetic, where draft tokens are
not free."""
MAX_DRAFT = 12
"""Most tokens in a draft: the last tokens of a long draft are rarely accepted."""
INITIAL_DRAFT = 1
"""Tokens in a first draft: cheap where it is wrong; accepted drafts double it."""
MAX_BACKOFF = 8
"""After a draft of which no token was accepted, no draft is made for 2 ** backoff - 1 tokens: at
most 255."""
BACKOFF_RECOVERY = 2
"""Decrease of the backoff when any token of a draft is accepted; it grows by 1 when none is."""


class DraftLength:
    """How many tokens to draft for one sequence, by the outcomes of its drafts so far."""

    def __init__(self, backoff: int = 0) -> None:
        self._length = INITIAL_DRAFT
        self._backoff = backoff
        self._paused_until = 0

    def length(self, num_output: int, most: int) -> int:
        """Tokens to draft after an output of so many tokens: at most `most`, none during a
        backoff.
        """
        return 0 if num_output < self._paused_until else min(most, self._length)

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


class Drafts(Protocol):
    """Drafts the next tokens of all sequences of an engine."""

    def begin(self, sequence: "Sequence") -> DraftLength:
        """For a new sequence: its `drafter`."""

    def draft(self, wanted: "Mapping[Sequence, int]", budget: int) -> dict[int, list[int]]:
        """Draft tokens, by the ids of sequences: for each at most so many, and for all of them at
        most `budget`. All tokens of each are known, and all but the last are computed. Called for
        every step, with nothing wanted where it is not to have drafts.
        """

    def end(self, sequence: "Sequence") -> None:
        """For any sequence that ends, or is preempted and may be drafted for again later."""


def divide(budget: int, wishes: Mapping[int, int]) -> dict[int, int]:
    """Divides a token budget: each id gets its wish, or an equal part if that is less; the smallest
    wishes get the remainder.
    """
    shares: dict[int, int] = {}
    for id in sorted(wishes, key=lambda id: wishes[id]):
        shares[id] = min(wishes[id], -(-budget // (len(wishes) - len(shares))))
        budget -= shares[id]
    return shares
