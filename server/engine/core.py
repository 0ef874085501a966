"""EngineCore: scheduler and runner, and the loop of four lines that they make. Knows no processes, pipes or clocks."""

from typing import Protocol

from model.step import StepPlan, StepResult
from server.engine.scheduler import Advance, PromptScored, Scheduler


class Runner(Protocol):
    """What computes a plan: model.runner.ModelRunner, or a test's stand-in."""

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineCore:
    """One model's engine."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def step(self) -> list[Advance | PromptScored]:
        """Plans, computes and commits one step; what came of it. Nothing where there is nothing to do."""
        plan = self.scheduler.plan()
        if not plan.rows:
            return []
        result = self.runner.run(plan)
        return self.scheduler.commit(plan, result)
