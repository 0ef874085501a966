"""The conditions that an answer must not depend on (batch invariance), each as a pass over the same
requests in an engine in this process.

A trace is everything that the engine reported for a request, with floats by their bits; the
reference is each request alone in its own scheduler. The other requests arrive in a random order
and at random steps, so that a pass costs little more than the reference. This module knows nothing
of HTTP or of how anything is computed.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from math import exp, log
from typing import Any

import torch

from cache.table import PageTable
from model.runner.runner import ModelRunner
from model.step import Sampling
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import PromptScores, Token
from tests.support import submitting
from tests.support.integrity import integrity

BATCHES = 2, 7, 32, 64
BUDGETS = 16, 64, 512
MOST_PROMPT, MOST_OUTPUT = 2000, 24
STEP_TOKENS = 512
"""Token budget of a step in the passes that are not about it: the server's default."""
FEW = 4
"""Requests at once in passes that are not about the batch."""
HOARDING = 0.1
"""Chance that a step finds the free pages taken, or returned."""
EXTRA_TOKENS = 1
"""Tokens that a request sent before, to fill the prefix cache, has after the prefix that it shares
with the case."""

Trace = list[tuple[Any, ...]]
"""("scored", token, logprob, rank, top) for each prompt token that is scored, then ("drawn", token,
logprob, finish, top) for each of the output; ("failed", reason) in the place of a token that could
not be drawn."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    prompt: list[int]
    tokens: int
    sampling: Sampling
    num_top: int = 0
    scored: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of a pass: traces by case number, and whether the condition that it is about
    occurred.
    """

    name: str
    traces: dict[int, Trace] = field(default_factory=dict)
    occurred: bool = True
    evidence: str = ""
    preempted: set[int] = field(default_factory=set)
    """Cases that were preempted and recomputed."""


def digest(traces: dict[int, Trace]) -> str:
    """One number for every bit of these traces."""
    return hashlib.sha256(repr(sorted(traces.items())).encode()).hexdigest()


# --- requests


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.0},
    {"temperature": 1.2, "typical_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.2,
        "repetition_penalty": 0.9,
    },
    {
        "temperature": 1.1,
        "top_k": 100,
        "top_p": 0.8,
        "typical_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    },
)


def make_cases(number_of_cases: int, vocab_size: int, context: int, seed: int) -> list[Case]:
    """Requests, greedy and sampled, some with alternatives, some with their prompts scored; lengths
    log-uniform from 1 to the most that fits. Every other prompt repeats itself, so that drafts can
    be made.
    """
    rng = random.Random(seed)
    longest = min(MOST_PROMPT, context - MOST_OUTPUT)
    cases = []
    for number in range(number_of_cases):
        length = {0: 1, 1: longest}.get(number, int(exp(rng.uniform(0, log(longest + 1)))))
        words = rng.choices(range(vocab_size), k=length if number % 2 else rng.randint(2, 12))
        sampling = Sampling(**SAMPLINGS[number % len(SAMPLINGS)], seed=rng.getrandbits(32))
        prompt = (words * length)[:length]
        num_top = 5 if number % 3 == 0 else 0
        cases.append(
            Case(prompt, rng.randint(1, MOST_OUTPUT), sampling, num_top, scored=number % 7 == 3)
        )
    return cases


