"""Speculative decoding: the same tokens and log-probabilities as without it, at every schedule, and
few wasted draft tokens.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, Sample, SampledToken, SampleError, Sampling, StepPlan, StepResult
from server.config import EMBEDDED_MODEL, ServeSettings, load
from server.engine.core import EngineCore, Runner
from server.engine.drafts import (
    INITIAL_DRAFT,
    MAX_DRAFT,
    MAX_SPECULATIVE_STEP,
    Drafts,
    divide,
)
from server.engine.ngrams import ORDERS, Drafter, NGrams
from server.engine.scheduler import Limits, Scheduler
from server.engine.sequence import Sequence
from server.protocol import Token
from tests.server.engine.test_scheduler import History, run_histories
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.guesser import Guesser
from tests.support.hash_model import HashModel, next_token, one_group
from tests.support.immediate import Immediate
from tests.support.integrity import integrity
from tests.support.processes import ServerProcess
from tests.support.submitting import submit

SEEDS, MANY = 300, 4000
"""Histories of every run of the tests, and of `-m slow`."""
DrafterFor = Callable[[Sequence], Drafter]


def ngrams(sequence: Sequence) -> Drafter:
    """The drafters of `engine.speculation=ngram`."""
    return Drafter(sequence.prompt)


def repeating(tokens: list[int], seed: int, end_rate: float, may_end: bool) -> int:
    """A model whose next token depends on the last two, so that it soon repeats itself, until it
    ends as hash_model's does.
    """
    if may_end and next_token(tokens, seed, end_rate, True) == 0:
        return 0
    return (
        1 + hashlib.blake2b(repr((tokens[-2:], seed % 4)).encode(), digest_size=1).digest()[0] % 6
    )


# --- the drafter


def naive(tokens: list[int], count: int, orders: tuple[int, ...]) -> list[int]:
    """The specification of a draft: what followed the last occurrence of the last 3 tokens, else of
    the last 2.
    """
    for order in orders:
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == tokens[-order:]:
                text = list(tokens)
                for place in range(end, end + count):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), max_size=8),
    st.randoms(),
)
def test_it_guesses_what_followed_last_time_however_the_text_comes(
    prompt: list[int], grown: list[int], rng: random.Random
) -> None:
    new, trusted, output = Drafter(prompt), Drafter(prompt), list[int]()
    trusted.record_outcome(0, 4, 4)
    for count in grown:
        tokens = prompt + output
        assert new.draft(output, 9) == naive(tokens, INITIAL_DRAFT, ORDERS[:1])
        assert trusted.draft(output, 9) == naive(tokens, 8, ORDERS)
        output += [rng.randrange(4) for _ in range(count)]


def test_what_has_a_period_goes_on_with_it() -> None:
    drafter = Drafter([7, 8, 9] * 3)
    for _ in range(4):
        drafter.record_outcome(0, 12, 12)
    assert drafter.draft([], 12) == [7, 8, 9] * 4 and drafter.draft([7], 5) == [8, 9, 7, 8, 9]
    for most in range(1, 5):
        drafter = Drafter([5, 5, 5])
        drafter.record_outcome(0, 6, 6)
        assert drafter.draft([], most) == [5] * most


def test_drafts_grow_with_success_and_shrink_without() -> None:
    drafter = Drafter([1] * 50)
    lengths = []
    for _ in range(5):
        lengths.append(len(drafter.draft([], 99)))
        drafter.record_outcome(0, lengths[-1], lengths[-1])
    assert lengths == [1, 2, 4, 8, 12] and lengths[-1] == MAX_DRAFT
    drafter.record_outcome(0, 12, 12)
    drafter.record_outcome(0, 12, 4)
    assert len(drafter.draft([], 99)) == 5
    drafter.record_outcome(0, 3, 3)  # Cut short by the step's room, and right as far as it went.
    assert len(drafter.draft([], 99)) == 6
    drafter.record_outcome(0, 6, 0)
    assert len(drafter.draft([1], 99)) == 1, "no rest after a single failure after much success"


def test_who_is_always_wrong_rests_longer_and_longer() -> None:
    drafter, drafted = Drafter([1] * 50), list[int]()
    for position in range(2000):
        draft = drafter.draft([1] * position, 12)
        if draft:
            drafted.append(position)
            drafter.record_outcome(position + 1, len(draft), 0)
    gaps = [later - earlier for earlier, later in pairwise(drafted)]
    assert gaps[:5] == [16, 32, 64, 128, 256] and set(gaps[5:]) == {256}


@given(st.integers(0, 40), st.lists(st.integers(1, 12), max_size=12))
def test_room_is_shared_fairly(room: int, wishes: list[int]) -> None:
    shares = divide(room, dict(enumerate(wishes)))
    assert sum(shares.values()) == min(room, sum(wishes))
    short = [shares[i] for i, wish in enumerate(wishes) if shares[i] < wish]
    assert all(0 <= shares[i] <= wish for i, wish in enumerate(wishes))
    assert not short or max(shares.values()) <= min(short) + 1, (
        "nobody has more than one above who was cut"
    )


# --- the scheduler


class Guessing(Immediate, History):
    """The random histories of the scheduler with drafts: from the model itself, some wrong, or
    n-grams over a model that repeats itself.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drafter_for: DrafterFor = ngrams
        if seed % 2:
            self.drafter_for = lambda sequence: Guesser(
                sequence.prompt,
                lambda tokens: next_token(tokens, sequence.id, self.model.end_rate, True),
            )
        else:
            self.model.give = repeating
        self.scheduler = Scheduler(self.limits, NGrams(self.drafter_for))
        self.core = EngineCore(self.scheduler, self)  # type: ignore[arg-type]
        self.progress = 0

    def run(self, plan: StepPlan | None = None) -> Counter[str] | StepResult:  # type: ignore[override]
        """Runs the history; or, as the history's runner, one plan of it."""
        if plan is None:
            seen = super().run()
            seen["drafted"] += self.scheduler.num_drafted_tokens
            seen["accepted"] += self.scheduler.num_accepted_tokens
            return seen
        if any(row.drafts for row in plan.rows):
            assert sum(len(row.tokens) for row in plan.rows) <= MAX_SPECULATIVE_STEP
            if self.rng.random() < 0.02:
                self.seen["short of memory"] += 1
                raise MemoryError
        result = self.model.run(plan)
        for i, row in enumerate(plan.rows):
            self.check_row(row)
            if row.drafts and self.rng.random() < 0.01:
                self.seen["not finite"] += 1
                drawn = [
                    SampleError("numbers", code="numerical_error") if j == i else d
                    for j, d in enumerate(result.drawn)
                ]
                accepted = {j: drafts for j, drafts in result.accepted.items() if j != i}
                return replace(result, drawn=tuple(drawn), accepted=accepted)
        return result

    def check_row(self, row: Row) -> None:
        if not row.drafts:
            return
        _, max_new, min_new, _, forces = self.requests[row.sequence]
        assert (
            row.sample is not None
            and not row.sample.forbidden
            and row.scoring is None
            and not forces
        )
        assert (
            len(row.tokens) == row.drafts + 1
            and min_new <= len(row.sample.output) < max_new - row.drafts
        )


