"""TGI's dialect: POST /generate, /generate_stream and /, GET /info.

Fields, events and errors are those of text-generation-inference, with vLLM's names inside
`parameters` for fields that TGI lacks. It knows nothing of OpenAI's dialect.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.generation.request import Request, with_choices
from server.generation.stream import OpenStreams, Piece
from server.http import fields
from server.http.answer import Output, OutputToken, Reply
from server.http.errors import TGI
from server.http.exchange import exchange_of
from server.http.fields import default
from server.http.handlers import Handlers, resumes
from server.http.routes import Route
from server.http.tgi.fields import GenerateBody, Parameters
from server.text.codec import Detokenizer
from server.text.fim import cut_last_token
from server.text.jobs import Encode


class TgiRoutes(Handlers):
    """Handlers of the routes of TGI's dialect."""

    def routes(self) -> list[Route]:
        route = partial(Route, dialect=TGI, tag="text-generation-inference")
        posted = partial(route, methods=("POST",), generates=True, body=GenerateBody)
        return [
            posted("/generate", handler=self.generate),
            posted("/generate_stream", handler=self.generate_stream),
            posted("/", handler=self.root),
            route("/info", ("GET",), self.info),
        ]

    async def generate(self, http: HttpRequest) -> Response:
        """Generate text for a prompt.

        One JSON object, or server-sent events with `"stream": true`.
        """
        body = await self._body(http)
        return await self._answer(http, body)

    async def generate_stream(self, http: HttpRequest) -> Response:
        """Generate text for a prompt, as server-sent events.

        As /generate with `"stream": true`, which may be left out here.
        """
        body = await self._body(http)
        if body.stream is False:
            with tgi_error_prefix():
                raise InvalidRequest("`stream` cannot be false on /generate_stream; use /generate")
        body.stream = True
        return await self._answer(http, body)

    async def root(self, http: HttpRequest) -> Response:
        """Generate text for a prompt, as a list of one object.

        As /generate, but the text begins with the prompt unless `return_full_text` is false.
        """
        body = await self._body(http)
        return await self._answer(http, body, is_root=True)

    async def info(self) -> Response:
        """Show the served model and the limits of requests."""
        ready = self.generation.ready
        value = {
            "model_id": self.names.shown,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_dtype": ready.dtype,
            "model_device_type": ready.device,
            "max_concurrent_requests": self.generation.client.admission.max_open,
            "max_best_of": fields.MAX_CHOICES,
            "max_stop_sequences": fields.MAX_STOP_STRINGS,
            "max_input_tokens": self.generation.max_total_tokens - 1,
            "max_input_length": self.generation.max_total_tokens - 1,
            "max_total_tokens": self.generation.max_total_tokens,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "onehead",
            "version": version("onehead"),
            "sha": None,
            "docker_label": None,
            "num_parameters": ready.num_parameters,
            "quantization": ready.quantization,
            "kv_dtype": ready.kv_dtype,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "kv_pages": ready.num_pages,
            "kv_page_size": ready.page_size,
            "kernels": ready.kernels,
            "deterministic": ready.deterministic,
        }
        return JSONResponse(value)

    async def _body(self, http: HttpRequest) -> GenerateBody:
        with tgi_error_prefix():
            return await self.read(http, GenerateBody)

    async def _answer(
        self, http: HttpRequest, body: GenerateBody, is_root: bool = False
    ) -> Response:
        arrival, stream = time.monotonic(), bool(body.stream)
        # TGI's quirk: without `parameters` a request samples, with empty ones it is greedy.
        parameters = body.parameters or Parameters(do_sample=True)
        with tgi_error_prefix():
            if stream and (parameters.best_of or 1) > 1:
                raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
            if stream and parameters.decoder_input_details:
                raise InvalidRequest(
                    "`decoder_input_details` == true is not supported when streaming tokens"
                )
            resumable = resumes(http, stream, body.resumable)
            requests = await self._requests(body, parameters, exchange_of(http).client)
            streams = self.generation.start(requests, exchange_of(http).reserved)
        echoed = body.inputs if default(parameters.return_full_text, is_root) else ""
        reply = TgiReply(
            self.generation, parameters, streams, echoed, arrival, len(body.inputs), is_root
        )
        return await self.answers.answer(http, reply, stream, resumable)

    async def _requests(
        self, body: GenerateBody, parameters: Parameters, client: str
    ) -> list[Request]:
        """The internal requests, one for each of `best_of`."""
        source = (
            None if parameters.grammar is None else parameters.grammar.source("parameters.grammar")
        )
        grammar = await self.generation.texts.grammar(source, client)
        prompt = await self.generation.tokenize(
            Encode(body.inputs), client, truncated=parameters.truncate is not None
        )
        healed = ""
        if parameters.token_healing:
            prompt, healed = cut_last_token(self.generation.codec, prompt, body.inputs)
        if parameters.truncate is not None:
            prompt = prompt[-parameters.truncate :]
        sampling = parameters.sampling({})
        if not parameters.samples:
            sampling = replace(sampling, temperature=0.0)
        request = Request(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=parameters.max_new_tokens,
            min_new_tokens=parameters.min_tokens or 0,
            stop_strings=tuple(parameters.stop or ()),
            stop_token_ids=tuple(parameters.stop_token_ids or ()),
            ignore_eos=bool(parameters.ignore_eos),
            num_top=parameters.top_n_tokens or 0,
            score_prompt=bool(parameters.decoder_input_details),
            grammar=grammar,
            healed=healed,
            priority=body.priority or 0,
            timeout_s=body.timeout_s,
            salt=body.cache_salt or "",
        )
        return with_choices(request, parameters.best_of or 1)


