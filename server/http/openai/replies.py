"""OpenAIReply: what completions and chat replies share: object head, outputs, token usage, vLLM's
extra fields. Knows no routes.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from server.generation.generation import Generation
from server.generation.request import prompt_tokens
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.answer import Output, OutputToken, Reply
from server.http.openai.fields import GenerationBody
from server.protocol import PromptScore

FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "timeout": "timeout"}


class OpenAIReply(Reply):
    """A reply of /v1. `head`: the fields that every object of the reply begins with; `outputs`: one
    for each sequence.
    """

    last = sse.DONE

    def __init__(
        self,
        prefix: str,
        kind: str,
        model_id: str,
        body: GenerationBody,
        generation: Generation,
        streams: OpenStreams,
    ) -> None:
        self.head = {
            "id": f"{prefix}-{body.request_id or streams.reservation.reply_id}",
            "object": kind,
            "created": streams.reservation.created,
            "model": model_id,
            "system_fingerprint": generation.fingerprint,
        }
        self.prefix = sse.prefix_of(self.head)
        self.codec = generation.codec
        self.body = body
        self.streams = streams
        self.outputs = [Output(choice) for choice in streams.choices]

    def take(self, piece: Piece) -> list[OutputToken]:
        """Adds a piece to its output. Returns its token, or an empty list where it has none."""
        new = self.outputs[piece.choice].take(piece)
        for token in new:
            token.logprob = token.logprob or 0.0
            # The tokens of `logprob_token_ids` stand after the token itself, in place of the most
            # likely ones.
            token.top = (
                dict(((token.id, token.logprob), *piece.top)).items()
                if self.body.logprob_token_ids
                else piece.top[: self.body.num_top]
            )
        return new

    def ending(self, output: Output) -> dict[str, Any]:
        """Why the output ended, in OpenAI's and in vLLM's words; null while it is being
        generated.
        """
        return {"finish_reason": FINISH.get(output.finish or ""), "stop_reason": output.stop}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts. A prompt of several choices counts once, with the cached tokens of its
        first choice.
        """
        prompt = prompt_tokens(self.streams.choices)
        cached = {
            id(output.choice.request.prompt): output.choice.num_cached
            for output in reversed(self.outputs)
        }
        completion = sum(len(output.tokens) for output in self.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream, without the head, and with the usage so far if
        `continuous_usage_stats` asks for it.
        """
        options = self.body.stream_options
        if options is not None and options.include_usage and options.continuous_usage_stats:
            return {"choices": choices, "usage": self.usage}
        return {"choices": choices}

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk with the final usage, if `include_usage` asks for it."""
        options = self.body.stream_options
        return (
            [{"choices": [], "usage": self.usage}]
            if options is not None and options.include_usage
            else []
        )

    def token_name(self, id: int, text: str | None = None) -> str:
        """A token as `logprobs` shows it. `text`: what it adds where it stands, if that is known;
        else as in the middle of a text.
        """
        return (
            f"token_id:{id}"
            if self.body.return_tokens_as_token_ids
            else self.codec.token_text(id)
            if text is None
            else text
        )

    def prompt_logprobs(self, output: Output) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`: null for the first prompt token; for each other one a map by id
        of the token and the most likely ones in its place. Null if the request does not ask for it.
        """
        count = self.body.prompt_logprobs
        if count is None:
            return {"prompt_logprobs": None}
        rows = (self._prompt_row(score, count) for score in output.choice.prompt_scores)
        return {"prompt_logprobs": chain([None], rows)}

    def _prompt_row(self, score: PromptScore, count: int) -> dict[str, Any]:
        top = {id: (rank, logprob) for rank, (id, logprob) in enumerate(score.top[:count], 1)}
        top.setdefault(score.token, (score.rank, score.logprob))
        text = self.codec.token_text
        return {
            str(id): {"logprob": logprob, "rank": rank, "decoded_token": text(id)}
            for id, (rank, logprob) in top.items()
        }

    def token_ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """vLLM's `token_ids`: the ids of these tokens, if `return_token_ids` asks for them."""
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def prompt_token_ids(self, output: Output) -> dict[str, Any]:
        """vLLM's `prompt_token_ids`: in each choice of a completion, once in a chat reply."""
        return (
            {"prompt_token_ids": output.choice.request.prompt} if self.body.return_token_ids else {}
        )
