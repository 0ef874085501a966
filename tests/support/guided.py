"""Requests with grammars through a real engine core over a model without weights: many together,
and each alone.
"""

import asyncio
import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from model.step import Row, SampledToken, Sampling
from server import protocol
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.errors import ConstraintFailed, InvalidRequest
from server.guidance import grammar_tokenizer
from server.protocol import Failed, Guidance, Token
from server.text.codec import TextCodec
from server.text.constraints import Grammars
from server.text.service import Source
from tests.support.constraints import BOMBS, MIXED
from tests.support.hash_model import HashModel, one_group
from tests.support.inline_workers import Compiler

RUNNING = 64
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""Of each byte, its bits from the lowest."""
NUM_BITS = BITS.sum(axis=1, dtype=np.int64)


def choose(mask: bytes, number: int) -> int:
    """One of the allowed ids, uniformly by a random number."""
    values = np.frombuffer(mask, np.uint8)
    ends = np.cumsum(NUM_BITS[values])
    place = number % int(ends[-1])
    at = int(np.searchsorted(ends, place, side="right"))
    left = place - int(ends[at] - NUM_BITS[values[at]])
    return 8 * at + int(np.flatnonzero(BITS[values[at]])[left])


class GuidedModel(HashModel):
    """A model that samples among the allowed tokens by a hash of the tokens and the seed."""

    def _draw(self, row: Row) -> list[SampledToken]:
        if row.sample is None:
            return []
        sample = row.sample
        assert sample.mask is not None
        digest = hashlib.blake2b(
            repr((sample.prompt, sample.output, sample.sampling.seed)).encode(), digest_size=8
        ).digest()
        token = choose(sample.mask, int.from_bytes(digest, "little"))
        self._check(row, [*sample.prompt, *sample.output])
        return [SampledToken(token, -1.0)]


@dataclass(frozen=True)
class Asked:
    """One request."""

    grammar: str
    prompt: tuple[int, ...]
    seed: int
    most: int


Outcome = tuple[list[int], str]
"""The outcome of a request: its tokens, and why it ended."""


def compiled(codec: TextCodec) -> tuple[list[str], dict[str, str]]:
    """The mixed grammars that the check accepts, and the messages for those that it refuses; the
    bombs are not checked.
    """
    from llguidance import LLMatcher

    compiler = Compiler(codec)
    refused: dict[str, str] = {}

    async def one(kind: Any, value: Any) -> str:
        try:
            return await compiler.compile(Source(kind, value, "field"))
        except InvalidRequest as error:
            refused[str(value)] = error.message
            return ""

    async def all_of_them() -> list[str]:
        return [grammar for kind, value in MIXED if (grammar := await one(kind, value))]

    return asyncio.run(all_of_them()) + [
        LLMatcher.grammar_from_regex(bomb) for bomb in BOMBS
    ], refused


def requests(grammars: list[str], count: int, most: int, seed: int) -> list[Asked]:
    """Requests over these grammars, each used about equally often; some differ only in their
    seed.
    """
    rng = random.Random(seed)
    chosen = [grammars[i % len(grammars)] for i in range(count)]
    rng.shuffle(chosen)
    return [
        Asked(
            grammar,
            tuple(rng.randrange(3, 64) for _ in range(rng.randint(1, 40))),
            rng.randrange(8),
            rng.randint(1, most),
        )
        for grammar in chosen
    ]


class Local:
    """A constraint followed in this process, as the processes of server.engine.masks follow it."""

    is_pending = False

    def __init__(self, grammars: Grammars, message: protocol.Submit) -> None:
        self.grammars, self.message = grammars, message
        self.failure = ""

    def begin(self, output: list[int]) -> bool:
        try:
            self.follower = self.grammars.constraint(replace(self.message, output=output))
        except ConstraintFailed as error:
            self.failure = str(error)
        return True

    def advance(self, token: int) -> bool:
        assert self.follower is not None, "these requests have no opening"
        try:
            self.follower.advance(token)
        except ConstraintFailed as error:
            self.failure = str(error)
        return True

    def take(self) -> Guidance:
        if self.failure:
            raise ConstraintFailed(self.failure)
        assert self.follower is not None
        return Guidance(self.follower.mask, self.follower.forced)

    def end(self) -> None: ...


class Engine:
    """A core with its scheduler, model and grammars; `crash` replaces it and replays what is
    open.
    """

    def __init__(self, grammars: Grammars, ends: list[int], pages: int) -> None:
        self.grammars, self.ends, self.pages = grammars, ends, pages
        self.open: dict[int, Asked] = {}
        self.outcomes: dict[int, Outcome] = {}
        self._outputs: dict[int, list[int]] = {}
        self.crash()

    def crash(self) -> None:
        layout = one_group(4)
        self.scheduler = Scheduler(
            Limits(self.pages, layout, 4 * self.pages, RUNNING, RUNNING + 64)
        )
        self.core = EngineCore(self.scheduler, GuidedModel(layout))
        for id, asked in list(self.open.items()):
            self._submit(id, asked)

    def submit(self, id: int, asked: Asked) -> None:
        self.open[id], self._outputs[id] = asked, []
        self._submit(id, asked)

    def _submit(self, id: int, asked: Asked) -> None:
        output, sampling = self._outputs[id], Sampling(seed=asked.seed)
        message = protocol.Submit(
            id, [*asked.prompt], output, asked.most, 0, self.ends, sampling, grammar=asked.grammar
        )
        self.scheduler.submit(message, Local(self.grammars, message))

    def step(self) -> None:
        for event in self.core.step():
            if isinstance(event, Failed):
                self._end(event.id, event.reason)
                continue
            assert isinstance(event, Token) and event.index == len(self._outputs[event.id])
            self._outputs[event.id].append(event.token)
            if event.finish is not None:
                self._end(event.id, event.finish)

    def _end(self, id: int, reason: str) -> None:
        del self.open[id]
        self.outcomes[id] = self._outputs.pop(id), reason


def alone(asked: Asked, grammars: Grammars, ends: list[int]) -> Outcome:
    """The outcome of a request in an engine that has served nothing else."""
    engine = Engine(grammars, ends, 4096)
    engine.submit(0, asked)
    while engine.open:
        engine.step()
    return engine.outcomes[0]


def together(
    asked: list[Asked], grammars: Grammars, ends: list[int], seed: int, crashes: int = 0
) -> list[Outcome]:
    """The outcomes in one engine, with random arrivals, a pool too small for all, and crashes."""
    rng, engine, num_submitted, steps = random.Random(seed), Engine(grammars, ends, 400), 0, 0
    crash_at = {rng.randrange(10, 200) for _ in range(crashes)}
    while num_submitted < len(asked) or engine.open:
        while num_submitted < len(asked) and len(engine.open) < RUNNING and rng.random() < 0.7:
            engine.submit(num_submitted, asked[num_submitted])
            num_submitted += 1
        if steps in crash_at:
            engine.crash()
        if engine.scheduler.has_work:
            engine.step()
        steps += 1
    return [engine.outcomes[i] for i in range(len(asked))]


def fresh(grammars: Grammars) -> Grammars:
    """Unused grammars over a tokenizer that was already prepared, as preparing a large one takes
    seconds.
    """
    return Grammars(grammars.tokenizer)


def read_grammars(path: Path, ends: list[int]) -> Grammars:
    """Those of a tokenizer.json."""
    return Grammars(grammar_tokenizer(path.read_text(encoding="utf-8"), ends))
