"""Tokens whose logits are not wanted leave after the last layer that stores keys and values: what
is drawn and scored, and what the pages hold, has the bits that it has where all tokens pass all
layers.
"""

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from model.batch import build_batch
from model.runner.runner import ModelRunner
from model.step import Row, Sample, Sampling, Scoring, StepPlan, StepResult
from tests.model.devices.cpu.test_program import FORMS, load, ragged

SHARING = (0, 3)
"""Numbers of Gemma 4's configurations in which layers share keys and values, and whose heads our
kernels take."""
MIXES = 25


def wishful(rng: random.Random, row: Row) -> Row:
    """The row with random wishes: to draw, with drafts before, and to score some of its tokens."""
    count = len(row.tokens)
    sample = Sample(Sampling(seed=row.start), [1, 2], [3]) if rng.random() < 0.5 else None
    drafts = rng.randrange(count) if sample and rng.random() < 0.5 else 0
    scoring = None
    if rng.random() < 0.3:
        first = rng.randrange(count)
        targets = rng.choices(range(250), k=rng.randint(1, count - first))
        scoring = Scoring(first, targets, rng.choice((0, 3)))
    return replace(row, sample=sample, drafts=drafts, scoring=scoring)


def result(runner: ModelRunner, plan: StepPlan, threads: int) -> tuple[StepResult, torch.Tensor]:
    """What a step gives over pages of random numbers, and what they hold afterwards."""
    pages = runner.pool.numbers_PN
    pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(0)))
    torch.set_num_threads(threads)
    try:
        return runner.run(plan), pages.clone()
    finally:
        torch.set_num_threads(1)


def check(runner: ModelRunner, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ragged(runner, rng, rng.choice((1, 2, 5)), rng.choice((3, 40)))
    plan = StepPlan(tuple(wishful(rng, row) for row in plan.listed))
    short, pages = result(runner, plan, rng.choice((1, 2, 3)))
    with monkeypatch.context() as context:
        context.setattr("model.batch._tail", lambda *_: None)
        whole, same_pages = result(runner, plan, 1)
    assert short == whole and torch.equal(pages, same_pages)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("number", SHARING)
def test_what_is_wanted_has_the_same_bits(
    number: int, form: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, rng = load("gemma4_text", number, tmp_path, *form), random.Random(number)
    for _ in range(MIXES):
        check(runner, rng, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("number", SHARING)
def test_10_000_mixes(
    number: int, form: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, rng = load("gemma4_text", number, tmp_path, *form), random.Random(100 + number)
    for _ in range(1250):
        check(runner, rng, monkeypatch)


@pytest.mark.parametrize("number", [2, 4])
def test_the_reference_agrees(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sums depend on the number of rows, so that bits differ."""
    runner, rng = load("gemma4_text", number, tmp_path, "auto", "none"), random.Random(number)
    assert runner.backend.name == "reference"
    for _ in range(MIXES):
        plan = ragged(runner, rng, 3, 20)
        plan = StepPlan(
            tuple(replace(row, scoring=Scoring(len(row.tokens) - 1, [7], 0)) for row in plan.listed)
        )
        short, _ = result(runner, plan, 1)
        with monkeypatch.context() as context:
            context.setattr("model.batch._tail", lambda *_: None)
            whole, _ = result(runner, plan, 1)
        for index, (scored,) in short.scored.items():
            assert scored.logprob == pytest.approx(whole.scored[index][0].logprob, abs=1e-3)


def test_only_tokens_from_the_first_that_is_wanted_on_go_on(tmp_path: Path) -> None:
    runner = load("gemma4_text", 0, tmp_path, "auto", "none")
    sample, pages = Sample(Sampling(), [], []), ragged(runner, random.Random(1), 1, 1).rows[0].pages

    def row(count: int, **wishes: object) -> Row:
        return replace(Row(0, [5] * count, 7, pages, None), **wishes)

    rows = (
        row(4),
        row(3, sample=sample),
        row(5, sample=sample, drafts=2),
        row(6, scoring=Scoring(4, [1], 0)),
        row(1, sample=sample),
    )
    batch = build_batch(StepPlan(rows), runner.pool.layout, runner.device.upload, has_tail=True)
    assert batch.tail is not None
    assert batch.tail.rows_K.tolist() == [6, 9, 10, 11, 16, 17, 18]
    assert [(len(r.tokens), r.start) for r in batch.tail.batch.rows] == [
        (1, 9),
        (3, 9),
        (2, 11),
        (1, 7),
    ]
    assert batch.tail.batch.firsts == (0, 1, 4, 6)
    every = StepPlan((row(1, sample=sample), row(2, scoring=Scoring(0, [1, 2], 0))))
    layout, upload = runner.pool.layout, runner.device.upload
    assert build_batch(every, layout, upload, has_tail=True).tail is None
    assert build_batch(StepPlan(rows), layout, upload).tail is None


def test_a_chunk_that_nothing_is_wanted_of_tells_that_its_states_are_not_finite(
    tmp_path: Path,
) -> None:
    runner = load("gemma4_text", 0, tmp_path, "auto", "none")
    plan = ragged(runner, random.Random(3), 1, 20)
    assert runner.run(plan).drawn == (None,)
    runner.pool.numbers_PN.fill_(torch.nan)
    (drawn,) = runner.run(StepPlan((replace(plan.listed[0], start=40),))).drawn
    assert drawn is not None and "states" in drawn.reason  # type: ignore[union-attr]