def check_seen(seen: Counter[str], least: int) -> None:
    """Whether the rare things happened often enough, and guesses came true neither always nor
    never.
    """
    kinds = (
        "finished",
        "cancelled",
        "preempted",
        "scored",
        "shared",
        "window passed",
        "short of memory",
        "not finite",
        "accepted",
    )
    assert min(seen[kind] for kind in kinds) > least, seen
    assert 0.3 < seen["accepted"] / seen["drafted"] < 0.95, seen


@pytest.mark.parametrize("part", range(2))
def test_guesses_change_no_outcome_and_leak_nothing(part: int) -> None:
    check_seen(run_histories(range(part, SEEDS, 2), Guessing), 1)


@pytest.mark.slow
def test_guesses_change_no_outcome_and_leak_nothing_in_many_histories() -> None:
    check_seen(run_histories(range(SEEDS, MANY), Guessing), 75)


def finish(core: EngineCore) -> Iterator[list[Token]]:
    """The events of each step until every sequence has ended."""
    while core.scheduler.has_work:
        yield [event for event in core.step() if isinstance(event, Token)]
        assert integrity(core.scheduler) == []


class Wrong(Drafter):
    """Always out of memory."""

    def draft(self, output: list[int], most: int) -> list[int]:  # type: ignore[override]
        return [99] * most


