"""EngineCore: scheduler and runner, and the loop of four lines that they make. Knows no processes, pipes or clocks.

A step that does not fit into memory is not the end: it is computed without its drafts, then in halves, down to a single token, and only
a row that does not fit even so fails.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from model.step import Drawn, NotDrawn, Row, Scoring, StepPlan, StepResult
from server.engine.scheduler import Advance, PromptScored, Scheduler

log = logging.getLogger("onehead.engine")

OUT_OF_MEMORY = NotDrawn("the machine's memory does not hold what this request needs for its next token", code="out_of_memory")


class Runner(Protocol):
    """What computes a plan: model.runner.ModelRunner, or a test's stand-in."""

    @property
    def progress(self) -> int:
        """A number that grows while a plan is computed."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raises MemoryError where the step needs more than there is; nothing is lost by computing any part of it again."""


def _nothing() -> None: ...


class EngineCore:
    """One model's engine."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def step(self, before: Callable[[], None] = _nothing) -> list[Advance | PromptScored]:
        """Plans, computes and commits one step; what came of it. Nothing where there is nothing to do. `before` is called when it is
        decided what will be computed.
        """
        plan = self.scheduler.plan()
        if not plan.rows:
            return []
        before()
        return self.scheduler.commit(plan, self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self.runner.run(plan)
        except MemoryError as error:
            num_tokens = sum(len(row.tokens) for row in plan.rows)
            log.warning("a step of %d sequences and %d tokens does not fit into memory: %s", len(plan.rows), num_tokens, error)
        if any(row.drafts for row in plan.rows):
            return self._run(StepPlan(tuple(_undrafted(row) for row in plan.rows), plan.clear))
        if num_tokens == 1:
            return self._run_again(plan)
        if len(plan.rows) == 1:
            return self._run_parts(*_halves(plan.rows[0]), plan.clear)
        half = len(plan.rows) // 2
        left = self._run(StepPlan(plan.rows[:half], plan.clear))
        right = self._run(StepPlan(plan.rows[half:]))
        return StepResult(left.drawn + right.drawn, {**left.scored, **{half + i: scored for i, scored in right.scored.items()}})

    def _run_again(self, plan: StepPlan) -> StepResult:
        """A single token, for which memory may be there now that others' steps have given theirs back."""
        try:
            return self.runner.run(plan)
        except MemoryError:
            return StepResult((OUT_OF_MEMORY,))

    def _run_parts(self, first: Row, second: Row, clear: tuple[int, ...]) -> StepResult:
        """One row's tokens in two steps."""
        before = self._run(StepPlan((first,), clear))
        if isinstance(before.drawn[0], NotDrawn):
            return StepResult((before.drawn[0],))
        behind = self._run(StepPlan((second,)))
        scored: list[Drawn] = [*before.scored.get(0, ()), *behind.scored.get(0, ())]
        return StepResult(behind.drawn, {0: scored} if scored else {})


def _undrafted(row: Row) -> Row:
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
