"""DraftModel: a smaller model of the same vocabulary drafts tokens (speculative decoding, Leviathan
et al. 2023, arXiv 2211.17192).

It draws with a request's settings and the random numbers with which the model draws at the same
place (model.sampling), so that both draw the same token wherever they agree, at any temperature.
Whether this pays depends on hardware, models and texts, and so is measured as it runs.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.table import PageTable
from model.step import Outcome, Row, Sample, SampledToken, SampleError, StepPlan, StepResult
from server.engine.drafts import DraftLength, divide
from server.engine.sequence import Sequence

log = logging.getLogger("onehead.engine")

TRIAL_STEPS = 16
"""Steps by which the way of computing that is not in use is measured."""
LEAST_STEPS = 128
"""Steps from one such trial to the next."""
MOST_LOSS = 0.01
"""The share of the time that trials may cost: after an expensive one the next one waits."""
LEAST_GAIN = 1.02
"""How much faster steps with drafts must be to be used."""
FEW_TOKENS = 32
"""A sequence that lacks more than so many is caught up with, and not merely gone on with."""
MOST_LACKING = 8
"""Tokens to catch up with for each one that may still be drawn; more would never pay."""
MOST_COUNTED = 2**16
"""Tokens in a running mean; beyond them what it holds is halved, so that it follows changes."""
Rows = list[tuple[Sequence, Row]]
"""Rows of a step, each with its sequence."""


class Runner(Protocol):
    """Computes a draft model's steps."""

    def run(self, plan: StepPlan) -> StepResult:
        """Draws a token for each row that has a sample. Raises MemoryError."""


class Pace:
    """Decides whether steps of one batch size have drafts, by the time that a token takes with
    drafts and without. After every so many steps some are computed the other way, a trial.
    """

    def __init__(self) -> None:
        self.drafting = False
        """Whether the next step has drafts."""
        self._used = False
        """Whether steps outside of trials have drafts."""
        self._left = TRIAL_STEPS
        self._seconds = self._catching_up = self._step_seconds = 0.0
        self._num_tokens = 0
        self._seconds_per_token: dict[bool, float] = {}

    def record(self, seconds: float, catching_up: float, num_tokens: int, extra: float) -> None:
        """Records a step of `num_tokens` new tokens: its seconds, without the `catching_up` seconds
        in which the draft model computed tokens of prompts and outputs that it had not seen.
        `extra`: the average of the latter for each token of an output.
        """
        is_trial = self.drafting is not self._used
        if is_trial and catching_up:  # It had no drafts for some sequence, or few.
            self._catching_up += catching_up
            return
        if not is_trial and self._left == TRIAL_STEPS:
            self._restart()  # Only the steps next to a trial are compared with it.
        self._seconds += seconds
        self._num_tokens += num_tokens
        self._left -= 1
        if self._left > 0:
            return
        found = self._seconds_per_token
        found[self.drafting] = self._seconds / max(1, self._num_tokens)
        if is_trial:
            self._decide(found[True], found[False], extra)
        else:
            self._step_seconds = self._seconds / TRIAL_STEPS
            self.drafting, self._left = not self._used, TRIAL_STEPS
        self._restart()

    def _decide(self, with_drafts: float, without: float, extra: float) -> None:
        """After a trial, by the seconds that a token takes."""
        self._used = (with_drafts + extra) * LEAST_GAIN < without
        lost = self._seconds - self._num_tokens * (with_drafts if self._used else without)
        if not self._used:
            lost += self._catching_up
        self.drafting = self._used
        self._left = max(LEAST_STEPS, int(lost / (MOST_LOSS * max(1e-9, self._step_seconds))))

    def _restart(self) -> None:
        self._seconds = self._catching_up = 0.0
        self._num_tokens = 0


class Text(DraftLength):
    """What a model with pages of its own has computed of a sequence."""

    def __init__(self, table: PageTable) -> None:
        super().__init__()
        self.table = table
        self.num_computed = 0
        """Tokens of the sequence."""
        self.drafted: list[int] = []
        """Draft tokens computed after these, of which some may have become the sequence's."""

    def start(self, sequence: Sequence) -> int:
        """The first position that is to be computed: its last token at the latest."""
        known = sequence.tokens(self.num_computed, sequence.num_tokens - 1)
        for drafted, token in zip(self.drafted, known, strict=False):
            if drafted != token:
                break
            self.num_computed += 1
        self.drafted = []
        return self.num_computed


