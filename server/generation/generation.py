"""Generation: validates requests against the limits of the loaded engine and submits them; used by
both HTTP dialects and the commands.

Invariant: no request reaches the engine without these checks. `stream` turns the engine's events
into text. It knows nothing of HTTP, the fields of bodies or server-sent events.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import msgspec

from server import protocol
from server.config import ServerSection
from server.errors import TOO_LONG, BadSize, InvalidRequest, TooLongPrompt, Unavailable
from server.generation.admission import Reservation
from server.generation.clients import Terms
from server.generation.engine_client import EngineClient
from server.generation.price import check_price
from server.generation.request import CLASSIFIES, EMBEDS, GENERATES, Request
from server.generation.stream import OpenStreams
from server.logs import request_id
from server.text.jobs import AnyJob, EncodeChat
from server.text.service import TextService

log = logging.getLogger("onehead.api")

CHARS_PER_TOKEN = 4
DOES = {
    GENERATES: "generates text",
    EMBEDS: "embeds texts (POST /v1/embeddings)",
    CLASSIFIES: "classifies texts (POST /classify)",
}


class Generation:
    """The engine of one client: its facts, the validation of requests, and their submission."""

    def __init__(self, client: EngineClient, texts: TextService, section: ServerSection) -> None:
        self.client = client
        self.texts = texts
        self.codec = texts.texts.codec
        self.section = section

    @property
    def ready(self) -> protocol.Ready:
        """Facts that the engine reported when it had loaded. Raises Unavailable before that."""
        if self.client.ready is None:
            raise Unavailable("the model is still being loaded", retry_after=1)
        return self.client.ready

    @cached_property
    def fingerprint(self) -> str:
        """`system_fingerprint`: version, model type, dtypes, device and kernels, on which an answer
        depends besides its request.
        """
        ready = self.ready
        weights = (
            ready.dtype if ready.quantization == "none" else f"{ready.quantization}-{ready.dtype}"
        )
        cache = "" if ready.kv_dtype == ready.dtype else f"-{ready.kv_dtype}"
        parts = version("onehead"), ready.model_type, weights + cache, ready.device, ready.kernels
        return "-".join(("onehead", *parts))

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence token ids: the union of those in the checkpoint's configs and in its
        tokenizer.
        """
        return tuple(sorted({*self.ready.end_token_ids, *self.codec.end_token_ids}))

    @property
    def max_total_tokens(self) -> int:
        """Largest number of prompt and output tokens of a sequence: the context length, or the KV
        cache's size if that is smaller.
        """
        return self.ready.capacity

    @property
    def can_call(self) -> bool:
        """Whether the model has a format for calls of tools."""
        return self.texts.texts.calls.form is not None

    @property
    def can_fill(self) -> bool:
        """Whether the tokenizer has marks for filling in the middle."""
        return self.texts.texts.fim.marks is not None

    async def tokenize(self, job: AnyJob, client: str, truncated: bool = False) -> Any:
        """The result of a job that makes the prompt of a request. A text that fits no context is
        refused before, unless its ids are `truncated` afterwards. Raises InvalidRequest, Overloaded
        or Unavailable.
        """
        least = -(-job.longest // self.codec.longest_token)
        if not truncated and not isinstance(job, EncodeChat) and least >= self.max_total_tokens:
            given = f"{job.longest} characters, which are at least {least} tokens"
            raise self._too_long_prompt(least, given)
        return await self.texts.run(job, client)

    async def convert(self, job: AnyJob, client: str, terms: Terms) -> Any:
        """The result of a job for a request that starts no sequence. It counts against the client's
        rates, with an estimate of its tokens. Raises InvalidRequest, Overloaded or Unavailable.
        """
        self.client.admission.charge(client, terms, job.num_chars // CHARS_PER_TOKEN)
        return await self.texts.run(job, client)

    def _too_long_prompt(self, num_tokens: int, given: object) -> TooLongPrompt:
        most = self.max_total_tokens
        text = f"`inputs` must have less than {most} tokens ({self._bound}). Given: {given}"
        return TooLongPrompt(text, num_tokens, most - 1)

    @property
    def _bound(self) -> str:
        """What limits `max_total_tokens`, for messages."""
        return (
            "the model's context"
            if self.max_total_tokens == self.ready.max_context
            else f"the cache's {self.ready.num_pages} pages"
        )

    def start(self, requests: Sequence[Request], reservation: Reservation) -> OpenStreams:
        """Validates the sequences of a reserved request and submits all of them, or none. The
        caller must close the returned streams. Raises InvalidRequest, Overloaded or Unavailable.
        """
        try:
            with self.client.admission.counting_refusals():
                submits = [self._submission(request, reservation) for request in requests]
                check_price(submits, self.max_total_tokens)
        except InvalidRequest:  # Its prompts have been tokenized all the same.
            reservation.usage.tokens.level -= sum(len(request.prompt) for request in requests)
            raise
        if restored := reservation.restored.submits:
            # With the seeds that were drawn, and the ids of a template that may show the time.
            requests = [
                replace(request, prompt=old.prompt, sampling=old.sampling)
                for request, old in zip(requests, restored, strict=True)
            ]
            submits = [
                msgspec.structs.replace(old, share=new.share)
                for old, new in zip(restored, submits, strict=True)
            ]
        streams = OpenStreams(self.client, self.codec, requests, submits, reservation)
        if self.section.log_prompts:
            for prompt in {id(request.prompt): request.prompt for request in requests}.values():
                log.info("prompt", extra={"fields": {"prompt": self.codec.decode(prompt)}})
        return streams

    def _submission(self, request: Request, reservation: Reservation) -> protocol.Submit:
        self.check_kind(request.wanted)
        max_new_tokens, terms = self.max_new_tokens(request), reservation.terms
        if request.priority and terms.priority is False:
            text = (
                "`priority` may be set only with a key that the keys' file gives `priority = true`"
            )
            raise InvalidRequest(text, param="priority")
        rank = request.priority if terms.priority else 0
        share = protocol.Share(reservation.client, terms.weight, terms.max_running or 0, rank)
        ends = set() if request.ignore_eos else {*self.end_token_ids}
        # A stop string that is one special token, which adds no text in which it could be found.
        ends |= self.codec.special_ids.intersection(map(self.codec.token_id, request.stop_strings))
        stop_token_ids = sorted({*request.stop_token_ids, *ends})
        _check_ends(request, max_new_tokens, stop_token_ids)
        # Further choices of a prompt share its ids and those of all fields.
        if request.sampling.choice == 0:
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
            opening=request.opening,
            healed=request.healed,
            salt=f"{reservation.caller}:{request.salt}",
            share=share,
            request=request_id.get(),
        )

    def check_kind(self, wanted: str) -> None:
        """Raises InvalidRequest unless the model does this: GENERATES, EMBEDS or CLASSIFIES."""
        does = GENERATES
        if self.ready.vector_size:
            does = CLASSIFIES if self.ready.classes else EMBEDS
        if wanted != does:
            raise InvalidRequest(f"this model does not support {wanted}: it {DOES[does]}")

    def _check_ids(self, request: Request) -> None:
        """Checks token ids against the width of the logits, which may differ from the tokenizer's:
        a larger id would index another row.
        """
        vocab_size, sampling = self.ready.vocab_size, request.sampling
        for name, ids in (
            ("prompt" if request.wanted == GENERATES else "input", request.prompt),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            (
                "allowed_token_ids",
                (int.from_bytes(sampling.allowed_tokens, "little").bit_length() - 1,),
            ),
            ("logprob_token_ids", sampling.logprob_token_ids),
        ):
            if (largest := max(ids, default=0)) >= vocab_size:
                raise InvalidRequest(
                    f"`{name}` holds the token id {largest}, which is not below the vocabulary's "
                    f"{vocab_size}",
                    param=name,
                )
        if sampling.top_k > vocab_size:
            raise InvalidRequest(
                f"`top_k` must be at most the vocabulary's {vocab_size}. Given: {sampling.top_k}",
                param="top_k",
            )

    def within_context(self, request: Request, most: int | None) -> Request:
        """The request with up to `most` new tokens, or as many as the context holds if that is
        less; all that it holds for None and -1.
        """
        left = max(1, self.max_total_tokens - len(request.prompt))
        return replace(request, max_new_tokens=None if most in (None, -1) else min(most, left))

    def max_new_tokens(self, request: Request) -> int:
        """Most tokens to generate for a request. Raises InvalidRequest where its prompt is empty or
        they do not fit.
        """
        num_prompt, most = len(request.prompt), self.max_total_tokens
        if num_prompt == 0:
            raise BadSize(
                "`inputs` holds no tokens; at least one is needed to go on from", param="inputs"
            )
        if request.wanted != GENERATES:
            if num_prompt > most:
                raise BadSize(
                    f"an input has {num_prompt} tokens; at most {most} are allowed "
                    f"({self._bound}): shorten it, or have it cut with `truncate`",
                    param="input",
                    code=TOO_LONG,
                )
            return 1
        if num_prompt >= most:
            raise self._too_long_prompt(num_prompt, num_prompt)
        if request.max_new_tokens is None:
            return most - num_prompt
        if request.max_new_tokens == 0:
            return (
                1  # The engine samples a token after every prompt; ChoiceDetokenizer leaves it out.
            )
        if num_prompt + request.max_new_tokens > most:
            raise BadSize(
                f"`inputs` tokens + `max_new_tokens` must be <= {most} ({self._bound}). "
                f"Given: {num_prompt} `inputs` tokens and {request.max_new_tokens} "
                "`max_new_tokens`",
                param="max_new_tokens",
                code=TOO_LONG,
            )
        return request.max_new_tokens


def _check_ends(request: Request, max_new_tokens: int, stop_token_ids: list[int]) -> None:
    """Raises InvalidRequest where fields of a request contradict each other about where its text
    ends.
    """
    if request.min_new_tokens > max_new_tokens:
        raise InvalidRequest(
            f"`min_tokens` must be at most the {max_new_tokens} new tokens allowed. Given: "
            f"{request.min_new_tokens}",
            param="min_tokens",
        )
    # Before its opening the text is free; the calls that may follow end it.
    if request.grammar and (
        (request.min_new_tokens and request.opening is None) or request.ignore_eos
    ):
        raise InvalidRequest(
            "`min_tokens` and `ignore_eos` cannot be combined with a grammar, as calls of "
            "`tools` have; it decides where text ends"
        )
    allowed = int.from_bytes(request.sampling.allowed_tokens, "little")
    if allowed and request.grammar:
        raise InvalidRequest(
            "`allowed_token_ids` cannot be combined with a grammar, as calls of `tools` have",
            param="allowed_token_ids",
        )
    ends = int.from_bytes(protocol.bitmap(stop_token_ids), "little")
    if allowed and request.min_new_tokens and not allowed & ~ends:
        raise InvalidRequest(
            "`allowed_token_ids` holds only tokens that end the text, and `min_tokens` forbids "
            "them",
            param="min_tokens",
        )
