"""Generation: a request in, streams of text out. What both HTTP dialects and `onehead generate` share, and the one validator.

It checks a request against what the engine can hold and submits it; `stream` turns what comes back into text. It knows nothing of
HTTP, fields or events.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from typing import ParamSpec, TypeVar

from msgspec import structs

from server import protocol
from server.errors import (
    ConfigurationError,
    EngineGaveUp,
    InvalidRequest,
    Overloaded,
    RequestError,
    ResourceError,
    Unavailable,
)
from server.generation.stream import RETRY_SECONDS, Choice, OpenStreams
from server.metrics import Metrics
from server.supervision.supervisor import LIVE, State, Supervisor
from server.text.codec import TextCodec
from server.text.grammar import GrammarCompiler, Source
from server.text.threads import LongTexts

log = logging.getLogger("onehead.api")

P = ParamSpec("P")
Value = TypeVar("Value")
TOO_LONG = "context_length_exceeded"

RATE_WINDOW = 64
"""Finished requests from whose running times the drain rate is estimated."""
NUMERICAL_ERRORS, SICK_SECONDS = 10, 60.0
"""So many requests that fail of their numbers within so many seconds make the server not ready."""
LONG_PROMPT_CHARS = 4096
"""Prompts from this length on are tokenized off the event loop."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as every dialect spells it in the end. Requests of one call that share a prompt share the list.

    `max_new_tokens` None: whatever still fits. `keep_stop`: a matched stop string stays in the text. `keep_stop_token`: so does the name
    of the token that ends it.
    """

    prompt: list[int]
    sampling: protocol.SamplingParams
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_stop: bool = True
    keep_stop_token: bool = False
    skip_special_tokens: bool = True
    num_top: int = 0
    score_prompt: bool = False
    grammar: str = ""
    healed: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: str = ""
    """Requests with another one share nothing that was computed."""


def with_choices(request: Request, count: int) -> list[Request]:
    """`count` requests that differ in the number that their draws depend on, and share their prompt."""
    return [replace(request, sampling=structs.replace(request.sampling, choice=choice)) for choice in range(count)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is taken at once, how long preparing a request may take, in seconds, and how schemas are read."""

    max_open: int
    max_running: int
    max_waiting_tokens: int = 1_000_000
    max_queue_wait: float = 600.0
    grammar_seconds: float = 2.0
    tokenize_seconds: float = 5.0
    open_objects: bool = False


class Place:
    """Counts a request that has been let in, until its sequences count themselves or it ends without any."""

    def __init__(self, generation: "Generation", principal: str) -> None:
        self.principal = principal
        self.choices: list[Choice] = []
        """The sequences that were started for the request."""
        self._generation: Generation | None = generation
        generation.num_entering += 1

    def release(self) -> None:
        """Gives the place back, once."""
        if self._generation is not None:
            self._generation.num_entering -= 1
            self._generation = None


current_place: ContextVar[Place | None] = ContextVar("place", default=None)
"""Of the request that is being served."""


