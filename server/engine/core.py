"""EngineCore: scheduler and runner, and the short loop that they make. Knows no processes, pipes or clocks.

Where the runner computes beside us, a step is launched before the tokens of the one before it are here: its rows take those on the device.
A step that does not fit into memory is not the end: it is computed without its drafts, then in halves, down to a single token, and only
a row that does not fit even so fails.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from model.step import PENDING, Row, SampledToken, SampleError, Scoring, StepPlan, StepResult
from server.engine.scheduler import PromptScored, Scheduler, TokenEvent

log = logging.getLogger("onehead.engine")

OUT_OF_MEMORY = SampleError("the machine's memory does not hold what this request needs for its next token", code="out_of_memory")
NO_TOKEN = 0
"""Stands for a token that was never drawn: its sequence has failed, and nobody looks at what comes of this."""


class Runner(Protocol):
    """What computes a plan: model.runner.runner.ModelRunner, or a test's stand-in."""

    @property
    def progress(self) -> int:
        """A number that grows while a plan is computed."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raises MemoryError where the step needs more than there is; nothing is lost by computing any part of it again."""


class PendingStep(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for it; the same again when asked again."""


class OverlappingRunner(Runner, Protocol):
    """One that computes while we do something else: it has `launch`."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step, behind all that were begun before. A row whose last token is PENDING goes on with what its sequence draws in the
        step that was launched last. What the plan refers to may change when this has returned. Raises MemoryError as `run` does.
        """


def _nothing() -> None: ...


class EngineCore:
    """One model's engine."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._in_flight: tuple[StepPlan, PendingStep] | None = None

    def step(self, before: Callable[[], None] = _nothing) -> list[TokenEvent | PromptScored]:
        """Plans and launches a step, and commits the one that was in flight, or this one where nothing overlaps; what came of that. Nothing
        where there is nothing to do, and after the first of several. `before` is called when it is decided what will be computed.
        """
        plan = self.scheduler.plan()
        if not plan.rows:
            return self._commit_in_flight(None)
        before()
        launch: Callable[[StepPlan], PendingStep] | None = getattr(self.runner, "launch", None)
        return self.scheduler.commit(plan, self._run(plan)) if launch is None else self._launch(launch, plan)

    def _launch(self, launch: Callable[[StepPlan], PendingStep], plan: StepPlan) -> list[TokenEvent | PromptScored]:
        """Launches a step and commits the one before it; both, where this one does not fit into memory as it is."""
        try:
            flight = launch(plan)
        except MemoryError as error:
            reason = str(error)
        else:
            return self._commit_in_flight((plan, flight))
        # Before anything is committed: what the plan says of outputs holds only as long as they are what they were.
        result = self._run_smaller(self._with_sampled_tokens(plan), reason)
        return self._commit_in_flight(None) + self.scheduler.commit(plan, result)

    def _commit_in_flight(self, behind: tuple[StepPlan, PendingStep] | None) -> list[TokenEvent | PromptScored]:
        """Commits the step in flight, if there is one; another may fly behind it."""
        landing, self._in_flight = self._in_flight, behind
        if landing is None:
            return []
        plan, flight = landing
        return self.scheduler.commit(plan, flight.result())

    def _with_sampled_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with the tokens that were not known when it was made."""
        if self._in_flight is None:
            return plan
        before, flight = self._in_flight
        drawn = {row.sequence: draw for row, draw in zip(before.rows, flight.result().drawn, strict=True)}
        return StepPlan(tuple(_with_sampled_tokens(row, drawn.get(row.sequence)) for row in plan.rows), plan.clear)

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self.runner.run(plan)
        except MemoryError as error:
            reason = str(error)  # The error itself keeps alive what the step had made.
        return self._run_smaller(plan, reason)

    def _run_smaller(self, plan: StepPlan, reason: str) -> StepResult:
        """A plan that did not fit into memory."""
        num_tokens = sum(len(row.tokens) for row in plan.rows)
        log.warning("a step of %d sequences and %d tokens does not fit into memory: %s", len(plan.rows), num_tokens, reason)
        if any(row.drafts for row in plan.rows):
            return self._run(StepPlan(tuple(_without_drafts(row) for row in plan.rows), plan.clear))
        if num_tokens == 1:
            return self._retry_one_token(plan)
        if len(plan.rows) == 1:
            return self._run_parts(*_halves(plan.rows[0]), plan.clear)
        half = len(plan.rows) // 2
        left = self._run(StepPlan(plan.rows[:half], plan.clear))
        right = self._run(StepPlan(plan.rows[half:]))
        return StepResult(left.drawn + right.drawn, {**left.scored, **{half + i: scored for i, scored in right.scored.items()}})

    def _retry_one_token(self, plan: StepPlan) -> StepResult:
        """A single token, for which memory may be there now that others' steps have given theirs back."""
        try:
            return self.runner.run(plan)
        except MemoryError:
            return StepResult((OUT_OF_MEMORY,))

    def _run_parts(self, first: Row, second: Row, clear: tuple[int, ...]) -> StepResult:
        """One row's tokens in two steps."""
        before = self._run(StepPlan((first,), clear))
        if isinstance(before.drawn[0], SampleError):
            return StepResult((before.drawn[0],))
        behind = self._run(StepPlan((second,)))
        scored: list[SampledToken] = [*before.scored.get(0, ()), *behind.scored.get(0, ())]
        return StepResult(behind.drawn, {0: scored} if scored else {})


def _with_sampled_tokens(row: Row, drawn: SampledToken | SampleError | None) -> Row:
    if row.tokens[-1] != PENDING or row.sample is None:
        return row
    token = drawn.token if isinstance(drawn, SampledToken) else NO_TOKEN
    sample = replace(row.sample, output=[*row.sample.output, token], num_unseen=0)
    return replace(row, tokens=[*row.tokens[:-1], token], sample=sample)


def _without_drafts(row: Row) -> Row:
    """The row without its guesses; who planned them takes them for wrong ones."""
    return replace(row, tokens=row.tokens[: len(row.tokens) - row.drafts], drafts=0)


def _halves(row: Row) -> tuple[Row, Row]:
    """The row cut in two: its first tokens, which draw nothing, and the others."""
    half = len(row.tokens) // 2
    early = late = None
    if row.scoring is not None:
        first, targets, num_top = row.scoring.first, row.scoring.targets, row.scoring.num_top
        cut = min(len(targets), max(0, half - first))
        early = Scoring(first, targets[:cut], num_top) if cut else None
        late = Scoring(max(0, first - half), targets[cut:], num_top) if cut < len(targets) else None
    return (
        replace(row, tokens=row.tokens[:half], sample=None, scoring=early),
        replace(row, tokens=row.tokens[half:], start=row.start + half, scoring=late),
    )
