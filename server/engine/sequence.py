"""Sequence: tokens, and how many of them are computed. That is all the state there is; there are no phases.

Its tokens are the prompt, the output, and behind that the forced tokens: what a grammar leaves no choice about, and guesses that came
true. Those are computed like any others, and become output when the state before them has scored them. A token that a step in flight
draws counts as one of its tokens before anybody knows which it is, and what a step in flight computes counts as computed. Invariant:
0 <= num_computed < num_tokens while it is open, and its page table has a slot for every computed token.
"""

from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from cache.prefix import Block, Chain, Link
from cache.table import PageTable
from model.step import PENDING, Row, Sample, SampledToken, Sampling, Scoring
from server.engine.drafts import Drafter


class ConstraintFailed(Exception):
    """A grammar that cannot go on; the message is for the client."""


class Constraint(Protocol):
    """What may come next, after the output and the forced tokens."""

    mask: bytes | None
    """As model.step.Sample.mask."""
    forced: list[int]
    """Tokens that must come before the next choice; taken in already."""

    def advance(self, token: int) -> None:
        """Takes a drawn token, and gives `mask` and `forced` anew. Raises ConstraintFailed."""


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
    priority: int = 0
    num_top: int = 0
    score_prompt: bool = False
    constraint: Constraint | None = None
    salt: str = ""
    """Pages are shared among sequences of the same one only."""
    num_computed: int = 0
    num_unseen: int = 0
    """Tokens that steps in flight draw."""
    num_in_flight: int = 0
    """Rows of it in steps in flight."""
    started: bool = False
    """Whether it has ever been let in from the queue."""
    num_cached: int = 0
    """Prompt tokens whose pages were there when it was."""
    forced: list[int] = field(default_factory=list)
    claims: list[bytes] = field(default_factory=list)
    """Names of the blocks that it is about to compute and that others may wait for."""
    published: list[Block] = field(default_factory=list)
    """What it has put into the prefix cache."""
    found: list[Block] = field(default_factory=list)
    """What it found there when it was let in."""
    corrupt: bool = False
    """Whether its pages may hold numbers that are not finite, so that they have to be cleared."""
    drafter: Drafter | None = None
    """Guesses its next tokens; None where nobody does."""
    chain: Chain = field(init=False)
    num_scored: int = field(init=False)
    """Prompt tokens that need no score any more; the first never does, as nothing stands before it."""
    forbidden: tuple[int, ...] = field(init=False)
    key: tuple[int, int] = field(init=False)
    """Its place in the order of service: least first."""
    num_tokens: int = field(init=False)
    """Prompt, output so far and forced tokens, and those that are being drawn: kept, as a step asks for it several times."""
    most_tokens: int = field(init=False)
    """Tokens it can ever have."""
    _is_guided: bool = field(init=False)
    """Whether which tokens came before decides what may come, or how likely it is, by more than the model."""
    _sample: Sample | None = field(init=False, default=None)
    """The last one, for as long as nothing in it but the output's length changes."""

    def __post_init__(self) -> None:
        self.key = self.priority, self.id
        self.chain = Chain(self.salt)
        self.forbidden = tuple(sorted(self.stop_token_ids))
        self.num_scored = 1 if self.score_prompt else len(self.prompt)
        self._is_guided = self.constraint is not None or self.sampling.reads_output
        self.num_tokens = self.count_tokens()
        self.most_tokens = len(self.prompt) + self.max_new_tokens
        self._take_forced()

    def count_tokens(self) -> int:
        """What `num_tokens` has to be."""
        return len(self.prompt) + len(self.output) + len(self.forced) + self.num_unseen

    @property
    def needs_pending_token(self) -> bool:
        """Whether its next row cannot be planned before the token that is being drawn is known: it is the last, or what comes next takes
        more than computing it.
        """
        return self.num_unseen > 0 and (self.num_tokens >= self.most_tokens or self.is_serial)

    @property
    def is_serial(self) -> bool:
        """Whether what it draws next depends, by more than the model, on the token that it drew last."""
        return self.drafter is not None or self._is_guided

    @property
    def num_pending(self) -> int:
        """Tokens it has that are not computed yet: 1 in steady generation, more when it is new or was preempted."""
        return self.num_tokens - self.num_computed

    @property
    def num_skippable(self) -> int:
        """Tokens that it need not compute where others have: all but the last, for the draw behind it, and what is to be scored."""
        return 0 if self.num_scored < len(self.prompt) else len(self.prompt) + len(self.output) - 1

    def links(self, count: int, page_size: int) -> list[Link]:
        """The names of its first `count` pages of tokens, all of which it has."""
        links = self.chain.links
        for index in range(len(links), count):
            self.chain.extend(self._tokens(index * page_size, (index + 1) * page_size))
        return links[:count]

    def draft(self, most: int) -> list[int]:
        """Up to `most` guesses at its next tokens, each of which could be kept: none while its last token is not the only one to compute,
        or while what may be drawn changes from one token to the next for other reasons than the text.
        """
        if self.drafter is None or self.num_pending != 1 or self.num_scored < len(self.prompt) or self.constraint is not None:
            return []
        if len(self.output) < self.min_new_tokens:
            return []
        return self.drafter.draft(self.output, min(most, self.max_new_tokens - len(self.output) - 1))

    def row(self, count: int, drafts: list[int] | None = None) -> Row:
        """The row that computes its next `count` tokens, and draws one more if these are the last; then guesses may follow them."""
        start, end = self.num_computed, self.num_computed + count
        sample = None
        if end == self.num_tokens:
            history = self.output + self.forced if self.forced else self.output
            forbidden = self.forbidden if end - len(self.prompt) < self.min_new_tokens else ()
            mask = None if self.constraint is None else self.constraint.mask
            sample = self._sample
            if sample is None or sample.output is not history or sample.forbidden is not forbidden or sample.mask is not mask:
                sample = self._sample = Sample(self.sampling, self.prompt, history, forbidden, self.num_top, mask, self.num_unseen)
            elif sample.num_unseen != self.num_unseen:
                sample = self._sample = replace(sample, num_unseen=self.num_unseen)
        tokens = self._tokens(start, end)
        # What most rows have none of is not asked for.
        scoring = self._scoring(start, end) if self.forced or self.num_scored < len(self.prompt) else None
        return Row(self.id, tokens + drafts if drafts else tokens, start, self.table.pages, sample, scoring, len(drafts or ()))

    def on_launched(self, row: Row) -> None:
        """A step with this row of it is in flight."""
        self.num_computed += len(row.tokens) - row.drafts
        self.num_in_flight += 1
        if row.sample is not None:
            self.num_unseen += 1
            self.num_tokens += 1

    def on_committed(self, row: Row) -> None:
        """The step of the first row of it that was in flight is there; what it brought follows."""
        self.num_in_flight -= 1
        if row.sample is not None:
            self.num_unseen -= 1
            self.num_tokens -= 1

    def take_accepted(self, row: Row, accepted: list[int]) -> None:
        """Counts as computed those of a row's guesses that came true, which `append` takes one by one as it takes forced tokens."""
        if self.drafter is not None:
            self.drafter.record_outcome(len(self.output) + len(accepted) + 1, row.drafts, len(accepted))
            self._force(accepted)
        self.num_computed += len(accepted)

    def _tokens(self, start: int, end: int) -> list[int]:
        known = self.num_tokens - self.num_unseen
        if start >= known:
            return [PENDING] * (end - start)
        split = len(self.prompt)
        generated = self.output + self.forced if self.forced else self.output
        if end > known:
            generated = generated + [PENDING] * (end - known)
        if start >= split:
            return generated[start - split : end - split]
        return self.prompt[start:end] + generated[max(0, start - split) : max(0, end - split)]

    def _scoring(self, start: int, end: int) -> Scoring | None:
        """What the states of positions start .. end - 1 are to score: prompt tokens that still want it, and forced tokens."""
        unscored = self.num_scored if self.num_scored < len(self.prompt) else len(self.prompt) + len(self.output)
        first, last = max(unscored, start + 1), min(end, self.num_tokens - 1)
        if first > last:
            return None
        return Scoring(first - 1 - start, self._tokens(first, last + 1), self.num_top)

    def take_scored(self, scored: list[SampledToken]) -> tuple[list[SampledToken], list[SampledToken]]:
        """Splits what a step scored: prompt tokens, which are accounted for now, and forced tokens, which `append` takes one by one."""
        split = min(len(scored), len(self.prompt) - self.num_scored)
        self.num_scored += split
        return scored[:split], scored[split:]

    def append(self, token: int) -> str | None:
        """Takes a forced or a drawn token; the reason to finish, if it is the last. Raises ConstraintFailed."""
        was_forced = bool(self.forced)
        if was_forced:
            del self.forced[0]
        else:
            self.num_tokens += 1
        self.output.append(token)
        if token in self.stop_token_ids:
            return "eos_token"
        if len(self.output) >= self.max_new_tokens:
            return "length"
        if self.constraint is not None and not was_forced:
            self.constraint.advance(token)
            self._take_forced()
        return None

    def _take_forced(self) -> None:
        if self.constraint is not None:
            self._force(self.constraint.forced[: self.max_new_tokens - len(self.output)])

    def _force(self, tokens: list[int]) -> None:
        self.num_tokens += len(tokens) - len(self.forced)
        self.forced = tokens
