"""EngineCore: the step loop over a scheduler and a runner. It knows nothing of processes, pipes or
clocks.

With an asynchronous runner a step is launched before the tokens of the previous step are known; its
rows read them on the device. A step that does not fit into memory is computed row by row, without
drafts; a sequence fails only if its row alone does not fit.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from model.step import PENDING, Outcome, Row, SampledToken, SampleError, StepPlan, StepResult
from server.engine.open_sequences import Event
from server.engine.scheduler import Scheduler

log = logging.getLogger("onehead.engine")

OUT_OF_MEMORY = SampleError(
    "not enough memory to compute the next token of this request", code="out_of_memory"
)
NO_TOKEN = 0
"""Placeholder for a token that was not sampled because its sequence failed; results computed from
it are discarded."""


class PendingStep(Protocol):
    """A launched step."""

    @property
    def done(self) -> bool:
        """Whether it was computed before `launch` returned."""

    def result(self) -> StepResult:
        """Waits for it. Further calls return the same."""


class Runner(Protocol):
    """Computes a step plan. model.runner.runner.ModelRunner implements it."""

    @property
    def progress(self) -> int:
        """A number that grows while a plan is being computed."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step. Raises MemoryError if it does not fit into memory; any part of it may
        then be computed again.
        """

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queues a step after those launched before. A row whose last token is PENDING takes the
        token that its sequence samples in the previous step. The lists in the plan may change once
        this has returned. Raises MemoryError as `run` does.
        """


class EngineCore:
    """A scheduler, a runner and the step in flight, if any."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._in_flight: tuple[StepPlan, PendingStep] | None = None
        self._found_nothing = False
        """Whether the last step found nothing to compute."""

    @property
    def is_blocked(self) -> bool:
        """Whether every open sequence waits for a mask, or for a sequence that does."""
        return self._found_nothing and self.scheduler.has_work

    def step(self, before: Callable[[], object] = lambda: None) -> list[Event]:
        """Runs one iteration and returns its events. An asynchronous runner launches the planned
        step and commits the previous one, so the first call has no events; any other runner
        computes and commits the planned step. `before` is called once the plan is made.
        """
        events = self.scheduler.take_masks()
        plan = self.scheduler.plan()
        self._found_nothing = plan.is_empty and self._in_flight is None
        return events + (
            self._commit_in_flight(None) if plan.is_empty else self._compute(plan, before)
        )

    def _compute(self, plan: StepPlan, before: Callable[[], object]) -> list[Event]:
        before()
        try:
            pending = self.runner.launch(plan)
        except MemoryError as error:
            reason = str(error)
        else:
            return (
                self.scheduler.commit(plan, pending.result())
                if pending.done
                else self._commit_in_flight((plan, pending))
            )
        # Computed before the previous step is committed, as a commit changes the outputs that this
        # plan refers to.
        result = self._run_rows(self._with_sampled_tokens(plan), reason)
        return self._commit_in_flight(None) + self.scheduler.commit(plan, result)

    def _commit_in_flight(self, following: tuple[StepPlan, PendingStep] | None) -> list[Event]:
        """Commits the step in flight, if any; `following` takes its place."""
        in_flight, self._in_flight = self._in_flight, following
        if in_flight is None:
            return []
        plan, pending = in_flight
        return self.scheduler.commit(plan, pending.result())

    def _with_sampled_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with each PENDING token replaced by the token that the step in flight
        samples.
        """
        if self._in_flight is None:
            return plan
        before, pending = self._in_flight
        drawn = {
            row.sequence: draw
            for row, draw in zip(before.rows, pending.result().drawn, strict=True)
        }
        return StepPlan(
            tuple(_with_sampled_token(row, drawn.get(row.sequence)) for row in plan.rows),
            plan.clear,
        )

    def _run_rows(self, plan: StepPlan, reason: str) -> StepResult:
        """Computes a plan that did not fit into memory row by row."""
        log.warning(
            "a step of %d sequences and %d tokens does not fit into memory: %s",
            len(plan.rows),
            sum(len(row.tokens) for row in plan.rows),
            reason,
        )
        clear = plan.clear
        drawn: list[Outcome | None] = []
        scored: dict[int, Sequence[SampledToken]] = {}
        for index, row in enumerate(plan.rows):
            try:
                result = self.runner.run(StepPlan((_without_drafts(row),), clear))
            except MemoryError:
                drawn.append(OUT_OF_MEMORY)
                continue
            clear = ()
            drawn += result.drawn
            if result.scored:
                scored[index] = result.scored[0]
        self.scheduler.prefixes.unknown.extend(clear)
        return StepResult(tuple(drawn), scored)


def _with_sampled_token(row: Row, drawn: Outcome | None) -> Row:
    if row.tokens[-1] != PENDING or row.sample is None:
        return row
    token = drawn.token if isinstance(drawn, SampledToken) else NO_TOKEN
    sample = row.sample.after([*row.sample.output, token])
    return replace(row, tokens=[*row.tokens[:-1], token], sample=sample)


def _without_drafts(row: Row) -> Row:
    """The row without its draft tokens; the scheduler treats them as rejected."""
    return replace(row, tokens=row.tokens[: len(row.tokens) - row.drafts], drafts=0)
