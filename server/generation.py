"""Generation: a request in, pieces of text out. What both HTTP dialects and `onehead generate` share.

It checks a request against what the engine can hold, submits it, turns tokens into text, ends it at stop strings, and cancels it when
whoever iterates goes away. Invariant: every stream ends in exactly one piece with `finish`, or in one RequestError. It knows nothing
of HTTP, fields or events.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from server import protocol
from server.errors import ConfigurationError, EngineGaveUp, GenerationFailed, InvalidRequest, Overloaded, Unavailable
from server.metrics import Metrics
from server.supervisor import Delivery, State, Supervisor
from server.text import Detokenizer, StopStrings, TextCodec

RATE_WINDOW = 64
"""Finished requests over which the drain rate is measured."""
LONG_PROMPT_CHARS = 4096
"""Prompts from this length on are tokenized off the event loop."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as every dialect spells it in the end. `max_new_tokens` None: whatever still fits."""

    prompt: list[int]
    sampling: protocol.SamplingParams
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that became certain with it. `finish` is set on the last: length, eos_token or stop_sequence."""

    token: int
    text: str
    logprob: float
    special: bool
    finish: str | None


class Generation:
    """The open streams of one supervisor."""

    def __init__(self, supervisor: Supervisor, codec: TextCodec, metrics: Metrics, max_open: int) -> None:
        self.supervisor = supervisor
        self.codec = codec
        self.metrics = metrics
        self.max_open = max_open
        self.draining = False
        self._arrivals: dict[int, float] = {}
        self._endings: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def ready(self) -> protocol.Ready:
        """The engine's particulars. Raises Unavailable before the first engine is loaded."""
        if self.supervisor.ready is None:
            raise Unavailable("the model is still being loaded", retry_after=1)
        return self.supervisor.ready

    @property
    def accepting(self) -> bool:
        """Whether a request would be computed now."""
        return self.supervisor.state is State.READY and not self.draining

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together: the context, or the pool where that is smaller."""
        return min(self.ready.max_context, self.ready.num_pages * self.ready.page_size)

    def check_codec(self) -> None:
        """Raises ConfigurationError where the tokenizer can give ids that the model has no logits for."""
        if self.codec.largest_id >= self.ready.vocab_size:
            raise ConfigurationError(
                f"tokenizer.json has ids up to {self.codec.largest_id}; config.json says vocab_size {self.ready.vocab_size}"
            )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; long ones without holding up everyone else."""
        if len(text) < LONG_PROMPT_CHARS:
            return self.codec.encode(text)
        return await asyncio.to_thread(self.codec.encode, text)

    def admit(self, request: Request) -> protocol.Submit:
        """Checks a request against the engine's bounds. Raises InvalidRequest, Overloaded or Unavailable."""
        if self.draining or self.supervisor.state not in (State.STARTING, State.READY):
            raise Unavailable("the server is shutting down", retry_after=5)
        max_new_tokens = self._max_new_tokens(request)
        if request.min_new_tokens > max_new_tokens:
            raise InvalidRequest(f"`min_tokens` must be at most the {max_new_tokens} new tokens allowed. Given: {request.min_new_tokens}")
        vocab_size = self.ready.vocab_size
        for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.sampling.logit_bias)):
            if any(id >= vocab_size for id in ids):
                raise InvalidRequest(f"`{name}` holds a token id that is not below the vocabulary's {vocab_size}")
        if request.sampling.top_k > vocab_size:
            raise InvalidRequest(f"`top_k` must be at most the vocabulary's {vocab_size}. Given: {request.sampling.top_k}")
        if len(self.supervisor.open) >= self.max_open:
            raise Overloaded(f"{len(self.supervisor.open)} requests are open, which is the most; try again later", self._retry_after())
        ends = () if request.ignore_eos else (*self.ready.end_token_ids, *self.codec.end_token_ids)
        stop_token_ids = sorted({*request.stop_token_ids, *ends})
        return protocol.Submit(0, request.prompt, [], max_new_tokens, request.min_new_tokens, stop_token_ids, request.sampling)

    def _max_new_tokens(self, request: Request) -> int:
        num_prompt, most = len(request.prompt), self.max_total_tokens
        if num_prompt == 0:
            raise InvalidRequest("`inputs` holds no tokens; at least one is needed to go on from")
        bound = "the model's context" if most == self.ready.max_context else f"the cache's {self.ready.num_pages} pages"
        if num_prompt >= most:
            raise InvalidRequest(f"`inputs` must have less than {most} tokens ({bound}). Given: {num_prompt}")
        if request.max_new_tokens is None:
            return most - num_prompt
        if num_prompt + request.max_new_tokens > most:
            raise InvalidRequest(
                f"`inputs` tokens + `max_new_tokens` must be <= {most} ({bound}). "
                f"Given: {num_prompt} `inputs` tokens and {request.max_new_tokens} `max_new_tokens`"
            )
        return request.max_new_tokens

    def _retry_after(self) -> int:
        """Seconds until about one request will have finished, by the rate at which the last ones did."""
        if len(self._endings) < 2:
            return 1
        return max(1, min(60, round((self._endings[-1] - self._endings[0]) / (len(self._endings) - 1))))

    async def run(self, submit: protocol.Submit, request: Request) -> AsyncIterator[Piece]:
        """The pieces of an admitted request, from submission to its end; leaving the iteration early cancels it."""
        arrival = last = time.monotonic()
        inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        detokenizer, stops = Detokenizer(self.codec), StopStrings(request.stop_strings)
        id = self.supervisor.submit(submit, inbox.put_nowait)
        self._arrivals[id] = arrival
        self.metrics.prompt_tokens.inc(len(submit.prompt))
        outcome = "cancelled"
        try:
            while True:
                delivery = await inbox.get()
                if isinstance(delivery, protocol.Failed):
                    outcome = "failed"
                    raise GenerationFailed(f"Request failed during generation: {delivery.reason}")
                now = time.monotonic()
                self._observe(delivery.index, now - last, now - arrival)
                last = now
                piece = self._piece(delivery, detokenizer, stops, delivery.index + 1 >= request.min_new_tokens)
                if piece.finish is not None:
                    outcome = piece.finish
                    self._endings.append(now)
                    self.metrics.e2e_latency.observe(now - arrival)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self.supervisor.cancel(id)
            self._arrivals.pop(id, None)
            self.metrics.requests.labels(outcome).inc()

    def _observe(self, index: int, since_last: float, since_arrival: float) -> None:
        if index == 0:
            self.metrics.time_to_first_token.observe(since_arrival)
        else:
            self.metrics.inter_token_latency.observe(since_last)

    def _piece(self, token: protocol.Token, detokenizer: Detokenizer, stops: StopStrings, may_stop: bool) -> Piece:
        special = token.token in self.codec.special_ids
        text = "" if special else detokenizer.push(token.token)
        if token.finish is not None:
            text += detokenizer.flush()
        text, stopped = stops.push(text, may_stop)
        finish = "stop_sequence" if stopped else token.finish
        if special:
            text = self.codec.decode([token.token])
        return Piece(token.token, text, token.logprob, special, finish)

    def heard(self, step: protocol.Tokens) -> None:
        """Metrics of an engine's step."""
        self.metrics.step(step.gauges, len(step.tokens))
        now = time.monotonic()
        for id in step.started:
            if id in self._arrivals:
                self.metrics.queue_time.observe(now - self._arrivals[id])

    def raise_if_over(self) -> None:
        """Raises what ended the engine for good, if something has."""
        if self.supervisor.state is State.REFUSED:
            raise ConfigurationError(self.supervisor.reason)
        if self.supervisor.state is State.GAVE_UP:
            raise EngineGaveUp(self.supervisor.reason)
