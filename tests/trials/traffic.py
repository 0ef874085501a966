"""Mixed traffic for the soak: heavy-tailed requests of both dialects, and among them clients that
leave, dawdle, come back or ask wrongly.

Invariant: every request ends in one Outcome, which says whether what came is what that kind of
client should get. It draws from the generator it is given and from nothing else.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from commands.bench.bench import prompt_text
from tests.support.live import ANSWER_SECONDS, Answer, Ask, Reply, ask, exchange, receive
from tests.support.wire import http_request

SHARES = {"plain": 0.90, "canary": 0.05, "leaves": 0.01, "slow": 0.01, "cut": 0.02, "wrong": 0.01}
MOST_WORDS, MOST_TOKENS = 600, 256
SLOW_BUFFER, SLOW_PAUSE = 4096, 0.1
FULL = "HTTP 429"

WRONG: tuple[bytes, ...] = (
    http_request("POST", "/generate", {"inputs": "x", "parameters": {"temperature": -1}}),
    http_request("POST", "/generate", {"inputs": "x", "parameters": {"temprature": 1}}),
    http_request("POST", "/generate_stream", {"inputs": ""}),
    http_request("POST", "/generate", {"inputs": "def f(" * 20_000}),
    http_request("POST", "/v1/completions", {"prompt": "x", "max_tokens": -2}),
    http_request("POST", "/v1/completions", {"prompt": "x", "model": "nobody"}),
    http_request("POST", "/v1/completions", {"prompt": "x", "temperature": float("nan")}),
    http_request("POST", "/v1/completions", {"prompt": "x", "resumable": True}),
    http_request("GET", "/v1/streams/nothing-of-this-name"),
    http_request("GET", "/generate"),
    http_request("POST", "/v1/completions", {"prompt": "x"}).replace(
        b"application/json", b"text/plain"
    ),
    b"NOT HTTP\r\n\r\n",
)
"""Each must be answered with a 4xx and a JSON object that has an error."""


@dataclass(slots=True)
class Outcome:
    """What became of one request: `word` counts it, `problem` says where it is not what it should
    be. Times count from when it was due.
    """

    kind: str
    word: str
    problem: str | None = None
    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


Send = Callable[[float], Coroutine[Any, Any, Outcome]]


class Traffic:
    """Requests for one server. `canaries` are answers whose questions are asked again and again."""

    def __init__(self, port: int, seed: int, canaries: list[Answer]) -> None:
        self.port = port
        self.rng = random.Random(seed)
        self.canaries = canaries

    def question(self) -> Ask:
        """Lengths have Pareto tails, cut where the context of the embedded model ends."""
        rng = self.rng
        words = min(MOST_WORDS, int(6 * rng.paretovariate(1.1)))
        tokens = min(MOST_TOKENS, int(8 * rng.paretovariate(1.2)))
        seed = None if rng.random() < 0.5 else rng.randrange(2**31)
        return Ask(rng.choice(("tgi", "openai")), prompt_text(rng, words), tokens, seed)

    def request(self) -> Send:
        """The next request, drawn now; called with the time at which it is due, it is sent."""
        rng = self.rng
        (kind,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
        if kind == "wrong":
            wrong = rng.choice(WRONG)
            return lambda due: self._wrong(wrong)
        if kind == "canary":
            oracle = rng.choice(self.canaries)
            return lambda due: self._canary(oracle, due)
        question = self.question()
        if kind == "leaves":
            patience = rng.uniform(0, 1.0)
            return lambda due: self._leaves(question, patience)
        if kind == "slow":
            return lambda due: self._slow(question, due)
        if kind == "cut":
            cuts = sorted(
                rng.sample(range(question.tokens), min(question.tokens, rng.randint(1, 3)))
            )
            return lambda due: self._cut(replace(question, resumable=True), cuts, due)
        return lambda due: self.plain(question, due)

    async def plain(self, question: Ask, due: float) -> Outcome:
        return _judged("plain", await ask(self.port, question), due)

    async def _canary(self, oracle: Answer, due: float) -> Outcome:
        answer = await ask(self.port, oracle.ask)
        outcome = _judged("canary", answer, due)
        if outcome.problem is None and outcome.word == "whole":
            outcome.problem = answer.problem(oracle)
        return outcome

    async def _leaves(self, question: Ask, patience: float) -> Outcome:
        """Whatever the request has come to by then: queued, in its prompt, in mid-answer or
        over.
        """
        asking = asyncio.create_task(ask(self.port, question))
        await asyncio.wait([asking], timeout=patience)
        if asking.done():
            return _judged("leaves", await asking, None)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return Outcome("leaves", "left")

    async def _slow(self, question: Ask, due: float) -> Outcome:
        """Takes its events one by one, with a pause after each, through buffers that hold
        little.
        """
        answer = Answer(question, sent=time.perf_counter())
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                exchange(self.port, question.request(), SLOW_BUFFER) as reply,
            ):
                answer.status = reply.status
                if reply.status != 200:
                    raise ValueError(f"HTTP {reply.status}")
                async for event in reply.events():
                    if event.data is not None:
                        answer.take(event)
                        await asyncio.sleep(SLOW_PAUSE)
        except (OSError, EOFError, ValueError, KeyError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
        outcome = _judged("slow", answer, due)
        # Its gaps are its own doing.
        return replace(outcome, gaps=[])

    async def _cut(self, question: Ask, cuts: list[int], due: float) -> Outcome:
        """Loses its connection where it has so many tokens, and goes on after the last event that
        it saw.
        """
        answer = Answer(question, sent=time.perf_counter())
        request, stream_id = question.request(), ""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for cut in [*cuts, None]:
                    async with exchange(self.port, request) as reply:
                        if reply.status == 200:
                            stream_id = reply.headers["x-stream-id"]
                        await _receive_up_to(reply, answer, cut if stream_id else None)
                    headers = {"last-event-id": answer.event_ids[-1]} if answer.event_ids else None
                    request = http_request("GET", f"/v1/streams/{stream_id}", headers=headers)
        except (OSError, EOFError, ValueError, KeyError) as error:
            answer.failure = answer.failure or f"{type(error).__name__}: {error}"
        if answer.event_ids != [
            f"{stream_id}.{number}" for number in range(1, len(answer.event_ids) + 1)
        ]:
            answer.failure = answer.failure or f"event ids {answer.event_ids}"
        return replace(_judged("cut", answer, due), gaps=[])

    async def _wrong(self, request: bytes) -> Outcome:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), exchange(self.port, request) as reply:
                body = json.loads(await reply.body())
        except (OSError, EOFError, ValueError) as error:
            return Outcome("wrong", "failed", f"{request[:60]!r}: {type(error).__name__}: {error}")
        good = 400 <= reply.status < 500 and "error" in body
        return Outcome(
            "wrong", "refused", None if good else f"{request[:60]!r}: HTTP {reply.status}"
        )


class _Cut(Exception):
    """The moment has come."""


async def _receive_up_to(reply: Reply, answer: Answer, cut: int | None) -> None:
    def on_event(answer: Answer) -> None:
        if cut is not None and len(answer.ids) >= cut:
            raise _Cut

    with suppress(_Cut):
        if cut == 0:
            raise _Cut
        await receive(reply, answer, on_event)


def _judged(kind: str, answer: Answer, due: float | None) -> Outcome:
    """Whole, full (429), or a problem; all who ask here ask for a number of tokens, and must get
    it.
    """
    if answer.failure is None and len(answer.ids) != answer.ask.tokens:
        answer.failure = f"{len(answer.ids)} tokens instead of {answer.ask.tokens}"
    if answer.failure is not None:
        full = FULL in answer.failure
        return Outcome(kind, "full" if full else "failed", None if full else answer.failure)
    first = answer.times[0] - due if due is not None else None
    return Outcome(
        kind,
        "whole",
        None,
        first,
        [later - earlier for earlier, later in pairwise(answer.times)],
        len(answer.ids),
    )
