"""Limits: the resources of a scheduler. It knows no sequences."""

from dataclasses import dataclass

from cache.layout import CacheLayout


class NeverFits(Exception):
    """A sequence may need more tokens than the context or the whole KV cache holds, so it could not
    run even alone.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of a scheduler. `step_tokens`, the token budget of a step, is at least
    `max_running`.
    """

    num_pages: int
    layout: CacheLayout
    max_context: int
    max_running: int
    step_tokens: int
    is_whole: bool = False
    """Whether all tokens of a sequence are computed in one step, and none is reused."""

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence can have."""
        return self.layout.most_tokens(self.num_pages, self.step_tokens, self.max_context)
