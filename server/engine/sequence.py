"""Sequence: tokens, and how many of them are computed. That is all the state there is; there are no phases.

Invariant: 0 <= num_computed < num_tokens while it is open, and its page table has a slot for every computed token.
"""

from dataclasses import dataclass, field

from cache.table import PageTable
from model.step import Row, Sample, Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of one request, from its submission to its end."""

    id: int
    prompt: list[int]
    output: list[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    table: PageTable
    num_computed: int = 0
    started: bool = False
    """Whether it has ever been let in from the queue."""
    forbidden: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.forbidden = tuple(sorted(self.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        """Tokens it has that are not computed yet: 1 in steady generation, more when it is new or was preempted."""
        return self.num_tokens - self.num_computed

    @property
    def most_tokens(self) -> int:
        """Tokens it can ever have."""
        return len(self.prompt) + self.max_new_tokens

    def row(self, count: int) -> Row:
        """The row that computes its next `count` tokens, and draws one more if these are the last."""
        start, end = self.num_computed, self.num_computed + count
        split = len(self.prompt)
        tokens = self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]
        sample = None
        if end == self.num_tokens:
            forbidden = self.forbidden if len(self.output) < self.min_new_tokens else ()
            sample = Sample(self.sampling, self.prompt, self.output, forbidden)
        return Row(self.id, tokens, start, self.table.pages, sample)

    def append(self, token: int) -> str | None:
        """Takes a drawn token; the reason to finish, if it is the last."""
        self.output.append(token)
        if token in self.stop_token_ids:
            return "eos_token"
        return "length" if len(self.output) >= self.max_new_tokens else None
