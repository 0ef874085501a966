"""Ollama's form of answers: an object, or lines of JSON, the last of which has counts and times."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.answer import Output, OutputToken, Reply
from server.http.ollama.fields import ChatBody, GenerateBody
from server.http.openai.chat import ChatReply
from server.http.openai.completions import CompletionReply

NANOSECONDS = 10**9


def now() -> str:
    """The time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def request_of(generation: Generation, body: GenerateBody | ChatBody, client: str) -> Request:
    """The internal request. Raises RequestError."""
    if body.is_chat(generation):
        chat = body.as_chat(generation)
        chat.fit(generation.texts.variables)
        request = await ChatReply.prepare(generation, chat, client)
    else:
        assert isinstance(body, GenerateBody)
        completion = body.as_completion(generation)
        ((request, _),) = await CompletionReply.prepare(generation, completion, client)
    if isinstance(body, GenerateBody) and body.context:
        request = replace(request, prompt=body.context + request.prompt)
    if source := body.source:
        request = replace(request, grammar=await generation.texts.grammar(source, client))
    most = body.options.num_predict if body.options else None
    left = max(1, generation.max_total_tokens - len(request.prompt))
    return replace(
        request,
        max_new_tokens=None if most is None or most < 0 else min(most, left),
        num_top=(body.top_logprobs or 0) if body.logprobs else 0,
    )


class OllamaReply(Reply):
    """An answer of /api/generate or /api/chat."""

    form, prefix = sse.LINES, sse.LINES.prefix

    def __init__(
        self,
        body: GenerateBody | ChatBody,
        model: str,
        generation: Generation,
        streams: OpenStreams,
    ) -> None:
        self.body = body
        self.model = model
        self.codec = generation.codec
        self.streams = streams
        self.output = Output(streams.choices[0])
        self.thought = ""
        self.calls: list[tuple[str, list[str]]] = []
        """Of each call the function's name and the parts of its arguments."""
        self.num_told = 0
        """Calls that have been sent."""

    @classmethod
    async def open(
        cls,
        generation: Generation,
        body: GenerateBody | ChatBody,
        model: str,
        reservation: Reservation,
    ) -> "OllamaReply":
        """Starts the sequence of a body. Raises RequestError."""
        request = await request_of(generation, body, reservation.client)
        return cls(body, model, generation, generation.start([request], reservation))

    def take(self, piece: Piece) -> list[OutputToken]:
        self.thought += piece.thought
        for call in piece.calls:
            if call.name is not None:
                self.calls.append((call.name, []))
            self.calls[call.index][1].append(call.arguments)
        return self.output.take(piece)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        tokens = self.take(piece)
        # A call is whole when the next one has begun, or at the end.
        whole = len(self.calls) - (piece.finish is None)
        calls, self.num_told = self.calls[self.num_told : whole], max(self.num_told, whole)
        said = self._said(piece.text, piece.thought, calls)
        shown = tokens if self.body.logprobs else []
        chunks = (
            [said | self._logprobs(shown)] if piece.text or piece.thought or calls or shown else []
        )
        return chunks if piece.finish is None else [*chunks, self._said() | self._ending()]

    def full_response(self) -> dict[str, Any]:
        said = self._said(self.output.text, self.thought, self.calls)
        return said | self._logprobs(self.output.tokens) | self._ending()

    def _said(
        self, text: str = "", thought: str = "", calls: Sequence[tuple[str, list[str]]] = ()
    ) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if isinstance(self.body, GenerateBody):
            return head | {"response": text} | more | {"done": False}
        if calls:
            more["tool_calls"] = [
                {"function": {"index": index, "name": name, "arguments": _object("".join(parts))}}
                for index, (name, parts) in enumerate(calls, self.calls.index(calls[0]))
            ]
        return head | {"message": {"role": "assistant", "content": text} | more, "done": False}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        if not self.body.logprobs:
            return {}
        rows = [
            self._entry(token.id, token.logprob)
            | {"top_logprobs": [self._entry(*top) for top in token.top]}
            for token in tokens
        ]
        return {"logprobs": rows} if rows else {}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        text, data = self.codec.token_text(id), self.codec.token_bytes(id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _ending(self) -> dict[str, Any]:
        choice = self.output.choice
        begun, first = choice.started or choice.arrival, choice.first or choice.last
        counts = {
            "total_duration": choice.last - choice.arrival,
            "prompt_eval_duration": first - begun,
            "eval_duration": choice.last - first,
        }
        ending: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if self.output.finish == "length" else "stop",
            "prompt_eval_count": len(choice.request.prompt),
            "eval_count": choice.num_tokens,
        } | {name: round(seconds * NANOSECONDS) for name, seconds in counts.items()}
        if isinstance(self.body, GenerateBody) and not self.body.raw:
            ids = [token.id for token in self.output.tokens]
            ending["context"] = choice.request.prompt + ids
        return ending


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which a limit of tokens may have cut."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def empty_answer(body: GenerateBody | ChatBody, model: str) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have the model loaded, or
    unloaded.
    """
    said: dict[str, Any] = (
        {"response": ""}
        if isinstance(body, GenerateBody)
        else {"message": {"role": "assistant", "content": ""}}
    )
    reason = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
    return {"model": model, "created_at": now()} | said | {"done": True, "done_reason": reason}


def check_thinking(generation: Generation, body: GenerateBody | ChatBody, model: str) -> None:
    """Raises InvalidRequest where thoughts are asked of a model that has none."""
    if body.think and not can_think(generation):
        raise InvalidRequest(f'"{model}" does not support thinking', param="think")


def can_think(generation: Generation) -> bool:
    """Whether the chat template reads how much to think, or the model's thoughts are recognised."""
    form = generation.texts.texts.calls.form
    read = {"enable_thinking", "reasoning_effort"} & {*generation.texts.variables}
    return bool(read or (form and form.thought))