@contextmanager
def tgi_error_prefix() -> Iterator[None]:
    """Prefixes the message of an InvalidRequest as TGI does: its clients recognise validation
    errors by that.
    """
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"Input validation error: {error.message}") from None


class TgiReply(Reply):
    """A reply in TGI's JSON. `arrival`: monotonic time of the request; `num_chars`: of its prompt;
    `echoed`: text before the output.
    """

    def __init__(
        self,
        generation: Generation,
        parameters: Parameters,
        streams: OpenStreams,
        echoed: str,
        arrival: float,
        num_chars: int,
        in_list: bool,
    ) -> None:
        self.codec = generation.codec
        self.arrival = arrival
        self.in_list = in_list
        self.compute_headers = {
            "x-compute-type": generation.ready.device,
            "x-compute-characters": str(num_chars),
        }
        self.parameters = parameters
        self.streams = streams
        self.outputs = [Output(choice, echoed) for choice in streams.choices]

    def headers(self, streamed: bool) -> dict[str, str]:
        """Of a response that is not streamed its times too: in milliseconds, but x-compute-time in
        seconds.
        """
        if streamed:
            return self.compute_headers
        now, choices = time.monotonic(), self.streams.choices
        choice = max(choices, key=lambda choice: choice.last)
        started = choice.started or now
        num_tokens = sum(choice.num_tokens for choice in choices)
        milliseconds = {
            "x-total-time": now - self.arrival,
            "x-validation-time": choice.arrival - self.arrival,
            "x-queue-time": started - choice.arrival,
            "x-inference-time": now - started,
            "x-time-per-token": (now - started) / max(1, num_tokens),
        }
        counts = {"x-prompt-tokens": len(choice.request.prompt), "x-generated-tokens": num_tokens}
        return (
            self.compute_headers
            | {"x-compute-time": f"{now - self.arrival:.6f}"}
            | {name: f"{seconds * 1e3:.3f}" for name, seconds in milliseconds.items()}
            | {name: str(count) for name, count in counts.items()}
        )

    def take(self, piece: Piece) -> list[OutputToken]:
        return self.outputs[piece.choice].take(piece)

    def _top(self, top: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        text, special = self.codec.token_text, self.codec.special_ids
        return [
            {"id": id, "text": text(id), "logprob": logprob, "special": id in special}
            for id, logprob in top
        ]

    def full_response(self) -> Any:
        """The output with the highest mean log-probability, with the others of `best_of` in its
        details.
        """
        best, *others = sorted(self.outputs, key=lambda output: -output.mean_logprob)
        value: dict[str, Any] = {"generated_text": best.text}
        if self.parameters.details or self.parameters.decoder_input_details:
            value["details"] = self._details(best)
            if others:
                value["details"]["best_of_sequences"] = [
                    {"generated_text": other.text} | self._details(other) for other in others
                ]
        return [value] if self.in_list else value

    def _details(self, output: Output) -> dict[str, Any]:
        details = self._summary(output) | {
            "prefill": self._prefill(),
            "tokens": map(_generated, output.tokens),
        }
        return details | (
            {"top_tokens": (self._top(token.top) for token in output.tokens)}
            if self.parameters.top_n_tokens and output.tokens
            else {}
        )

    def _prefill(self) -> Iterator[dict[str, Any]]:
        """The prompt's tokens, which the first of several sequences has scored."""
        choice = self.outputs[0].choice
        scores = ((score.token, score.logprob) for score in choice.prompt_scores)
        rows = (
            chain([(choice.request.prompt[0], None)], scores)
            if self.parameters.decoder_input_details
            else ()
        )
        detokenizer, special = Detokenizer(self.codec), self.codec.special_ids
        texts = (
            self.codec.token_text(id) if id in special else detokenizer.push(id)
            for id in choice.request.prompt
        )
        return (
            {"id": id, "text": text, "logprob": logprob}
            for (id, logprob), text in zip(rows, texts, strict=False)
        )

    def _summary(self, output: Output) -> dict[str, Any]:
        seed = output.choice.request.sampling.seed if self.parameters.samples else None
        return {
            "finish_reason": output.finish,
            "generated_tokens": len(output.tokens),
            "seed": seed,
        }

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """One event for each token; the last event has the full text."""
        # A deadline between two tokens ends a stream without a token, but clients expect one in
        # every event.
        token = (
            self.take(piece) or [OutputToken(0, None, text=piece.text, special=not piece.text)]
        )[0]
        output = self.outputs[piece.choice]
        event: dict[str, Any] = {"index": len(output.tokens), "token": _generated(token)}
        if self.parameters.top_n_tokens:
            event["top_tokens"] = self._top(piece.top)
        event["generated_text"] = event["details"] = None
        if piece.finish is not None:
            event["generated_text"] = output.text
            if self.parameters.details:
                event["details"] = self._summary(output) | {
                    "input_length": len(output.choice.request.prompt)
                }
        return [event]


def _generated(token: OutputToken) -> dict[str, Any]:
    """A generated token in TGI's form."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
