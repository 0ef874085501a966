"""/v1/chat/completions: converts messages to a prompt, and pieces to chat.completion objects."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import msgspec

from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request, with_choices
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Output, OutputToken, token_entries
from server.http.openai.chat_fields import ChatBody
from server.http.openai.replies import OpenAIReply
from server.text.jobs import EncodeChat
from server.text.service import Source


async def with_calls(
    generation: Generation, body: ChatBody, request: Request, client: str
) -> Request:
    """The request with what it needs for the model's thoughts and the calls of its tools. Raises
    RequestError.
    """
    named, source = body.named, body.source() if body.calls == "auto" else None
    functions = [
        (tool.function.name, tool.function.parameters)
        for tool in body.tools or ()
        if named is None or tool.function.name in named.names
    ]
    is_parallel = body.parallel_tool_calls is not False and not (named and named.function)
    text = None if source is None else (source.kind, source.text)
    plan = generation.texts.texts.calls.plan(
        request.prompt, body.calls, functions, is_parallel, text, request.stop_token_ids
    )
    request = replace(request, parser=plan.parser, stop_token_ids=plan.stops, ignored=plan.ignored)
    if not plan.rules:
        return request
    compiled = await generation.texts.compiled(Source("calls", plan.rules, "tools"), client)
    ignored = [f"tools.{quote(place, safe='/$@:')}" for place in compiled.relaxed]
    return replace(request, grammar=compiled.grammar, opening=plan.opening, ignored=ignored)


class ChatReply(OpenAIReply):
    """A chat completion of `n` choices."""

    body: ChatBody

    def __init__(
        self, body: ChatBody, model_id: str, generation: Generation, streams: OpenStreams
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__("chatcmpl", kind, model_id, body, generation, streams)
        self.thoughts = [""] * len(self.outputs)
        self.calls: list[list[dict[str, Any]]] = [[] for _ in self.outputs]
        """The calls of each output."""

    @staticmethod
    async def prepare(generation: Generation, body: ChatBody, client: str) -> Request:
        """The internal request, with the prompt that the chat template makes. Raises
        RequestError.
        """
        given = body.chat_input(generation.can_call)
        prompt = await generation.tokenize(
            EncodeChat(given), client, truncated=body.truncate_prompt_tokens is not None
        )
        prompt = body.truncated(prompt, generation.max_total_tokens)
        return await with_calls(
            generation, body, await body.request(generation, client, prompt), client
        )

    @classmethod
    async def open(
        cls, generation: Generation, body: ChatBody, model_id: str, reservation: Reservation
    ) -> "ChatReply":
        """Applies the chat template and starts the sequences. Raises RequestError."""
        request = await cls.prepare(generation, body, reservation.client)
        return cls(
            body,
            model_id,
            generation,
            generation.start(with_choices(request, body.n or 1), reservation),
        )

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.chunk(
                [
                    {
                        "index": output.choice.index,
                        "delta": delta,
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            | self.prompt_token_ids(output)
            for output in self.outputs
        ]

    def take(self, piece: Piece) -> list[OutputToken]:
        self.thoughts[piece.choice] += piece.thought
        calls = self.calls[piece.choice]
        for call in piece.calls:
            if call.name is not None:
                id = f"call_{self.streams.reservation.reply_id}-{piece.choice}-{call.index}"
                calls.append(
                    {"id": id, "type": "function", "function": {"name": call.name, "arguments": ""}}
                )
            calls[call.index]["function"]["arguments"] += call.arguments
        return super().take(piece)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        output = self.outputs[piece.choice]
        tokens = self.take(piece)
        delta: dict[str, Any] = {"reasoning_content": piece.thought} if piece.thought else {}
        if piece.calls:
            begun = self.calls[piece.choice]
            added = [
                (
                    {"function": {"arguments": call.arguments}}
                    if call.name is None
                    else begun[call.index]
                )
                for call in piece.calls
            ]
            delta["tool_calls"] = [
                {"index": call.index} | more for call, more in zip(piece.calls, added, strict=True)
            ]
        if piece.text or not delta:
            delta["content"] = piece.text
        if (
            not any(delta.values())
            and piece.finish is None
            and not self.body.logprobs
            and not self.body.return_token_ids
        ):
            return []
        choice = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": self._logprobs(tokens),
        }
        choice |= self.ending(output) | self.token_ids(tokens)
        return [self.chunk([choice])]

    def full_response(self) -> dict[str, Any]:
        choices = [
            {
                "index": output.choice.index,
                "message": self._message(output),
                "logprobs": self._logprobs(output.tokens),
            }
            | self.ending(output)
            | self.token_ids(output.tokens)
            for output in self.outputs
        ]
        prompt = self.prompt_logprobs(self.outputs[0]) | self.prompt_token_ids(self.outputs[0])
        return self.head | {"choices": choices, "usage": self.usage} | prompt

    def ending(self, output: Output) -> dict[str, Any]:
        ending = super().ending(output)
        if isinstance(output.stop, int) and output.stop not in (self.body.stop_token_ids or ()):
            ending["stop_reason"] = None  # A token of the model's format.
        calls = self.calls[output.choice.index]
        has_called = (
            calls
            and ending["finish_reason"] == "stop"
            and _is_whole(calls[-1]["function"]["arguments"])
        )
        return ending | {"finish_reason": "tool_calls"} if has_called else ending

    def _message(self, output: Output) -> dict[str, Any]:
        thought, calls = self.thoughts[output.choice.index], self.calls[output.choice.index]
        message = {
            "role": "assistant",
            "content": output.text or (None if calls else ""),
            "refusal": None,
        }
        return (
            message
            | ({"reasoning_content": thought} if thought else {})
            | ({"tool_calls": calls} if calls else {})
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if self.body.num_top is None:
            return None
        return {"content": token_entries(self.codec, tokens, self.token_name)}


def _is_whole(arguments: str) -> bool:
    """Whether the arguments of a call are not cut, as a limit or a stop token may do."""
    try:
        msgspec.json.decode(arguments, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True
