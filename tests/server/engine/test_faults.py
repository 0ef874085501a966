"""A fault of one request affects no other: too little memory, a grammar that fails. Any other
error in a step is raised.
"""

import random
from typing import Any

import pytest
import torch

from model import sampling
from model.step import Sample, Sampling, StepPlan, StepResult
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.errors import ConstraintFailed
from server.protocol import Failed, Guidance, PromptScores, Token
from tests.server.engine.test_scheduler import Forcing
from tests.support.drawing import draw
from tests.support.hash_model import HashModel, one_group, oracle
from tests.support.integrity import integrity
from tests.support.submitting import submit

PAGE = 4


class SmallModel(HashModel):
    """A runner with memory for steps of one row and of so many tokens, and for no token of some
    sequences.
    """

    def __init__(self, most: int, hopeless: int | None = None) -> None:
        super().__init__(one_group(PAGE))
        self.most = most
        self.hopeless = hopeless
        self.refused = 0

    def run(self, plan: StepPlan) -> StepResult:
        is_large = len(plan.rows) > 1 and sum(len(row.tokens) for row in plan.rows) > self.most
        if is_large or any(row.sequence == self.hopeless for row in plan.rows):
            self.refused += 1
            raise MemoryError("no")
        return super().run(plan)


def run_all(
    core: EngineCore,
) -> tuple[dict[int, list[int]], dict[int, Failed], list[PromptScores]]:
    outputs: dict[int, list[int]] = {}
    failed: dict[int, Failed] = {}
    scored: list[PromptScores] = []
    while core.scheduler.has_work:
        for event in core.step():
            if isinstance(event, PromptScores):
                scored.append(event)
            elif isinstance(event, Token):
                outputs.setdefault(event.id, []).append(event.token)
            elif isinstance(event, Failed):
                failed[event.id] = event
        assert integrity(core.scheduler) == []
    return outputs, failed, scored


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40])
def test_a_step_too_large_is_computed_row_by_row(most: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        model = SmallModel(most)
        core = EngineCore(Scheduler(Limits(64, one_group(PAGE), 200, 8, 32)), model)
        expected, prompts = {}, {}
        for id in range(1, 6):
            prompts[id] = [rng.randrange(1, 60) for _ in range(rng.randint(1, 30))]
            count = rng.randint(1, 8)
            submit(
                core.scheduler, id, prompts[id], count, Sampling(seed=id), score_prompt=id % 2 == 0
            )
            expected[id] = oracle(prompts[id], count, 0, frozenset(), id, 0.0)
        outputs, failed, scored = run_all(core)
        assert outputs == expected and failed == {} and (model.refused > 0 or most == 40)
        for id in (2, 4):
            scores = [score for event in scored if event.id == id for score in event.scores]
            # The hash model's log-probability is the position that it scored: none is skipped, none
            # comes twice.
            assert [(score.token, score.logprob) for score in scores] == [
                (prompts[id][i], -float(i)) for i in range(1, len(prompts[id]))
            ]


def test_what_does_not_fit_even_alone_fails_alone() -> None:
    model = SmallModel(32, hopeless=2)
    core = EngineCore(Scheduler(Limits(64, one_group(PAGE), 200, 8, 32)), model)
    for id in (1, 2, 3):
        submit(core.scheduler, id, [id] * 9, 5, Sampling(seed=id))
    outputs, failed, _ = run_all(core)
    assert failed.keys() == {2} and failed[2].code == "out_of_memory"
    assert outputs == {id: oracle([id] * 9, 5, 0, frozenset(), id, 0.0) for id in (1, 3)}
    assert core.scheduler.allocator.num_owned == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("x"),
        torch.OutOfMemoryError("x"),
        torch.AcceleratorError("x", 1),
        ZeroDivisionError("x"),
    ],
)
def test_what_a_draw_raises_is_raised(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sampling, "philox_exponentials", fail)
    with pytest.raises(type(error)):
        draw(torch.zeros(2, 4), [Sample(Sampling(temperature=1.0), [1], []) for _ in range(2)])


def test_a_grammar_that_breaks_ends_its_own_sequence() -> None:
    class Broken(Forcing):
        def take(self) -> Guidance:
            raise ConstraintFailed("inside a library", refused=False)

    core = EngineCore(
        Scheduler(Limits(64, one_group(PAGE), 200, 8, 32)), HashModel(one_group(PAGE))
    )
    submit(core.scheduler, 1, [1, 2], 5, Sampling(seed=1), constraint=Broken())
    submit(core.scheduler, 2, [1, 2], 5, Sampling(seed=2))
    outputs, failed, _ = run_all(core)
    assert failed[1].code == "grammar_error" and outputs[2] == oracle(
        [1, 2], 5, 0, frozenset(), 2, 0.0
    )
    assert core.scheduler.allocator.num_owned == 0