class DraftModel:
    """Drafts for all sequences of an engine together, by a model that draws from the same
    vocabulary. `runner` computes sequences of at most `most_tokens`.
    """

    def __init__(
        self,
        runner: Runner,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._most_tokens, self._clock = runner, most_tokens, clock
        self._paces: dict[tuple[int, int], Pace] = {}
        """By the number of sequences that can have drafts, and what others leave of a step."""
        self._before: tuple[list[int], int, float] = [], 0, 0.0
        """Of the last step: the ids of its sequences, all their tokens, and when it began."""
        self._catching_up = 0.0
        """Seconds of the last step."""
        self._caught_up = 0.0, 1.0
        """Seconds that catching up took, and with how many tokens."""
        self._ended = 0.0, 0.0
        """Tokens of the prompts and of the outputs of sequences that have ended."""
        self._clear: list[int] = []
        """Pages that the next step clears."""

    def begin(self, sequence: Sequence) -> DraftLength:
        """As in server.engine.drafts.Drafts."""
        return DraftLength()

    def end(self, sequence: Sequence) -> None:
        """As in server.engine.drafts.Drafts."""
        self._ended = _added(self._ended, len(sequence.prompt), len(sequence.output))

    def draft(self, wanted: Mapping[Sequence, int], budget: int) -> dict[int, list[int]]:
        """As in server.engine.drafts.Drafts; none while that does not pay, and for sequences for
        which there are no pages, or too many tokens to compute first.
        """
        if not wanted:
            self._before = [], 0, 0.0
            return {}
        if not self._pays(wanted, budget):
            return {}
        shares = divide(budget, self._lengths(wanted))
        lengths = {id: length for id, length in shares.items() if length}
        chosen = [sequence for sequence in wanted if sequence.id in lengths]
        return self._run(self._first_rows(chosen, lengths), lengths)

    def _lengths(self, wanted: Mapping[Sequence, int]) -> dict[int, int]:
        """How many tokens are to be drafted for each sequence, where any are."""
        lengths = {}
        for sequence, most in wanted.items():
            assert sequence.drafter is not None, "only sequences that are drafted for"
            length = sequence.drafter.length(len(sequence.output), most)
            if (length := min(length, self._most_tokens - sequence.num_tokens)) > 0:
                lengths[sequence.id] = length
        return lengths

    def _first_rows(self, sequences: list[Sequence], lengths: dict[int, int]) -> Rows:
        """Rows that draw the first tokens of drafts, or come nearer to that."""
        raise NotImplementedError

    def _next_row(self, sequence: Sequence, row: Row, draft: list[int]) -> Row:
        """Computes the last of these draft tokens, and draws one more."""
        raise NotImplementedError

    def _run(self, rows: Rows, lengths: dict[int, int]) -> dict[int, list[int]]:
        """Draws tokens after these rows until each draft has its length, or ends its sequence."""
        drafts: dict[int, list[int]] = {}
        num_behind = sum(len(row.tokens) for _, row in rows if len(row.tokens) > FEW_TOKENS)
        began = self._clock()
        while rows:
            following = []
            for (sequence, row), token in zip(rows, self._drawn(rows), strict=True):
                if isinstance(token, SampledToken):
                    draft = drafts.setdefault(sequence.id, [])
                    draft.append(token.token)
                    if (
                        len(draft) < lengths[sequence.id]
                        and token.token not in sequence.stop_token_ids
                    ):
                        following.append((sequence, self._next_row(sequence, row, draft)))
                elif isinstance(token, SampleError):
                    drafts.pop(sequence.id, None)
                    self._give_up(sequence)
            rows = following
            if num_behind:
                self._catching_up = self._clock() - began
                self._caught_up = _added(self._caught_up, self._catching_up, num_behind)
                num_behind = 0
        return drafts

    def _drawn(self, rows: Rows) -> tuple[Outcome | None, ...]:
        plan = StepPlan(tuple(row for _, row in rows), tuple(self._clear))
        self._clear = []
        try:
            return self._runner.run(plan).drawn
        except MemoryError:
            self._clear = [*plan.clear]
            return (SampleError("out of memory"),) * len(rows)

    def _give_up(self, sequence: Sequence) -> None:
        """Drafts no more for this sequence."""
        log.warning("no more tokens are drafted for sequence %d", sequence.id)
        self.end(sequence)
        sequence.drafter = None

    def _pays(self, wanted: Mapping[Sequence, int], budget: int) -> bool:
        """Measures the last step, and says whether this one is to have drafts."""
        pace = self._paces.setdefault((len(wanted), budget), Pace())
        ids = [sequence.id for sequence in wanted]
        num_tokens, now = sum(sequence.num_tokens for sequence in wanted), self._clock()
        ids_before, tokens_before, began = self._before
        if ids == ids_before:
            prompts, outputs = self._ended
            if not outputs:  # As many as are allowed.
                prompts = sum(len(sequence.prompt) for sequence in wanted)
                outputs = sum(sequence.most_tokens for sequence in wanted) - prompts
            extra = self._caught_up[0] / self._caught_up[1] * prompts / outputs
            seconds = now - began - self._catching_up
            pace.record(seconds, self._catching_up, num_tokens - tokens_before, extra)
        self._before, self._catching_up = (ids, num_tokens, now), 0.0
        return pace.drafting


def _added(mean: tuple[float, float], total: float, number: int) -> tuple[float, float]:
    """Adds to a running mean, kept as total and count; what is older fades."""
    share = 0.5 if mean[1] > MOST_COUNTED else 1.0
    return share * mean[0] + total, share * mean[1] + number


class SeparateModel(DraftModel):
    """Any model, with pages of its own. What it has not computed of a sequence yet it computes
    first, a step of at most `step_tokens` tokens at a time.
    """

    def __init__(
        self,
        runner: Runner,
        layout: CacheLayout,
        num_pages: int,
        step_tokens: int,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(runner, most_tokens, clock)
        self._layout, self._step_tokens = layout, step_tokens
        self._allocator = PageAllocator(num_pages)

    def begin(self, sequence: Sequence) -> Text:
        return Text(PageTable(self._allocator, self._layout))

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        if isinstance(text := sequence.drafter, Text):
            text.table.release()
            text.num_computed, text.drafted = 0, []

    def _give_up(self, sequence: Sequence) -> None:
        # What is not a number would spread from there to who gets these pages.
        self._clear += cast(Text, sequence.drafter).table.owned
        super()._give_up(sequence)

    def _first_rows(self, sequences: list[Sequence], lengths: dict[int, int]) -> Rows:
        left, rows = self._step_tokens, []
        for sequence in sequences:
            row = self._first_row(sequence, lengths[sequence.id], left)
            if row is not None:
                rows.append((sequence, row))
                left -= len(row.tokens)
        return rows

    def _first_row(self, sequence: Sequence, length: int, most: int) -> Row | None:
        """Computes what is missing of a sequence, and draws if that is no more than `most` tokens.
        None where there is no room for it, where it would not pay, or where there are no pages for
        it and a draft of so many tokens.
        """
        text = cast(Text, sequence.drafter)
        start, num_tokens = text.start(sequence), sequence.num_tokens
        end = min(num_tokens, start + most)
        total = end + length - 1 if end == num_tokens else end
        text.table.trim(start)
        text.table.drop(start)
        is_dear = num_tokens - start > MOST_LACKING * (sequence.most_tokens - num_tokens)
        missing = text.table.missing(total)
        if end == start or is_dear or missing > self._allocator.num_available:
            return None
        text.table.grow(total)
        text.num_computed = end
        return Row(
            sequence.id,
            sequence.tokens(start, end),
            start,
            text.table.pages,
            _sample_after(sequence, []) if end == num_tokens else None,
        )

    def _next_row(self, sequence: Sequence, row: Row, draft: list[int]) -> Row:
        start = row.start + len(row.tokens)
        cast(Text, sequence.drafter).drafted.append(draft[-1])
        return Row(sequence.id, draft[-1:], start, row.pages, _sample_after(sequence, draft))


class AssistantModel(DraftModel):
    """A model that reads the pages and states of the one it drafts for
    (model.runner.assistant). `states`: those of each sequence.
    """

    def __init__(self, runner: Runner, states: dict[int, Any], most_tokens: int) -> None:
        super().__init__(runner, most_tokens)
        self._states = states

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._states.pop(sequence.id, None)

    def _first_rows(self, sequences: list[Sequence], lengths: dict[int, int]) -> Rows:
        return [
            (
                sequence,
                Row(
                    sequence.id,
                    [sequence.last_token],
                    sequence.num_tokens - 1,
                    sequence.table.pages,
                    _sample_after(sequence, []),
                ),
            )
            for sequence in sequences
            if sequence.id in self._states
        ]

    def _next_row(self, sequence: Sequence, row: Row, draft: list[int]) -> Row:
        # At the same position: it has no keys of its own draws.
        return Row(sequence.id, draft[-1:], row.start, row.pages, _sample_after(sequence, draft))


def _sample_after(sequence: Sequence, draft: list[int]) -> Sample:
    """How the sequence draws its next token if these are its last ones."""
    output = [*sequence.output, *draft]
    return Sample(sequence.sampling, sequence.prompt, output)
