"""Runners whose steps are done when they have been launched, as on a CPU."""

from typing import Protocol

from model.step import StepPlan, StepResult


class DoneStep:
    """A PendingStep that is done."""

    done = True

    def __init__(self, found: StepResult) -> None:
        self._found = found

    def result(self) -> StepResult:
        return self._found


class _Runs(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


class Immediate:
    """Mixin: adds `launch` to a class that has `run`."""

    def launch(self: _Runs, plan: StepPlan) -> DoneStep:
        return DoneStep(self.run(plan))
