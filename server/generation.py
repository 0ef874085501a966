"""Generation: a request in, pieces of text out. What both HTTP dialects and `onehead generate` share.

It checks a request against what the engine can hold, submits it, turns tokens into text, ends it at stop strings, and cancels it when
whoever iterates goes away. Invariant: every stream ends in exactly one piece with `finish`, or in one RequestError. It knows nothing
of HTTP, fields or events.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from server import protocol
from server.errors import (
    ConfigurationError,
    EngineGaveUp,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestError,
    ResourceError,
    Unavailable,
)
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
    """One token and the text that became certain with it. `finish` is set on the last: length, eos_token or stop_sequence.

    A special token is no text: its name is `special_text`, and `text` at most what was held back before it.
    """

    token: int
    text: str
    special_text: str
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
        self.unstarted: dict[int, float] = {}
        """When each sequence arrived that no engine has begun."""
        self.endings: deque[float] = deque(maxlen=RATE_WINDOW)

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

    def start(self, request: Request) -> "OpenStream":
        """Checks a request against the engine's bounds and submits it. Raises InvalidRequest, Overloaded or Unavailable.

        Whoever starts a stream closes it.
        """
        try:
            submit = self._submission(request)
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise
        self.metrics.prompt_tokens.inc(len(submit.prompt))
        return OpenStream(self, submit, request)

    def _submission(self, request: Request) -> protocol.Submit:
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
        if len(self.endings) < 2:
            return 1
        return max(1, min(60, round((self.endings[-1] - self.endings[0]) / (len(self.endings) - 1))))

    def heard(self, step: protocol.Tokens) -> None:
        """Metrics of an engine's step."""
        self.metrics.step(step.gauges, len(step.tokens))
        now = time.monotonic()
        for id in step.started:
            arrival = self.unstarted.pop(id, None)
            if arrival is not None:
                self.metrics.queue_time.observe(now - arrival)

    def raise_if_over(self) -> None:
        """Raises what ended the engine for good, if something has."""
        if self.supervisor.state is State.REFUSED:
            raise (ResourceError if self.supervisor.lacks_resource else ConfigurationError)(self.supervisor.reason)
        if self.supervisor.state is State.GAVE_UP:
            raise EngineGaveUp(self.supervisor.reason)


class OpenStream:
    """A submitted request, as an iterator over its pieces. `close` cancels what is left of it; closing twice is fine."""

    def __init__(self, generation: Generation, submit: protocol.Submit, request: Request) -> None:
        self.generation = generation
        self.request = request
        self._arrival = self._last = time.monotonic()
        self._inbox: asyncio.Queue[tuple[Delivery, float]] = asyncio.Queue()
        self._detokenizer = Detokenizer(generation.codec)
        self._stops = StopStrings(request.stop_strings)
        self._outcome: str | None = None
        self.id = generation.supervisor.submit(submit, self._deliver)
        generation.unstarted[self.id] = self._arrival

    def _deliver(self, delivery: Delivery) -> None:
        """Takes the times as tokens come, not as the client reads them."""
        now = time.monotonic()
        metrics = self.generation.metrics
        if isinstance(delivery, protocol.Token):
            if delivery.index == 0:
                metrics.time_to_first_token.observe(now - self._arrival)
            else:
                metrics.inter_token_latency.observe(now - self._last)
            self._last = now
        self._inbox.put_nowait((delivery, now))

    def __aiter__(self) -> "OpenStream":
        return self

    async def __anext__(self) -> Piece:
        """The next piece. Raises GenerationFailed where the engine could not go on."""
        if self._outcome is not None:
            raise StopAsyncIteration
        delivery, came = await self._inbox.get()
        if isinstance(delivery, protocol.Failed):
            self._end("failed")
            raise GenerationFailed(f"Request failed during generation: {delivery.reason}")
        piece = self._piece(delivery)
        if piece.finish is not None:
            self.generation.metrics.e2e_latency.observe(came - self._arrival)
            self.generation.endings.append(came)
            self._end(piece.finish)
        return piece

    def _piece(self, token: protocol.Token) -> Piece:
        codec = self.generation.codec
        special = token.token in codec.special_ids
        text = "" if special else self._detokenizer.push(token.token)
        if token.finish is not None:
            text += self._detokenizer.flush()
        text, stopped = self._stops.push(text, search=token.index + 1 >= self.request.min_new_tokens)
        finish = "stop_sequence" if stopped else token.finish
        return Piece(token.token, text, codec.decode([token.token]) if special else "", token.logprob, special, finish)

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self.generation.supervisor.cancel(self.id)
            self.generation.unstarted.pop(self.id, None)
            self.generation.metrics.requests.labels(outcome).inc()

    def close(self) -> None:
        """Cancels the request where it has not ended."""
        self._end("cancelled")
