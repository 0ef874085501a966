"""Closed loops on an engine in this process: requests of token ids, and the seconds that the host
and the runner take of each step.

Prompts are token ids, choices greedy, ends ignored. Invariant: the parts of a step add up to the
step; a latency counts from the submission of its request, so it includes the time in the engine's
queue. It knows no options, no text and no result files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from commands.bench.client import Outcome
from commands.bench.figures import spread

if TYPE_CHECKING:
    from model.step import StepPlan, StepResult
    from server.engine.core import EngineCore, PendingStep, Runner

Result = TypeVar("Result")


class Stopwatch:
    """A runner that counts the seconds in which another computes, or is waited for where it
    computes asynchronously.
    """

    def __init__(self, runner: "Runner") -> None:
        self._runner = runner
        self.seconds = 0.0

    @property
    def progress(self) -> int:
        return self._runner.progress

    def run(self, plan: "StepPlan") -> "StepResult":
        return self._counted(partial(self._runner.run, plan))

    def launch(self, plan: "StepPlan") -> "PendingStep":
        counted = self.seconds
        pending = self._counted(partial(self._runner.launch, plan))
        if not pending.done:
            self.seconds = counted
        return _Timed(pending, self)

    def _counted(self, work: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds += time.perf_counter() - began


class _Timed:
    """A PendingStep whose waiting is counted."""

    def __init__(self, pending: "PendingStep", stopwatch: Stopwatch) -> None:
        self.done, self._pending, self._stopwatch = pending.done, pending, stopwatch

    def result(self) -> "StepResult":
        return self._stopwatch._counted(self._pending.result)


@dataclass(slots=True)
class Steps:
    """Seconds of every step: in the scheduler and whatever else is not the runner's (host), and in
    the runner (compute).
    """

    host: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        total = sum(self.host) + sum(self.compute)
        parts = {"host": spread(self.host), "compute": spread(self.compute)}
        return {
            "count": len(self.host),
            **parts,
            "host_share": sum(self.host) / total if total else None,
        }


class ClosedLoop:
    """Clients of one engine, each submitting its next prompt when its last has ended."""

    def __init__(self, core: "EngineCore", output_tokens: int, on_end: Callable[[], None]) -> None:
        self._core = core
        self._stopwatch = Stopwatch(core.runner)
        self._output_tokens, self._temperature = output_tokens, 0.0
        self._on_end = on_end
        self._outcomes: list[Outcome] = []
        self._began = 0.0

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def run(self, clients: int, prompts: list[list[int]]) -> tuple[list[Outcome], Steps]:
        """Every prompt to its end; the outcomes in their order."""
        self._outcomes, steps, numbers = (
            [Outcome(0.0) for _ in prompts],
            Steps(),
            iter(range(len(prompts))),
        )
        runner, self._core.runner = self._core.runner, self._stopwatch
        self._began = time.perf_counter()
        try:
            for number in islice(numbers, clients):
                self._submit(number, prompts[number])
            while self._core.scheduler.has_work:
                for _ in range(self._step(steps)):
                    number = next(numbers, -1)
                    if number >= 0:
                        self._submit(number, prompts[number])
        finally:
            self._core.runner = runner
        return self._outcomes, steps

    def _submit(self, number: int, prompt: list[int]) -> None:
        from server.protocol import Sampling, Submit

        outcome = self._outcomes[number]
        outcome.intended = outcome.sent = self._clock()
        outcome.input_length = len(prompt)
        sampling = Sampling(temperature=self._temperature, seed=number)
        self._core.scheduler.submit(
            Submit(number, prompt, [], self._output_tokens, 0, [], sampling)
        )

    def _step(self, steps: Steps) -> int:
        """One step of the engine; how many requests it ended."""
        from server.protocol import PromptScores

        began, computed = time.perf_counter(), self._stopwatch.seconds
        news = self._core.step(self._started)
        now = time.perf_counter()
        compute = self._stopwatch.seconds - computed
        steps.host.append(now - began - compute)
        steps.compute.append(compute)
        return sum(
            self._take(event, now - self._began)
            for event in news
            if not isinstance(event, PromptScores)
        )

    def _started(self) -> None:
        self._core.scheduler.take_started()

    def _take(self, event: Any, now: float) -> bool:
        """One token or failure; whether it was the request's last."""
        from server.protocol import Failed

        outcome = self._outcomes[event.id]
        if isinstance(event, Failed):
            outcome.failure = event.reason
        else:
            outcome.token_times.append(now)
            outcome.token_ids.append(event.token)
            if event.finish is None:
                return False
        outcome.end = now
        self._on_end()
        return True
