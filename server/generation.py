"""Generation: a request in, streams of text out. What both HTTP dialects and `onehead generate` share, and the one validator.

It checks a request against what the engine can hold and submits it; server.stream turns what comes back into text. It knows nothing of
HTTP, fields or events.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
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
from server.grammar import GrammarCompiler, Source
from server.metrics import Metrics
from server.stream import Choice, OpenStreams
from server.supervisor import State, Supervisor
from server.text import TextCodec

P = ParamSpec("P")
Value = TypeVar("Value")
TOO_LONG = "context_length_exceeded"

RATE_WINDOW = 64
"""Finished requests over which the drain rate is measured."""
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


def with_choices(request: Request, count: int) -> list[Request]:
    """`count` requests that differ in the number that their draws depend on, and share their prompt."""
    return [replace(request, sampling=structs.replace(request.sampling, choice=choice)) for choice in range(count)]


class Generation:
    """The open streams of one supervisor."""

    def __init__(self, supervisor: Supervisor, codec: TextCodec, metrics: Metrics, max_open: int, grammar_timeout: float = 2.0) -> None:
        self.supervisor = supervisor
        self.codec = codec
        self.metrics = metrics
        self.max_open = max_open
        self.grammar_timeout = grammar_timeout
        self.draining = False
        self.unstarted: dict[int, Choice] = {}
        """The sequences that no engine has begun."""
        self.endings: deque[float] = deque(maxlen=RATE_WINDOW)

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
        return f"onehead-{version('onehead')}-{self.ready.model_type}-{weights}-{self.ready.device}"

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """What ends a text: by the checkpoint's configs and by its tokenizer."""
        return tuple(sorted({*self.ready.end_token_ids, *self.codec.end_token_ids}))

    @property
    def accepting(self) -> bool:
        """Whether a request would be computed now."""
        return self.supervisor.state is State.READY and not self.draining

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
        return await asyncio.to_thread(work, *arguments, **named)

    def start(self, *requests: Request) -> OpenStreams:
        """Checks the sequences of a request against the engine's bounds and submits all of them, or none. Raises InvalidRequest,
        Overloaded or Unavailable.

        Whoever starts streams closes them.
        """
        try:
            if self.draining or self.supervisor.state not in (State.STARTING, State.READY):
                raise Unavailable("the server is shutting down", retry_after=5)
            submits = [self._submission(request) for request in requests]
            if len(requests) > self.max_open:
                raise InvalidRequest(f"{len(requests)} sequences are asked for at once; {self.max_open} is the most", param="n")
            num_open = len(self.supervisor.open)
            if num_open + len(requests) > self.max_open:
                text = f"{num_open} requests are open and {self.max_open} is the most; try again later"
                raise Overloaded(text, self._retry_after())
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise
        for prompt in {id(request.prompt): request.prompt for request in requests}.values():
            self.metrics.prompt_tokens.inc(len(prompt))
        return OpenStreams(self, requests, submits)

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
            end_token_ids=list(self.end_token_ids),
            healed=request.healed,
        )

    def _check_ids(self, request: Request) -> None:
        """Token ids are checked against the logits' width, not the tokenizer's: an id past it would be another row's."""
        vocab_size, sampling = self.ready.vocab_size, request.sampling
        for name, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids),
        ):
            if any(id >= vocab_size for id in ids):
                raise InvalidRequest(f"`{name}` holds a token id that is not below the vocabulary's {vocab_size}", param=name)
        if sampling.top_k > vocab_size:
            raise InvalidRequest(f"`top_k` must be at most the vocabulary's {vocab_size}. Given: {sampling.top_k}", param="top_k")

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.codec, self.ready.vocab_size, self.end_token_ids, self.grammar_timeout)

    async def grammar(self, source: Source | None) -> str:
        """The grammar of what a request asks for, empty for nothing. Raises InvalidRequest."""
        return "" if source is None else await self._compiler.compile(source)

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
            choice = self.unstarted.pop(id, None)
            if choice is not None:
                choice.started = now
                self.metrics.queue_time.observe(now - choice.arrival)

    def raise_if_over(self) -> None:
        """Raises what ended the engine for good, if something has."""
        if self.supervisor.state is State.REFUSED:
            raise (ResourceError if self.supervisor.lacks_resource else ConfigurationError)(self.supervisor.reason)
        if self.supervisor.state is State.GAVE_UP:
            raise EngineGaveUp(self.supervisor.reason)