# --- the engine


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded runner, over which each pass makes an engine; pages keep what earlier passes left in
    them.
    """

    runner: ModelRunner
    context: int

    def core(
        self,
        max_running: int,
        step_tokens: int = STEP_TOKENS,
        pages: int | None = None,
        speculate: bool = False,
    ) -> EngineCore:
        pool = self.runner.pool
        limits = Limits(
            pages or pool.num_pages,
            pool.layout,
            self.context,
            max_running,
            max(step_tokens, max_running),
        )
        more = [import_module("server.engine.ngrams").NGrams()] if speculate else []
        return EngineCore(Scheduler(limits, *more), self.runner)  # type: ignore[arg-type]


def can_speculate() -> bool:
    """Whether this checkout has n-grams as a module: the trial is also run on commits from before
    that.
    """
    return find_spec("server.engine.ngrams") is not None


def submit(core: EngineCore, id: int, case: Case, salt: str = "") -> None:
    submitting.submit(
        core.scheduler,
        id,
        case.prompt,
        case.tokens,
        case.sampling,
        salt=salt,
        num_top=case.num_top,
        score_prompt=case.scored,
    )


def step(core: EngineCore, traces: dict[int, Trace]) -> list[int]:
    """Runs one step; returns the requests that it ended."""
    ended = []
    for event in core.step():
        trace = traces.setdefault(event.id, [])
        if isinstance(event, PromptScores):
            trace += [
                ("scored", score.token, score.logprob.hex(), score.rank, _bits(score.top))
                for score in event.scores
            ]
        elif isinstance(event, Token):
            trace.append(
                ("drawn", event.token, event.logprob.hex(), event.finish, _bits(event.top))
            )
            ended += [] if event.finish is None else [event.id]
        else:
            trace.append(("failed", event.reason))
            ended.append(event.id)
    core.scheduler.take_started()
    return ended


def _bits(top: Sequence[tuple[int, float]]) -> tuple[tuple[int, str], ...]:
    return tuple((token, logprob.hex()) for token, logprob in top)


def finish(core: EngineCore, id: int, case: Case, salt: str = "") -> Trace:
    """One case alone in an idle engine."""
    traces: dict[int, Trace] = {}
    submit(core, id, case, salt)
    while core.scheduler.has_work:
        step(core, traces)
    return traces[id]


# --- passes


Ended = Callable[[int], None]
"""Is called with the number of requests that have ended since the last call."""


def alone(engine: Engine, cases: list[Case], ended: Ended, name: str = "alone") -> list[Outcome]:
    """The reference: every case in a new scheduler."""
    outcome = Outcome(name)
    for number, case in enumerate(cases):
        outcome.traces[number] = finish(engine.core(1), number, case)
        ended(1)
    return [outcome]


def together(
    core: EngineCore, cases: list[Case], ended: Ended, name: str, most: int, hoarding: bool = False
) -> Outcome:
    """All cases in a random order, arriving at random steps while fewer than `most` are open.
    `hoarding`: all free pages are taken at random steps, to force preemptions.
    """
    rng, outcome, scheduler = random.Random(name), Outcome(name), core.scheduler
    coming = rng.sample(range(len(cases)), len(cases))
    num_most, hoard = 0, PageTable(core.scheduler.allocator, core.scheduler.limits.layout)
    while coming or scheduler.has_work:
        num_open = len(scheduler.running) + len(scheduler.waiting)
        while coming and num_open < most and (num_open == 0 or rng.random() < most / (most + 2)):
            number = coming.pop()
            submit(core, number, cases[number])
            num_open += 1
        if hoarding and rng.random() < HOARDING:
            _take_or_return_pages(core, hoard)
        gone = step(core, outcome.traces)
        num_most = max(num_most, len(scheduler.running) + len(gone))
        outcome.preempted |= {id for id, sequence in scheduler.waiting.items() if sequence.payer}
        ended(len(gone))
    hoard.release()
    problems = integrity(scheduler)
    if problems:
        raise SystemExit(f"{name}: {problems[0]}")
    outcome.occurred = 2 * num_most >= min(most, len(cases))
    outcome.evidence = f"up to {num_most} at once"
    return outcome


def _take_or_return_pages(core: EngineCore, hoard: PageTable) -> None:
    layout, num_free = core.scheduler.limits.layout, core.scheduler.allocator.num_available
    if hoard.owned:
        hoard.release()
    elif num_free >= layout.pages_per_block:
        tokens = num_free // layout.pages_per_block * layout.page_size
        hoard.grow(tokens, tokens)


def batches(engine: Engine, cases: list[Case], ended: Ended, size: int) -> list[Outcome]:
    return [together(engine.core(size), cases, ended, f"batches of {size}", size)]


def budgets(
    engine: Engine, cases: list[Case], ended: Ended, step_tokens: int | None
) -> list[Outcome]:
    """Chunked prefill: a budget of None computes every prompt in one step."""
    core = engine.core(FEW, step_tokens or FEW * engine.context)
    return [together(core, cases, ended, f"steps of {step_tokens or 'any number of'} tokens", FEW)]


def prefixes(engine: Engine, cases: list[Case], ended: Ended) -> list[Outcome]:
    """One scheduler that keeps its prefix cache: each case after others with another salt, after
    one with the same prefix, and after itself.
    """
    rng, core = random.Random("prefixes"), engine.core(1)
    names = "prefix missed", "prefix hit in part", "prefix hit"
    outcomes = [Outcome(name, occurred=False) for name in names]
    hits, scheduler = [0, 0, 0], core.scheduler
    for number, case in enumerate(cases):
        earlier = case.prompt[: rng.randint(1, len(case.prompt))] + [0] * EXTRA_TOKENS
        for place, outcome in enumerate(outcomes):
            if place == 1:
                finish(core, 4 * number + 3, Case(earlier, 1, Sampling(temperature=0.0)))
            before = scheduler.num_hit_tokens
            outcome.traces[number] = finish(
                core, 4 * number + place, case, salt="another's" if place == 0 else ""
            )
            hits[place] += scheduler.num_hit_tokens - before
        ended(1)
    for place, outcome in enumerate(outcomes):
        outcome.occurred = (hits[place] == 0) == (place == 0)
        outcome.evidence = f"{hits[place]} tokens hit"
    return outcomes


def preemptions(engine: Engine, cases: list[Case], ended: Ended, most: int = 16) -> list[Outcome]:
    """A pool that just fits the longest case, and at times less, so that sequences are
    preempted.
    """
    layout, step_tokens = engine.runner.pool.layout, 2 * most
    longest = max(len(case.prompt) + case.tokens for case in cases)
    pages = next(
        pages
        for pages in count(1)
        if layout.most_tokens(pages, step_tokens, engine.context) >= longest
    )
    core = engine.core(most, step_tokens, pages)
    outcome = together(core, cases, ended, "preempted", most, hoarding=True)
    outcome.occurred = bool(outcome.preempted)
    outcome.evidence = (
        f"{len(outcome.preempted)} preempted, {core.scheduler.num_preemptions} preemptions"
    )
    return [outcome]


def threads(
    engine: Engine, cases: list[Case], ended: Ended, number: int, size: int
) -> list[Outcome]:
    with torch_threads(number):
        name = f"{number} threads, {'alone' if size == 1 else f'batches of {size}'}"
        return (
            alone(engine, cases, ended, name)
            if size == 1
            else [together(engine.core(size), cases, ended, name, size)]
        )


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def speculation(engine: Engine, cases: list[Case], ended: Ended) -> list[Outcome]:
    """Speculative decoding from the sequence's own text."""
    core = engine.core(FEW, speculate=True)
    outcome = together(core, cases, ended, "speculation", FEW)
    scheduler: Any = core.scheduler
    outcome.occurred = scheduler.num_accepted_tokens > 0
    outcome.evidence = (
        f"{scheduler.num_accepted_tokens} of {scheduler.num_drafted_tokens} guesses came true"
    )
    return [outcome]


