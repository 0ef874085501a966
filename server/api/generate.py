"""The TGI dialect: POST /generate, /generate_stream and /, GET /info. Fields, events and errors as text-generation-inference's
clients know them; vLLM's names inside `parameters` where TGI has none.
"""

import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server import protocol
from server.api import sse
from server.api.body import read_model
from server.api.disconnect import unless_disconnected
from server.config import ServerSection
from server.errors import InvalidRequest, RequestError
from server.generation import Generation, Piece, Request

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Nothing = Literal[None]
Value = TypeVar("Value")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


class Parameters(BaseModel):
    """`parameters` of a request. Null is the default everywhere."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: float | None = Field(default=None, gt=0, le=2)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_new_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    stop: list[StopString] | None = Field(default=None, fail_fast=True)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    ignore_eos: bool | None = None
    truncate: int | None = Field(default=None, ge=1, lt=2**31)
    return_full_text: bool | None = None
    details: bool | None = None
    # What clients send as a matter of course and what changes nothing: accepted at that value alone.
    watermark: Literal[False] | None = None
    best_of: int | None = Field(default=None, ge=1, le=1)
    top_n_tokens: int | None = Field(default=None, ge=0, le=0)
    decoder_input_details: Literal[False] | None = None
    grammar: Nothing = None
    adapter_id: Nothing = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Parameters":
        if self.min_tokens and self.max_new_tokens and self.min_tokens > self.max_new_tokens:
            raise ValueError(f"`parameters.min_tokens` must be <= `max_new_tokens` {self.max_new_tokens}. Given: {self.min_tokens}")
        for key in self.logit_bias or {}:
            if not _TOKEN_ID.fullmatch(key):
                raise ValueError("`parameters.logit_bias` must have token ids as keys: up to 9 decimal digits, no leading zero")
        return self

    @property
    def samples(self) -> bool:
        """TGI's rule: sampling is asked for by name, or by any value that only sampling could honour."""
        warped = any(value not in (None, 1.0) for value in (self.temperature, self.top_p, self.typical_p))
        return bool(self.do_sample) or warped or (self.top_k or 0) > 0 or bool(self.min_p)


class GenerateBody(BaseModel):
    """The body of all three routes; `stream` decides on /generate and /."""

    model_config = ConfigDict(extra="forbid")

    inputs: str = Field(min_length=1, max_length=2**24)
    parameters: Parameters | None = None
    stream: bool | None = None


class TgiRoutes:
    """The dialect over one Generation."""

    def __init__(self, generation: Generation, section: ServerSection, model_id: str, version: str) -> None:
        self.generation = generation
        self.section = section
        self.model_id = model_id
        self.version = version

    def router(self) -> APIRouter:
        router = APIRouter(tags=["text-generation-inference"])
        schema = {"requestBody": {"content": {"application/json": {"schema": GenerateBody.model_json_schema()}}, "required": True}}
        errors: dict[int | str, dict[str, Any]] = {
            status: {"description": text}
            for status, text in {
                400: "not JSON",
                413: "body too large",
                415: "not application/json",
                422: "a field that is unknown, of the wrong type or out of bounds",
                424: "generation failed",
                429: "too many open requests",
                503: "not ready",
            }.items()
        }
        for path, handler in (("/generate", self.generate), ("/generate_stream", self.generate_stream), ("/", self.root)):
            router.add_api_route(path, handler, methods=["POST"], responses=errors, openapi_extra=schema, response_class=Response)
        router.add_api_route("/info", self.info, methods=["GET"])
        return router

    async def generate(self, http: HttpRequest) -> Response:
        """Text for a prompt: one JSON object, or server-sent events with `"stream": true`."""
        body = await self._read(http)
        return await self._answer(http, body, stream=bool(body.stream), echo=False)

    async def generate_stream(self, http: HttpRequest) -> Response:
        """Text for a prompt, as server-sent events."""
        body = await self._read(http)
        if body.stream is False:
            with _in_tgi_words():
                raise InvalidRequest("`stream` cannot be false on /generate_stream; use /generate")
        return await self._answer(http, body, stream=True, echo=False)

    async def root(self, http: HttpRequest) -> Response:
        """As /generate, but a list of one object, and the prompt is repeated where the request does not say (server.return_full_text)."""
        body = await self._read(http)
        return await self._answer(http, body, stream=bool(body.stream), echo=self.section.return_full_text, in_list=True)

    async def info(self) -> dict[str, Any]:
        """What is served, and its bounds."""
        ready = self.generation.ready
        return {
            "model_id": self.model_id,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_dtype": ready.dtype,
            "model_device_type": ready.device,
            "max_concurrent_requests": self.generation.max_open,
            "max_best_of": 1,
            "max_stop_sequences": self.section.max_stop_strings,
            "max_input_tokens": self.generation.max_total_tokens - 1,
            "max_total_tokens": self.generation.max_total_tokens,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "onehead",
            "version": self.version,
            "sha": None,
            "docker_label": None,
            "num_parameters": ready.num_parameters,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "kv_pages": ready.num_pages,
            "kv_page_size": ready.page_size,
        }

    async def _read(self, http: HttpRequest) -> GenerateBody:
        with _in_tgi_words():
            body = await read_model(http, GenerateBody, self.section.max_body_bytes)
            stops = (body.parameters.stop if body.parameters else None) or []
            if len(stops) > self.section.max_stop_strings:
                most = self.section.max_stop_strings
                raise InvalidRequest(f"`parameters.stop` supports up to {most} stop sequences. Given: {len(stops)}")
        return body

    async def _answer(self, http: HttpRequest, body: GenerateBody, stream: bool, echo: bool, in_list: bool = False) -> Response:
        # TGI's quirk: without `parameters` a request samples, with empty ones it is greedy.
        parameters = body.parameters or Parameters(do_sample=True)
        prompt = await self.generation.encode(body.inputs)
        request = to_request(parameters, prompt)
        reply = Reply(parameters, request, body.inputs if _or(parameters.return_full_text, echo) else "")
        with _in_tgi_words():
            pieces = self.generation.start(request)
        try:
            if stream:
                # Until the first event is there, a failure can still have a status of its own.
                first = await unless_disconnected(http, anext(pieces))
                return sse.EventResponse(reply.events(first, pieces), pieces.close)
            value = await unless_disconnected(http, reply.whole(pieces))
        except BaseException:
            pieces.close()
            raise
        return JSONResponse([value] if in_list else value)


