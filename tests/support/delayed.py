"""An asynchronous runner made of a synchronous one: steps wait in a queue, as on a device, and are
computed late.

What a plan refers to is copied at launch, as a real runner's upload does. A PENDING token is the
one that its sequence sampled in the step launched before, whatever the scheduler has recorded
since.
"""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from model.step import PENDING, Row, SampledToken, StepPlan, StepResult

NO_TOKEN = 0


class DelayedFlight:
    """One step in the queue."""

    done = False

    def __init__(
        self, runner: "DelayedRunner", plan: StepPlan, before: "DelayedFlight | None"
    ) -> None:
        self.runner, self.plan, self.before = runner, plan, before
        self.found: StepResult | None = None

    def result(self) -> StepResult:
        while self.found is None:
            self.runner.compute_one()
        return self.found

    def compute(self) -> None:
        plan = StepPlan(tuple(self._seen(row) for row in self.plan.rows), self.plan.clear)
        self.before = None
        self.found = self.runner.finish(plan)
        self.drawn = {
            row.sequence: drawn for row, drawn in zip(plan.rows, self.found.drawn, strict=True)
        }

    def _seen(self, row: Row) -> Row:
        if PENDING not in row.tokens:
            assert row.sample is None or not row.sample.num_unseen, (
                "a row without PENDING whose sample counts unseen tokens"
            )
            return row
        assert row.tokens.index(PENDING) == len(row.tokens) - 1 and not row.drafts, (
            "only the last token can be unseen"
        )
        assert self.before is not None, "a token is waited for, and no step is in flight"
        drawn = self.before.drawn[row.sequence]
        token = drawn.token if isinstance(drawn, SampledToken) else NO_TOKEN
        assert row.sample is not None and row.sample.num_unseen == 1
        sample = row.sample.after([*row.sample.output, token])
        return replace(row, tokens=[*row.tokens[:-1], token], sample=sample)


class DelayedRunner:
    """`run` computes a step at once. `launch` calls `begin`, which may raise MemoryError, and
    `finish` computes the step late.
    """

    def __init__(
        self,
        run: Callable[[StepPlan], StepResult],
        finish: Callable[[StepPlan], StepResult] | None = None,
        begin: Callable[[StepPlan], None] = lambda plan: None,
        random: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.run, self.finish, self.begin, self.random = run, finish or run, begin, random
        self.queue: deque[DelayedFlight] = deque()
        self.last: DelayedFlight | None = None
        self.progress = 0
        self.most_in_flight = 0

    def launch(self, plan: StepPlan) -> DelayedFlight:
        self.begin(plan)
        self.last = DelayedFlight(
            self, StepPlan(tuple(map(_copy, plan.rows)), tuple(plan.clear)), self.last
        )
        self.queue.append(self.last)
        flight = self.last
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        while self.queue and self.random() < 0.2:
            self.compute_one()
        return flight

    def compute_one(self) -> None:
        self.progress += 1
        self.queue.popleft().compute()


def _copy(row: Row) -> Row:
    sample = None if row.sample is None else replace(row.sample, output=list(row.sample.output))
    return replace(
        row, tokens=list(row.tokens), pages=[pages[:] for pages in row.pages], sample=sample
    )
