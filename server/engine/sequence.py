"""Sequence: tokens, and how many of them are computed. There are no phases: this is all the state
of a request in the engine.

Its tokens are the prompt, the output and `forced`: tokens that are known before they become output,
because a grammar leaves no choice about them or because they are accepted draft tokens. A grammar's
forced tokens become output once a step has computed their log-probabilities; accepted draft tokens
have theirs, and become output at once. A token that a step in flight samples counts as a token
before its value is known, and tokens that a step in flight computes count as computed. Invariant: 0
<= num_computed < num_tokens while the sequence is open, and its page table has a slot for every
computed token.
"""

from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from cache.prefix import Block, Link, add_link
from cache.table import PageTable
from model.draw_words import History, history_for
from model.step import PENDING, Row, Sample, SampledToken, SampleError, Sampling, Scoring
from server.engine.account import Account
from server.engine.drafts import DraftLength
from server.errors import ConstraintFailed
from server.protocol import Guidance

SCORED_TOKEN_COST = 2
"""Tokens of a step's budget that a prompt token takes whose log-probability is asked for: its
logits are computed as well, which made a step of 512 of them up to half as long again."""


class Constraint(Protocol):
    """Limits what may be sampled. It is followed while its sequence runs; what it answers may take
    any time and is taken by `take`.
    """

    @property
    def is_pending(self) -> bool:
        """Whether the answer to the last `begin` or `advance` is not there yet."""

    def begin(self, output: list[int]) -> bool:
        """Follows this output, a list that grows with the sequence's. Returns whether there will be
        an answer to take.
        """

    def advance(self, token: int) -> bool:
        """Follows a sampled token, which is the last of the output. Returns whether there will be
        an answer to take: a grammar that has yet to begin gives none for most tokens.
        """

    def take(self) -> Guidance:
        """The answer, once it is there. Raises ConstraintFailed."""

    def end(self) -> None:
        """Stops; `begin` may follow."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request, from submission until it finishes, fails or is cancelled."""

    id: int
    prompt: list[int]
    output: list[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    table: PageTable
    priority: int = 0
    """Orders the waiting sequences of its client; the lowest is served first."""
    num_top: int = 0
    score_prompt: bool = False
    constraint: Constraint | None = None
    salt: str = ""
    """The caller and the client's `cache_salt`. Only sequences with the same salt share pages."""
    request: str = ""
    """The request's id, for those who watch."""
    rank: int = 0
    """Orders it against those of all clients, before their shares."""
    account: Account = field(default_factory=Account)
    payer: Account | None = None
    """The client for whose sequence it was last preempted, which is charged for what is computed
    again; None if it never was."""
    num_paid: int = 0
    """Tokens that were computed when it was last preempted."""
    num_preemptions: int = 0
    preempted_at: int = -1
    """Length of the output when it was last preempted."""
    num_computed: int = 0
    num_recorded: int = 0
    """Tokens that were given to the ledger."""
    has_loaded: bool = False
    """Whether its prefix has been looked for on the disk."""
    num_unseen: int = 0
    """Tokens that steps in flight sample."""
    num_in_flight: int = 0
    """Number of steps in flight that have a row of this sequence."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    forced: list[int] = field(default_factory=list)
    """Known tokens that are not output yet: those that a grammar forces, and accepted draft
    tokens."""
    claims: list[bytes] = field(default_factory=list)
    """Hashes of the blocks that it is about to compute, for which other sequences wait."""
    published: list[Block] = field(default_factory=list)
    """Blocks that it added to the prefix cache."""
    found: list[Block] = field(default_factory=list)
    """Blocks that it reused from the prefix cache when it was admitted."""
    corrupt: bool = False
    """Whether its pages may hold non-finite values and must be zeroed before reuse."""
    mask: bytes | None = None
    awaits_mask: bool = False
    """Whether its constraint is computing what may be sampled next."""
    drafter: DraftLength | None = None
    """How many tokens are drafted for it, and what they are drafted from; None if none are, as
    under a constraint."""
    line: int = -1
    """Its line among the sequences that decode (server.engine.decoding); -1 while it is not one of
    them."""
    draw: int = -1
    """Index of its last draw among the draws of the step that it was planned in as a Row."""
    num_scored: int = field(init=False)
    """Prompt tokens that are scored or need no score; the first never needs one."""
    key: tuple[int, int] = field(init=False)
    """Order in the running set: the last one is preempted if pages are missing."""
    num_tokens: int = field(init=False)
    """Tokens of the prompt, the output, `forced` and `num_unseen`: cached, as every step reads it
    several times."""
    most_tokens: int = field(init=False)
    """The most tokens it can have."""
    _is_guided: bool = field(init=False)
    """Whether sampling depends on earlier tokens beyond the model: a constraint, penalties or bad
    words."""
    _history: History | None = field(init=False)
    _links: list[Link] = field(init=False, default_factory=list)
    """As many as have been asked for."""
    _sample: Sample | None = field(init=False, default=None)
    """The last Sample, reused while only the length of the output changes."""

    def __post_init__(self) -> None:
        self.key = self.rank, self.id
        self.num_scored = 1 if self.score_prompt else len(self.prompt)
        self._is_guided = self.constraint is not None or self.sampling.reads_output
        self._history = history_for(self.sampling, self.prompt, self.output)
        self.num_tokens = len(self.prompt) + len(self.output)
        self.most_tokens = len(self.prompt) + self.max_new_tokens

    @property
    def needs_pending_token(self) -> bool:
        """Whether its next row can be planned only once the token being sampled is known, as that
        token is the last or the sequence is serial; or once the mask is known with which the next
        token is sampled.
        """
        if self.awaits_mask and not self.num_plannable:
            return True
        return self.num_unseen > 0 and (self.num_tokens >= self.most_tokens or self.is_serial)

    @property
    def is_serial(self) -> bool:
        """Whether planning its next row needs the value of its last token: for drafts, a constraint
        or penalties.
        """
        return self.drafter is not None or self._is_guided

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not computed yet: 1 during generation, more when the sequence is new or
        was preempted.
        """
        return self.num_tokens - self.num_computed

    @property
    def can_decode(self) -> bool:
        """Whether its next row computes one token and draws the next one by the model and its
        settings alone, as do all rows after it.
        """
        return (
            self.num_tokens - self.num_computed == 1
            and len(self.prompt) + self.min_new_tokens <= self.num_tokens < self.most_tokens
            and self.num_scored == len(self.prompt)
            and not self.forced
            and self.drafter is None
            and not self._is_guided
        )

    @property
    def last_token(self) -> int:
        """Its last token, where that is known and no forced one."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def num_plannable(self) -> int:
        """Tokens that a step may compute: those that are pending, but not the last, which sampling
        needs, while a mask is awaited.
        """
        return self.num_tokens - self.num_computed - self.awaits_mask

    @property
    def token_cost(self) -> int:
        """Tokens of a step's budget that computing one of its tokens takes."""
        return SCORED_TOKEN_COST if self.num_scored < len(self.prompt) else 1

    def affordable(self, budget: int) -> int:
        """How many of its tokens a token budget allows, at least one."""
        return max(1, budget // self.token_cost)

    @property
    def num_skippable(self) -> int:
        """Tokens that may come from the prefix cache: all but the last, which sampling needs; none
        while the prompt is to be scored.
        """
        return 0 if self.num_scored < len(self.prompt) else len(self.prompt) + len(self.output) - 1

    def links(self, count: int, page_size: int) -> list[Link]:
        """The block hashes of its first `count` pages, all of whose tokens it has."""
        for index in range(len(self._links), count):
            tokens = self.tokens(index * page_size, (index + 1) * page_size)
            add_link(self._links, self.salt, tokens)
        return self._links[:count]

    @property
    def most_drafts(self) -> int:
        """Draft tokens that could all be accepted. None unless its last token is the only one to
        compute, nor while prompt scores or `min_new_tokens` affect sampling.
        """
        if (
            self.drafter is None
            or self.num_uncomputed != 1
            or self.num_scored < len(self.prompt)
            or len(self.output) < self.min_new_tokens
        ):
            return 0
        return self.max_new_tokens - len(self.output) - 1

    def row(self, count: int, drafts: list[int] | None = None) -> Row:
        """The row that computes its next `count` tokens and samples one more if these are the last;
        draft tokens may follow them.
        """
        start, end = self.num_computed, self.num_computed + count
        sample = None
        if end == self.num_tokens:
            history = self.output + self.forced if self.forced else self.output
            mask, sample = self.mask, self._sample
            # A grammar decides where the output ends.
            forbidden = (
                self.stop_token_ids
                if mask is None and end - len(self.prompt) < self.min_new_tokens
                else ()
            )
            if (
                sample is None
                or sample.output is not history
                or sample.forbidden is not forbidden
                or sample.mask is not mask
            ):
                sample = self._sample = Sample(
                    self.sampling,
                    self.prompt,
                    history,
                    forbidden,
                    self.num_top,
                    mask,
                    self.num_unseen,
                    None if self.forced else self._history,
                )
            elif sample.num_unseen != self.num_unseen:
                sample = self._sample = replace(sample, num_unseen=self.num_unseen)
        tokens = self.tokens(start, end)
        # Skips the call for most rows, which have nothing to score.
        scoring = (
            self._scoring(start, end) if self.forced or self.num_scored < len(self.prompt) else None
        )
        return Row(
            self.id,
            tokens + drafts if drafts else tokens,
            start,
            self.table.pages,
            sample,
            scoring,
            len(drafts or ()),
        )

    def on_launched(self, num_computed: int, draws: bool) -> None:
        """Accounts for a row that has been launched: it computes so many of the sequence's tokens,
        and may draw the next one.
        """
        self.num_computed += num_computed
        self.num_in_flight += 1
        if draws:
            self.num_unseen += 1
            self.num_tokens += 1

    def on_committed(self, draws: bool) -> None:
        """Accounts for its oldest row in flight, whose step has finished; its tokens are appended
        afterwards.
        """
        self.num_in_flight -= 1
        if draws:
            self.num_unseen -= 1
            self.num_tokens -= 1

    def take_accepted(self, row: Row, accepted: list[int]) -> None:
        """Accounts for the accepted draft tokens of a row: they are computed, and `append` takes
        them one by one as forced tokens.
        """
        assert self.drafter is not None, "only a drafter makes draft tokens"
        self.drafter.record_outcome(len(self.output) + len(accepted) + 1, row.drafts, len(accepted))
        self._force(accepted)
        self.num_computed += len(accepted)

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens at positions `start` .. `end` - 1; PENDING for those not sampled yet."""
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
        """The tokens whose log-probabilities a step over positions start .. end - 1 returns:
        unscored prompt tokens and `forced`.
        """
        unscored = (
            self.num_scored
            if self.num_scored < len(self.prompt)
            else len(self.prompt) + len(self.output)
        )
        first, last = max(unscored, start + 1), min(end, self.num_tokens - 1)
        if first > last:
            return None
        return Scoring(first - 1 - start, self.tokens(first, last + 1), self.num_top)

    def take_scored(
        self, scored: list[SampledToken]
    ) -> tuple[list[SampledToken], list[SampledToken]]:
        """Splits the scores of a step into those of prompt tokens and those of forced tokens, which
        `append` takes one by one.
        """
        split = min(len(scored), len(self.prompt) - self.num_scored)
        self.num_scored += split
        return scored[:split], scored[split:]

    def append(self, token: int) -> str | None:
        """Appends a forced or sampled token and returns the finish reason if it is the last."""
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
            self.awaits_mask = self.constraint.advance(token)
        return None

    def begin_constraint(self) -> None:
        """Has its constraint followed, from now until `end_constraint`."""
        if self.constraint is not None:
            self.awaits_mask = self.constraint.begin(self.output)

    def end_constraint(self) -> None:
        """Stops following its constraint, which forgets the tokens that it forced."""
        if self.constraint is not None:
            self.constraint.end()
            self.awaits_mask = False
            self._force([])

    def take_mask(self) -> SampleError | None:
        """Takes what its constraint has answered. Returns why it cannot continue, if that is the
        answer.
        """
        assert self.constraint is not None, "only a constraint makes masks"
        try:
            guidance = self.constraint.take()
        except ConstraintFailed as error:
            if error.refused:
                return SampleError(str(error), refused=True)
            return SampleError(str(error), code="grammar_error")
        self.mask, self.awaits_mask = guidance.mask, False
        self._force(guidance.forced[: self.max_new_tokens - len(self.output)])
        if guidance.mask is None:
            self.constraint.end()
            if guidance.is_open:
                self.constraint, self._is_guided = None, self.sampling.reads_output
        return None

    def _force(self, tokens: list[int]) -> None:
        self.num_tokens += len(tokens) - len(self.forced)
        self.forced = tokens
