"""/v1/chat/completions: converts messages to a prompt, and pieces to chat.completion objects."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.generation.generation import Generation
from server.generation.request import with_choices
from server.generation.reservation import Reservation
from server.generation.stream import OpenStreams, Piece
from server.http.answer import OutputToken
from server.http.openai.chat_fields import ChatBody
from server.http.openai.replies import OpenAIReply
from server.supervision.token_writer import TEXT
from server.text.jobs import EncodeChat


class ChatReply(OpenAIReply):
    """A chat completion of `n` choices."""

    body: ChatBody

    def __init__(self, body: ChatBody, model_id: str, generation: Generation, streams: OpenStreams) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__("chatcmpl", kind, model_id, body, generation, streams)

    @classmethod
    async def open(cls, generation: Generation, body: ChatBody, model_id: str, reservation: Reservation) -> "ChatReply":
        """Applies the chat template and starts the sequences. Raises RequestError."""
        job = EncodeChat([message.plain() for message in body.messages], body.add_generation_prompt is not False)
        prompt = await generation.tokenize(job, reservation.client, truncated=body.truncate_prompt_tokens is not None)
        prompt = body.truncated(prompt, generation.max_total_tokens)
        grammar = await generation.texts.grammar(body.source(), reservation.client)
        request = body.request(generation.codec, prompt)
        sampling = replace(request.sampling, bad_words=await body.bad_word_ids(generation, reservation.client))
        request = replace(request, grammar=grammar, sampling=sampling)
        return cls(body, model_id, generation, await generation.start(with_choices(request, body.n or 1), reservation))

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.chunk([{"index": output.choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])
            | self.prompt_token_ids(output)
            for output in self.outputs
        ]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        output = self.outputs[piece.choice]
        tokens = self.take(piece)
        if not piece.text and piece.finish is None and not self.body.logprobs and not self.body.return_token_ids:
            return []
        choice = {
            "index": piece.choice,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(tokens),
        }
        choice |= self.ending(output) | self.token_ids(tokens)
        return [self.chunk([choice])]

    def plain_chunk(self, choice: int) -> dict[str, Any] | None:
        if not self.has_plain_chunks:
            return None
        return self.chunk([{"index": choice, "delta": {"content": TEXT}} | self.plain_fields(choice)])

    def full_response(self) -> dict[str, Any]:
        choices = [
            {
                "index": output.choice.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.tokens),
            }
            | self.ending(output)
            | self.token_ids(output.tokens)
            for output in self.outputs
        ]
        prompt = self.prompt_logprobs(self.outputs[0]) | self.prompt_token_ids(self.outputs[0])
        return self.head | {"choices": choices, "usage": self.usage} | prompt

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if self.body.num_top is None:
            return None
        return {
            "content": (
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(id, logprob) for id, logprob in token.top]}
                for token in tokens
            )
        }

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.token_name(id), "logprob": logprob, "bytes": list(self.codec.token_bytes(id))}
