"""A model that drafts tokens: the same tokens and log-probabilities as without it, drafts that come
true where the models agree, pages that come back, and drafting only while it pays.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import structs

from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import OptionError
from model.step import SampledToken, SampleError, Sampling, StepPlan, StepResult
from server.config import EMBEDDED_MODEL, ServeSettings, load
from server.engine.core import EngineCore
from server.engine.draft_model import (
    TRIAL_STEPS,
    DraftModel,
    Pace,
    Runner,
    SeparateModel,
)
from server.engine.scheduler import Limits, Scheduler
from server.engine.speculation import load_drafts
from server.errors import ConfigurationError
from server.protocol import Token
from tests.server.engine.test_drafts import SAMPLINGS, finish, make_runner, outcomes
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.families import make_family_checkpoint
from tests.support.hash_model import HashModel, one_group
from tests.support.processes import ServerProcess
from tests.support.submitting import submit

OPTIONS = EngineOptions("cpu", "float32", 1, 16, None, None, 400, 8, 64)


class Always(Pace):
    """Drafts whatever it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.drafting = True

    def record(self, seconds: float, catching_up: float, num_tokens: int, extra: float) -> None:
        assert min(seconds, catching_up, extra) >= 0 and num_tokens >= 1


Model = TypeVar("Model", bound=DraftModel)


def draft_model(
    runner: ModelRunner,
    runs: Runner | None = None,
    num_pages: int = 200,
    step_tokens: int = 64,
    most_tokens: int = 400,
) -> SeparateModel:
    """One that drafts whatever it costs, with `runs` as its runner."""
    limits = num_pages, step_tokens, most_tokens
    model = SeparateModel(runs or runner, runner.pool.layout, *limits)
    return always(model)


def always(model: Model) -> Model:
    model._paces = {key: Always() for key in product(range(17), range(17))}
    return model