class Generation:
    """The open streams of one supervisor."""

    def __init__(self, supervisor: Supervisor, codec: TextCodec, metrics: Metrics, bounds: Bounds, log_prompts: bool = False) -> None:
        self.supervisor = supervisor
        self.codec = codec
        self.metrics = metrics
        self.bounds = bounds
        self.log_prompts = log_prompts
        self.draining = False
        self.num_entering = 0
        """Requests that have been let in and have no sequences yet."""
        self._long_texts = LongTexts(bounds.tokenize_seconds)
        self._numerical_errors: deque[float] = deque(maxlen=NUMERICAL_ERRORS)
        self.unstarted: dict[int, Choice] = {}
        """The sequences that no engine has begun."""
        self.waiting_tokens = 0
        """Prompt tokens of these."""
        self.run_seconds: deque[float] = deque(maxlen=RATE_WINDOW)
        """For how long the last requests were computed."""

    @property
    def ready(self) -> protocol.Ready:
        """The engine's particulars. Raises Unavailable before the first engine is loaded."""
        if self.supervisor.ready is None:
            raise Unavailable("the model is still being loaded", retry_after=1)
        return self.supervisor.ready

    @cached_property
    def fingerprint(self) -> str:
        """What an answer depends on besides its request: build, model, numerics."""
        weights = self.ready.dtype if self.ready.quantization == "none" else f"{self.ready.quantization}-{self.ready.dtype}"
        cache = "" if self.ready.kv_dtype == self.ready.dtype else f"-{self.ready.kv_dtype}"
        return f"onehead-{version('onehead')}-{self.ready.model_type}-{weights}{cache}-{self.ready.device}-{self.ready.kernels}"

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """What ends a text: by the checkpoint's configs and by its tokenizer."""
        return tuple(sorted({*self.ready.end_token_ids, *self.codec.end_token_ids}))

    @property
    def accepting(self) -> bool:
        """Whether a request would be computed now."""
        errors = self._numerical_errors
        sick = len(errors) == NUMERICAL_ERRORS and time.monotonic() - errors[0] < SICK_SECONDS
        return self.supervisor.state is State.READY and not self.draining and not sick

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self.supervisor.open)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together: the context, or the pool where that is smaller."""
        return self.ready.capacity

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return await self.tokenizing(len(text), self.codec.encode, text)

    async def tokenizing(self, num_chars: int, work: Callable[P, Value], *arguments: P.args, **named: P.kwargs) -> Value:
        """The result of `work`, which tokenizes about `num_chars` characters: where they are many, without holding up everyone else."""
        if num_chars < LONG_PROMPT_CHARS:
            return work(*arguments, **named)
        return await self._long_texts.tokenized(partial(work, *arguments, **named))

    def start(self, *requests: Request) -> OpenStreams:
        """Checks the sequences of a request against the engine's bounds and submits all of them, or none. Raises InvalidRequest,
        Overloaded or Unavailable.

        Whoever starts streams closes them.
        """
        try:
            submits = [self._submission(request) for request in requests]
            if len(requests) > self.bounds.max_open:
                raise InvalidRequest(f"{len(requests)} sequences are asked for at once; {self.bounds.max_open} is the most", param="n")
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise
        place = current_place.get()
        if place is not None:
            place.release()  # The sequences themselves are counted from here on.
        self.check_room(len(requests), sum(len(request.prompt) for request in requests))
        for prompt in {id(request.prompt): request.prompt for request in requests}.values():
            self.metrics.prompt_tokens.inc(len(prompt))
            if self.log_prompts:
                log.info("prompt", extra={"fields": {"prompt": self.codec.decode(prompt)}})
        streams = OpenStreams(self, requests, submits)
        if place is not None:
            place.choices += streams.choices
        return streams

    def take_place(self, principal: str) -> "Place":
        """A place for a request whose sequences are not known yet: so many read at once must not all find the last one free. Raises
        Unavailable or Overloaded. Whoever asks as another `principal` shares nothing that is computed.
        """
        self.check_room()
        return Place(self, principal)

    def check_room(self, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises Unavailable or Overloaded where so much more cannot be taken now."""
        try:
            self._check_room(num_sequences, num_tokens)
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise

    def _check_room(self, num_sequences: int, num_tokens: int) -> None:
        if self.draining or self.supervisor.state not in LIVE:
            raise Unavailable("the server is shutting down", retry_after=RETRY_SECONDS, code="server_shutting_down")
        if self.supervisor.lost:
            raise Unavailable("the engine is not back yet; try again later", retry_after=RETRY_SECONDS, code="engine_unavailable")
        most, most_tokens, num_open = self.bounds.max_open, self.bounds.max_waiting_tokens, self.num_open + self.num_entering
        if num_open + num_sequences > most:
            raise Overloaded(
                f"{num_open} requests are open and {most} is the most; try again later", self._retry_after(), code="too_many_requests"
            )
        # A request by itself may be as long as it likes: it is one too many only behind others.
        if self.waiting_tokens and self.waiting_tokens + num_tokens > most_tokens:
            text = f"{self.waiting_tokens} prompt tokens wait and {most_tokens} is the most; try again later"
            raise Overloaded(text, self._retry_after(), code="too_many_waiting_tokens")
        seconds = self._queue_seconds
        if seconds > self.bounds.max_queue_wait:
            text = f"a request would wait for about {seconds:.0f} s and {self.bounds.max_queue_wait:g} s is the most; try again later"
            raise Overloaded(text, self._retry_after(), code="queue_too_long")

    def _submission(self, request: Request) -> protocol.Submit:
        max_new_tokens = self._max_new_tokens(request)
        if request.min_new_tokens > max_new_tokens:
            raise InvalidRequest(
                f"`min_tokens` must be at most the {max_new_tokens} new tokens allowed. Given: {request.min_new_tokens}", param="min_tokens"
            )
        if request.grammar and (request.min_new_tokens or request.ignore_eos):
            raise InvalidRequest("`min_tokens` and `ignore_eos` cannot be combined with a grammar, which decides where the text ends")
        stop_token_ids = sorted({*request.stop_token_ids, *(() if request.ignore_eos else self.end_token_ids)})
        allowed = request.sampling.allowed_token_ids
        if allowed and request.grammar:
            raise InvalidRequest("`allowed_token_ids` cannot be combined with a grammar", param="allowed_token_ids")
        if allowed and request.min_new_tokens and set(allowed) <= set(stop_token_ids):
            raise InvalidRequest(
                "`allowed_token_ids` holds only tokens that end the text, and `min_tokens` forbids them", param="min_tokens"
            )
        self._check_ids(request)
        place = current_place.get()
        return protocol.Submit(
            id=0,
            prompt=request.prompt,
            output=[],
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            stop_token_ids=stop_token_ids,
            sampling=request.sampling,
            priority=request.priority,
            num_top=request.num_top,
            score_prompt=request.score_prompt,
            grammar=request.grammar,
            healed=request.healed,
            salt=f"{place.principal if place else ''}:{request.salt}",
        )

    def _check_ids(self, request: Request) -> None:
        """Token ids are checked against the logits' width, not the tokenizer's: an id past it would be another row's."""
        vocab_size, sampling = self.ready.vocab_size, request.sampling
        for name, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("logprob_token_ids", sampling.logprob_token_ids),
        ):
            if (unknown := next((id for id in ids if id >= vocab_size), None)) is not None:
                raise InvalidRequest(f"`{name}` holds the token id {unknown}, which is not below the vocabulary's {vocab_size}", param=name)
        if sampling.top_k > vocab_size:
            raise InvalidRequest(f"`top_k` must be at most the vocabulary's {vocab_size}. Given: {sampling.top_k}", param="top_k")

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Raises ConfigurationError."""
        return GrammarCompiler(self.codec, self.bounds.grammar_seconds, self.bounds.open_objects)

    async def grammar(self, source: Source | None) -> str:
        """The grammar of what a request asks for, empty for nothing. Raises InvalidRequest."""
        return "" if source is None else await self.compiler.compile(source)

    def _max_new_tokens(self, request: Request) -> int:
        num_prompt, most = len(request.prompt), self.max_total_tokens
        if num_prompt == 0:
            raise InvalidRequest("`inputs` holds no tokens; at least one is needed to go on from", param="inputs")
        bound = "the model's context" if most == self.ready.max_context else f"the cache's {self.ready.num_pages} pages"
        if num_prompt >= most:
            raise InvalidRequest(
                f"`inputs` must have less than {most} tokens ({bound}). Given: {num_prompt}", param="inputs", code=TOO_LONG
            )
        if request.max_new_tokens is None:
            return most - num_prompt
        if request.max_new_tokens == 0:
            return 1  # The engine draws behind every prompt; the stream leaves that token out.
        if num_prompt + request.max_new_tokens > most:
            raise InvalidRequest(
                f"`inputs` tokens + `max_new_tokens` must be <= {most} ({bound}). "
                f"Given: {num_prompt} `inputs` tokens and {request.max_new_tokens} `max_new_tokens`",
                param="max_new_tokens",
                code=TOO_LONG,
            )
        return request.max_new_tokens

    @property
    def _queue_seconds(self) -> float:
        """Seconds until those for whom there is no place will have started, at the rate at which requests end: so many at once, each in so
        long.
        """
        if not self.run_seconds:
            return 0.0
        num_ahead = max(0, self.num_open - self.bounds.max_running)
        return sum(self.run_seconds) / len(self.run_seconds) / self.bounds.max_running * num_ahead

    def _retry_after(self) -> int:
        """That, and up to a quarter more, so that those who are sent away do not come back together."""
        return max(1, min(60, round(self._queue_seconds * random.uniform(1.0, 1.25))))

    def numerical_error(self) -> None:
        """A request failed of numbers that are not finite. Of many in a row something is wrong here, and no more should be sent."""
        self._numerical_errors.append(time.monotonic())

    def heard(self, news: protocol.Tokens | protocol.Started) -> None:
        """Metrics of what an engine says."""
        if isinstance(news, protocol.Tokens):
            self.metrics.step(news.gauges, len(news.tokens))
            return
        now = time.monotonic()
        for id, num_cached in zip(news.ids, news.cached, strict=True):
            choice = self.begun(id)
            if choice is not None:
                choice.started, choice.num_cached = now, num_cached
                self.metrics.queue_time.observe(now - choice.arrival)

    def wait(self, choice: Choice) -> None:
        """A sequence is submitted."""
        self.unstarted[choice.id] = choice
        self.waiting_tokens += len(choice.request.prompt)

    def begun(self, id: int) -> Choice | None:
        """A sequence waits no longer, if it still did."""
        choice = self.unstarted.pop(id, None)
        if choice is not None:
            self.waiting_tokens -= len(choice.request.prompt)
        return choice

    def raise_if_over(self) -> None:
        """Raises what ended the engine for good, if something has."""
        if self.supervisor.state is State.REFUSED:
            raise (ResourceError if self.supervisor.lacks_resource else ConfigurationError)(self.supervisor.reason)
        if self.supervisor.state is State.GAVE_UP:
            raise EngineGaveUp(self.supervisor.reason)