@pytest.mark.parametrize("pages", range(8, 24, 3))
def test_wrong_guesses_preempt_nobody(pages: int) -> None:
    """In a pool that is too small, each step has the same events as without drafts."""
    news, preemptions = [], []
    for drafter_for in (None, lambda sequence: Wrong(sequence.prompt)):
        layout = one_group(2)
        scheduler = Scheduler(Limits(pages, layout, 16, 4, 16), drafter_for and NGrams(drafter_for))
        core = EngineCore(scheduler, HashModel(layout))
        for id in range(6):
            submit(scheduler, id, [id + 1] * (1 + id), 8, Sampling(seed=id))
        news.append([sorted(events, key=lambda event: event.id) for events in finish(core)])
        preemptions.append(scheduler.num_preemptions)
        assert scheduler.num_accepted_tokens == 0 and (scheduler.num_drafted_tokens > 20) == (
            drafter_for is not None
        )
    assert news[0] == news[1] and preemptions[0] == preemptions[1]


def test_a_stop_token_among_the_guesses_ends_the_sequence_there() -> None:
    layout = one_group(4)
    scheduler = Scheduler(
        Limits(20, layout, 60, 1, 16),
        NGrams(lambda sequence: Guesser(sequence.prompt, lambda tokens: 5)),
    )
    submit(scheduler, 0, [5, 5], 40, Sampling(), stop_token_ids=frozenset({9}))
    core = EngineCore(
        scheduler, HashModel(layout, give=lambda tokens, *_: 9 if len(tokens) == 6 else 5)
    )
    advances = [advance for step in finish(core) for advance in step]
    assert [a.token for a in advances] == [5, 5, 5, 5, 9]
    assert advances[-1].finish == "eos_token" and scheduler.allocator.num_owned == 0


def test_a_refusal_behind_guesses_comes_after_them() -> None:
    row = Row(0, [1, 2, 3], 7, (), Sample(Sampling(), [], [1]), drafts=2)
    assert [list(sample.output) for sample in row.samples] == [[1], [1, 2], [1, 2, 3]]
    refused = SampleError("why", refused=True)
    assert row.settle([SampledToken(2, 0.0), refused, SampledToken(4, 0.0)]) == (
        [SampledToken(2, 0.0)],
        refused,
    )
    assert row.settle([SampledToken(2, 0.0), SampledToken(3, 0.0), SampledToken(4, 0.0)]) == (
        [SampledToken(2, 0.0), SampledToken(3, 0.0)],
        SampledToken(4, 0.0),
    )
    assert row.settle([SampledToken(3, 0.0), SampledToken(3, 0.0), SampledToken(4, 0.0)]) == (
        [],
        SampledToken(3, 0.0),
    )


# --- the real runner


def make_runner(folder: Path, quantization: str) -> ModelRunner:
    return ModelRunner.load(
        folder,
        read_spec(folder),
        EngineOptions("cpu", "float32", 1, 16, 200, None, 400, 8, 64, quantization),
    )


def outcomes(
    runner: Runner,
    layout: object,
    requests: list[tuple[list[int], Sampling]],
    drafts: Drafts | None,
) -> tuple[dict[int, list[Token]], Scheduler]:
    """The events of every request, and the scheduler that produced them."""
    scheduler = Scheduler(Limits(200, layout, 400, 4, 64), drafts)  # type: ignore[arg-type]
    for id, (prompt, sampling) in enumerate(requests):
        submit(
            scheduler,
            id,
            prompt,
            50,
            sampling,
            num_top=2 * (id % 2),
            min_new_tokens=3 * (id % 3),
            stop_token_ids=frozenset({17}),
        )
    advances: dict[int, list[Token]] = {id: [] for id in range(len(requests))}
    for step in finish(EngineCore(scheduler, runner)):
        for advance in step:
            advances[advance.id].append(advance)
    return advances, scheduler


SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.9),
    Sampling(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    Sampling(temperature=0.0, bad_words=((3, 4), (5,)), logit_bias={7: 2.0}),
    Sampling(temperature=0.9, typical_p=0.8, min_p=0.02),
    Sampling(temperature=0.0, frequency_penalty=0.1),
)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("threads", "vocab_size", "count"), [(1, 300, 12), (2, 33_000, 2)])
def test_the_same_bits_as_without(
    quantization: str, threads: int, vocab_size: int, count: int, tmp_path: Path
) -> None:
    """One case has a vocabulary so large that torch sums a single row with several threads."""
    runner = make_runner(
        make_checkpoint(replace(SHAPES[0], vocab_size=vocab_size), tmp_path).folder, quantization
    )
    rng, layout = random.Random(1), runner.pool.layout
    requests = []
    for number in range(count):
        words = [[rng.randrange(vocab_size) for _ in range(4)] for _ in range(3)]
        prompt = [token for _ in range(8) for token in rng.choice(words)]
        requests.append((prompt, replace(SAMPLINGS[number % len(SAMPLINGS)], seed=number)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        without, _ = outcomes(runner, layout, requests, None)
        known = {id: [a.token for a in advances] for id, advances in without.items()}
        by_ngrams, scheduler = outcomes(runner, layout, requests, NGrams())
        assert by_ngrams == without and scheduler.num_drafted_tokens > 0
        told, scheduler = outcomes(
            runner,
            layout,
            requests,
            NGrams(lambda sequence: told_by(known[sequence.id], sequence)),
        )
        assert told == without and scheduler.num_accepted_tokens > 20
    finally:
        torch.set_num_threads(before)


def told_by(output: list[int], sequence: Sequence) -> Drafter:
    """Drafts from the known outcome, some of them wrong."""
    start = len(sequence.prompt)
    return Guesser(
        sequence.prompt, lambda tokens: ([*output, 0])[min(len(tokens) - start, len(output))]
    )


def test_few_rows_are_wasted_on_what_repeats_nothing() -> None:
    runner = make_runner(EMBEDDED_MODEL, "int8")
    rng = random.Random(5)
    requests = [
        ([rng.randrange(4096) for _ in range(rng.randint(1, 120))], Sampling(seed=number))
        for number in range(20)
    ]
    advances, scheduler = outcomes(runner, runner.pool.layout, requests, NGrams())
    num_tokens = sum(map(len, advances.values()))
    wasted = scheduler.num_drafted_tokens - scheduler.num_accepted_tokens
    assert num_tokens > 500 and wasted <= 0.03 * num_tokens, (wasted, num_tokens)


def test_a_guess_that_is_not_a_number_harms_nobody(tmp_path: Path) -> None:
    """With the reference backend its NaN reaches earlier tokens and stays in later
    slots.
    """
    runner = make_runner(make_checkpoint(SHAPES[3], tmp_path).folder, "none")
    embed = runner.decoder.token_embedding.forward

    def poisoned(ids_T: torch.Tensor) -> torch.Tensor:
        return torch.where((ids_T == 99)[:, None], torch.nan, embed(ids_T))

    runner.decoder.token_embedding.forward = poisoned  # type: ignore[method-assign, assignment]
    requests = [([id + 1] * 20, Sampling(temperature=0.0, bad_words=((99,),))) for id in range(4)]
    without, _ = outcomes(runner, runner.pool.layout, requests, None)
    guessed, scheduler = outcomes(
        runner, runner.pool.layout, requests, NGrams(lambda sequence: Wrong(sequence.prompt))
    )
    assert scheduler.num_drafted_tokens == 0, "a row with guesses was taken in"
    for id, advances in without.items():
        for a, b in zip(advances, guessed[id], strict=True):
            assert (a.token, a.index, a.finish) == (b.token, b.index, b.finish)
            assert abs(a.logprob - b.logprob) < 1e-4


# --- the server


def test_the_option() -> None:
    assert load(ServeSettings, [], "onehead serve").engine.speculation == "none"
    assert (
        load(ServeSettings, ["--engine.speculation", "ngram"], "onehead serve").engine.speculation
        == "ngram"
    )


def test_a_server_that_speculates_answers_as_one_that_does_not(
    embedded_server: ServerProcess,
) -> None:
    server = ServerProcess(EMBEDDED_MODEL, "--engine.speculation", "ngram", "--cache.pages", "64")
    try:
        prompt = "def add(first, second):\n    return first + second\n\n\ndef add(first, second):\n"
        for parameters in (
            {"max_new_tokens": 60},
            {"max_new_tokens": 40, "do_sample": True, "seed": 3, "temperature": 0.6},
        ):
            parameters |= {"ignore_eos": True, "details": True}
            body = {"inputs": prompt, "parameters": parameters}
            assert server.post("/generate", body) == embedded_server.post("/generate", body)
        assert server.metric("onehead_spec_decode_num_accepted_tokens_total") > 10
        assert server.metric("onehead_spec_decode_num_draft_tokens_total") < 150
    finally:
        assert server.stop() == 0
    assert embedded_server.metric("onehead_spec_decode_num_draft_tokens_total") == 0