def requests_of(vocab_size: int, number: int) -> list[tuple[list[int], Sampling]]:
    """Greedy and sampled, with penalties, prompts of 1 to 150 tokens."""
    rng = random.Random(2)
    return [
        (
            [rng.randrange(vocab_size) for _ in range(rng.choice((1, 7, 40, 150)))],
            replace(SAMPLINGS[index % len(SAMPLINGS)], seed=index),
        )
        for index in range(number)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with one vocabulary, the second with a window."""
    windowed = make_family_checkpoint("gemma3_text", 0, tmp_path_factory.mktemp("windowed"))
    shape = replace(SHAPES[0], vocab_size=windowed.vocab_size)
    return [make_checkpoint(shape, tmp_path_factory.mktemp("model")).folder, windowed.folder]


@pytest.mark.parametrize("limits", [(200, 64, 400), (9, 64, 400), (200, 30, 400), (200, 64, 60)])
def test_the_same_bits_as_without(folders: list[Path], limits: tuple[int, int, int]) -> None:
    """Whether it agrees with the model or not; with pages for some sequences only, with prompts
    that take several steps, and with fewer positions than the model.
    """
    runner, other = (make_runner(folder, "none") for folder in folders)
    requests = requests_of(301, 12)
    without, _ = outcomes(runner, runner.pool.layout, requests, None)
    for smaller in (make_runner(folders[0], "none"), other):
        drafts = draft_model(smaller, None, *limits)
        drafted, scheduler = outcomes(runner, runner.pool.layout, requests, drafts)
        assert drafted == without and scheduler.num_drafted_tokens > 5
        assert drafts._allocator.num_owned == 0
        if smaller is not other:
            # The same model draws the same tokens, whatever a request's settings are.
            assert scheduler.num_accepted_tokens > 0.9 * scheduler.num_drafted_tokens


def test_more_tokens_a_step(folders: list[Path]) -> None:
    runner, twin = (make_runner(folders[0], "int8") for _ in range(2))
    steps = []
    for drafts in (None, draft_model(twin)):
        scheduler = Scheduler(Limits(200, runner.pool.layout, 400, 4, 64), drafts)
        submit(scheduler, 0, [1, 2, 3], 200, Sampling(temperature=0.8, seed=1))
        assert sum(len(step) for step in finish(EngineCore(scheduler, runner))) == 200
        steps.append(scheduler.num_steps)
    assert steps[0] == 200 and steps[1] < 25, "drafts of 12 tokens that all come true"


class Failing:
    """A runner that fails now and then."""

    def __init__(self, runner: ModelRunner, fails: Callable[[int], str]) -> None:
        self._runner, self._fails, self._numbers = runner, fails, count()

    def run(self, plan: StepPlan) -> StepResult:
        how = self._fails(next(self._numbers))
        if how == "memory":
            raise MemoryError("none left")
        result = self._runner.run(plan)
        if how == "numbers":
            wrong = SampleError("not finite", code="numerical_error")
            return replace(result, drawn=(wrong, *result.drawn[1:]))
        return result


@pytest.mark.parametrize("how", ["memory", "numbers"])
def test_a_draft_model_that_fails_costs_speed_alone(folders: list[Path], how: str) -> None:
    runner, twin = (make_runner(folders[0], "none") for _ in range(2))
    requests = requests_of(301, 8)
    without, _ = outcomes(runner, runner.pool.layout, requests, None)
    failing = Failing(twin, lambda number: how if number in (9, 20, 21) else "")
    drafts = draft_model(twin, failing)
    drafted, scheduler = outcomes(runner, runner.pool.layout, requests, drafts)
    assert drafted == without and scheduler.num_accepted_tokens > 30
    assert drafts._allocator.num_owned == 0


def test_preempted_sequences_give_pages_back(folders: list[Path]) -> None:
    runner, twin = (make_runner(folders[0], "none") for _ in range(2))
    found = []
    for drafts in (None, draft_model(twin)):
        scheduler = Scheduler(Limits(12, runner.pool.layout, 180, 4, 64), drafts)
        for id in range(6):
            submit(scheduler, id, [id + 1] * 20, 60, Sampling(seed=id))
        tokens: dict[int, list[int]] = {id: [] for id in range(6)}
        for step in finish(EngineCore(scheduler, runner)):
            for event in step:
                assert isinstance(event, Token)
                tokens[event.id].append(event.token)
        assert scheduler.num_preemptions > 0
        found.append(tokens)
        if drafts is not None:
            assert drafts._allocator.num_owned == 0 and scheduler.num_accepted_tokens > 30
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [1, 7, 8, 9, 12, 15, 16])
def test_a_step_with_drafts_is_no_larger_than_it_may_be(number: int) -> None:
    """Pages of both models are checked token by token."""
    layout = one_group(4)
    drafts = always(SeparateModel(HashModel(layout), layout, 400, 64, 400))
    scheduler, sizes = Scheduler(Limits(400, layout, 60, 16, 16), drafts), set()
    for id in range(number):
        submit(scheduler, id, [id + 1] * 3, 30, Sampling(seed=id))
    model = HashModel(layout)
    core, run = EngineCore(scheduler, model), model.run

    def measured(plan: StepPlan) -> StepResult:
        sizes.add(sum(len(row.tokens) for row in plan.rows))
        return run(plan)

    model.run = measured  # type: ignore[method-assign]
    tokens = [event for step in finish(core) for event in step]
    assert len(tokens) == 30 * number and max(sizes) <= 16
    assert scheduler.num_drafted_tokens > 0
    assert scheduler.num_drafted_tokens == scheduler.num_accepted_tokens
    assert drafts._allocator.num_owned == 0


# --- whether it pays


def share_with_drafts(with_drafts: float, without: float, steps: int) -> float:
    """The share of steps with drafts where a token takes so many seconds."""
    pace, drafted = Pace(), 0
    for _ in range(steps):
        drafted += pace.drafting
        tokens = 2 if pace.drafting else 1
        pace.record(tokens * (with_drafts if pace.drafting else without), 0.0, tokens, 0.0)
    return drafted / steps


def test_what_pays_is_used() -> None:
    assert share_with_drafts(0.9, 1.0, 5000) > 0.87
    assert share_with_drafts(1.3, 1.0, 5000) < 0.03
    assert share_with_drafts(0.99, 1.0, 5000) < 0.12, "too little to tell from noise"
    # What is lost while it does not pay, from the first token on.
    assert 1 + 2 * 0.5 * share_with_drafts(1.5, 1.0, 4000) < 1.02


def test_a_change_is_noticed() -> None:
    pace = Pace()
    for pays in (True, False, True):
        drafted = 0
        for step in range(12_000):
            seconds = 1.0 if pace.drafting is pays else 2.0
            pace.record(seconds, 0.0, 1, 0.0)
            drafted += pace.drafting and step >= 6_000 + TRIAL_STEPS
        assert (drafted > 3_000) is pays


@pytest.mark.parametrize(
    ("agreement", "prompt", "output", "least", "most"),
    [
        (0.8, 20, 200, 1.2, 2.0),
        (0.8, 1000, 200, 1.1, 2.0),
        (0.8, 1000, 10, 0.98, 1.02),
        (0.0, 20, 200, 0.98, 1.02),
        (0.0, 900, 200, 0.98, 1.02),
        (0.8, 1800, 400, 1.05, 2.0),
        # About as fast either way: what trials of 16 steps say is chance.
        (0.5, 1200, 200, 0.94, 1.1),
    ],
)
def test_what_it_costs_and_gains(
    agreement: float, prompt: int, output: int, least: float, most: float
) -> None:
    """One client after another, by a clock that steps alone advance: a draft model ten times as
    fast as its model, with other prompts each time.
    """
    now, layout, random_ = [0.0], one_group(16), random.Random(4)
    taken = []

    class Timed(HashModel):
        def __init__(self, first: float, token: float, wrong: float) -> None:
            super().__init__(layout)
            self._first, self._token, self._wrong = first, token, wrong
            self._check = lambda *_: None  # type: ignore[method-assign]

        def run(self, plan: StepPlan) -> StepResult:
            now[0] += self._first + self._token * sum(len(row.tokens) for row in plan.rows)
            found = super().run(plan)
            drawn = tuple(
                structs.replace(draw, token=draw.token ^ 1)
                if isinstance(draw, SampledToken) and random_.random() < self._wrong
                else draw
                for draw in found.drawn
            )
            return replace(found, drawn=drawn)

    for speculates in (False, True):
        now[0] = 0.0
        smaller = Timed(0.07, 0.03, 1 - agreement)
        drafts = SeparateModel(smaller, layout, 400, 100, 4000, lambda: now[0])
        scheduler = Scheduler(Limits(400, layout, 4000, 4, 512), drafts if speculates else None)
        core = EngineCore(scheduler, Timed(0.95, 0.05, 0.0))
        for id in range(30 if prompt < 100 else 12):
            words = [random_.randrange(64) for _ in range(prompt)]
            submit(scheduler, id, words, output, Sampling(seed=id))
            list(finish(core))
        taken.append(now[0])
    assert least < taken[0] / taken[1] < most


# --- the server


def test_a_server_with_a_draft_model_answers_as_one_without(
    embedded_server: ServerProcess,
) -> None:
    """The embedded model drafts for itself."""
    options = ("--engine.speculation", "draft", "--engine.draft", str(EMBEDDED_MODEL))
    server = ServerProcess(EMBEDDED_MODEL, *options)
    try:
        for parameters in (
            {"max_new_tokens": 100},
            {"max_new_tokens": 100, "do_sample": True, "seed": 3, "temperature": 0.9},
        ):
            parameters |= {"ignore_eos": True, "details": True}
            body = {"inputs": "def add(first, second):\n", "parameters": parameters}
            assert server.post("/generate", body) == embedded_server.post("/generate", body)
        drafted = server.metric("onehead_spec_decode_num_draft_tokens_total")
        assert 0 < drafted == server.metric("onehead_spec_decode_num_accepted_tokens_total")
    finally:
        assert server.stop() == 0


def test_options() -> None:
    words = ["--engine.speculation", "draft"]
    with pytest.raises(ConfigurationError, match="speculation draft needs a model in draft"):
        load(ServeSettings, words, "onehead serve")
    more = ["--engine.draft", "org/name", "--engine.speculation", "none"]
    assert load(ServeSettings, more, "onehead serve").engine.speculation == "none"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make_checkpoint(replace(SHAPES[0], vocab_size=300), tmp_path).folder
    options = replace(OPTIONS, speculation="draft", draft=str(other))
    with pytest.raises(OptionError, match="of 300 tokens, the model one of 4096"):
        load_drafts(options, read_spec(EMBEDDED_MODEL), lambda *_: None)


@pytest.mark.parametrize(("memory", "pages"), [(2.0**23, None), (2.0**23, 40)])
def test_both_caches_take_what_the_options_allow(memory: float, pages: int | None) -> None:
    """A restarted engine is told how many pages the model's cache has; the other's are fewer."""
    options = replace(
        OPTIONS, speculation="draft", draft=str(EMBEDDED_MODEL), memory=memory, pages=pages
    )
    spec = read_spec(EMBEDDED_MODEL)
    make, options = load_drafts(options, spec, lambda *_: None)
    runner = ModelRunner.load(EMBEDDED_MODEL, spec, options)
    drafts = make(runner)
    assert isinstance(drafts, SeparateModel)
    page_bytes = runner.pool.num_bytes // runner.pool.num_pages
    assert drafts._allocator.num_pages == memory / 8 // page_bytes
    assert runner.pool.num_pages == (pages or memory * 7 / 8 // page_bytes)


def test_sequences_that_end_before_their_first_token(folders: list[Path]) -> None:
    runner, twin = (make_runner(folders[0], "none") for _ in range(2))
    drafts = SeparateModel(twin, twin.pool.layout, 200, 64, 400)
    scheduler = Scheduler(Limits(200, runner.pool.layout, 400, 4, 64), drafts)
    core = EngineCore(scheduler, runner)
    submit(scheduler, 0, [1] * 100, 40, Sampling())
    core.step()
    scheduler.cancel(0)
    submit(scheduler, 1, [2] * 3, 40, Sampling())
    assert sum(len(step) for step in finish(core)) == 40