@contextmanager
def _in_tgi_words() -> Iterator[None]:
    """TGI's clients tell a bad parameter by how the message begins."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"Input validation error: {error.message}") from None


def to_request(parameters: Parameters, prompt: list[int]) -> Request:
    """The internal request. A seed is drawn here where none was given, so that it can be reported and replayed."""
    if parameters.truncate is not None:
        prompt = prompt[-parameters.truncate :]
    top_k = parameters.top_k or 0
    sampling = protocol.SamplingParams(
        temperature=_or(parameters.temperature, 1.0) if parameters.samples else 0.0,
        top_k=max(0, top_k),
        top_p=_or(parameters.top_p, 1.0),
        min_p=_or(parameters.min_p, 0.0),
        typical_p=_or(parameters.typical_p, 1.0),
        repetition_penalty=_or(parameters.repetition_penalty, 1.0),
        frequency_penalty=_or(parameters.frequency_penalty, 0.0),
        presence_penalty=_or(parameters.presence_penalty, 0.0),
        logit_bias={int(key): value for key, value in (parameters.logit_bias or {}).items()},
        seed=secrets.randbits(63) if parameters.seed is None else parameters.seed,
    )
    return Request(
        prompt=prompt,
        sampling=sampling,
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_tokens or 0,
        stop_strings=tuple(parameters.stop or ()),
        stop_token_ids=tuple(parameters.stop_token_ids or ()),
        ignore_eos=bool(parameters.ignore_eos),
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


class Reply:
    """Pieces to the dialect's JSON, whole or event by event."""

    def __init__(self, parameters: Parameters, request: Request, echoed: str) -> None:
        self.parameters = parameters
        self.request = request
        self.seed = request.sampling.seed if parameters.samples else None
        self.text = echoed
        self.tokens: list[dict[str, Any]] = []

    def _take(self, piece: Piece) -> dict[str, Any]:
        logprob = piece.logprob if piece.logprob == piece.logprob else None
        token = {"id": piece.token, "text": piece.special_text or piece.text, "logprob": logprob, "special": piece.special}
        self.tokens.append(token)
        self.text += piece.text
        return token

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """The one object that answers a request without streaming."""
        finish: str | None = None
        async for piece in pieces:
            self._take(piece)
            finish = piece.finish
        value: dict[str, Any] = {"generated_text": self.text}
        if self.parameters.details:
            value["details"] = {
                "finish_reason": finish,
                "generated_tokens": len(self.tokens),
                "seed": self.seed,
                "prefill": [],
                "tokens": self.tokens,
            }
        return value

    async def events(self, first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """One event for each token; the last has the whole text. An error is the last event instead."""
        yield self._event(first)
        try:
            async for piece in rest:
                yield self._event(piece)
        except RequestError as error:
            yield sse.event({"error": error.message, "error_type": error.tgi_type})

    def _event(self, piece: Piece) -> bytes:
        token = self._take(piece)
        last = piece.finish is not None
        return sse.event(
            {
                "index": len(self.tokens),
                "token": token,
                "generated_text": self.text if last else None,
                "details": self._details(piece.finish) if last and self.parameters.details else None,
            }
        )

    def _details(self, finish: str | None) -> dict[str, Any]:
        return {
            "finish_reason": finish,
            "generated_tokens": len(self.tokens),
            "seed": self.seed,
            "input_length": len(self.request.prompt),
        }