Pass = Callable[[Engine, list[Case], Ended], list[Outcome]]


def passes() -> dict[str, Pass]:
    """Every pass but the reference, by name."""
    found: dict[str, Pass] = {}
    for size in BATCHES:
        found[f"batch{size}"] = partial(batches, size=size)
    for budget in (*BUDGETS, None):
        found[f"steps{budget or ''}"] = partial(budgets, step_tokens=budget)
    found |= {"prefix": prefixes, "preemption": preemptions}
    for size in (1, 7):
        found[f"threads2x{size}"] = partial(threads, number=2, size=size)
    return found | ({"speculation": speculation} if can_speculate() else {})


# --- differences


def difference(expected: Trace, actual: Trace) -> str | None:
    """The first difference of a trace from the reference, in words."""
    for place, (right, wrong) in enumerate(zip(expected, actual, strict=False)):
        if right != wrong:
            return f"item {place} of {len(expected)} is {wrong} instead of {right}"
    return (
        None if len(expected) == len(actual) else f"{len(actual)} items instead of {len(expected)}"
    )


def compare(reference: dict[int, Trace], outcome: Outcome, cases: list[Case]) -> dict[str, Any]:
    """Figures of a pass: how much was compared, how much differs, and the first difference."""
    differences = []
    for number, expected in reference.items():
        words = difference(expected, outcome.traces.get(number, []))
        if words is not None:
            differences.append(f"request {number} ({_described(cases[number])}): {words}")
    return {
        "condition": outcome.name,
        "requests": len(reference),
        "tokens": sum(len(trace) for trace in reference.values()),
        "differ": len(differences),
        "first_difference": differences[0] if differences else None,
        "occurred": outcome.occurred,
        "evidence": outcome.evidence,
    }


def _described(case: Case) -> str:
    scored = ", scored" if case.scored else ""
    return (
        f"{len(case.prompt)} + {case.tokens} tokens, temperature "
        f"{case.sampling.temperature:g}{scored}"
    )
