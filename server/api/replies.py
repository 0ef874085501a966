"""What the answers of /v1 have in common: choices and their tokens, usage, the head of each object. Knows no routes."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.openai_fields import GenerationBody
from server.stream import Choice, OpenStreams, Piece, Top, prompt_tokens

FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "timeout": "timeout"}


@dataclass(slots=True)
class Token:
    """One token of an output, with what is told of it."""

    id: int
    logprob: float
    top: Top


@dataclass(slots=True)
class Output:
    """What one sequence has come to."""

    choice: Choice
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def take(self, piece: Piece, named: bool) -> list[Token]:
        """Adds a piece; its token, if it has one. `named`: before the tokens that the request has named it reports the token itself."""
        new = []
        if piece.token is not None:
            own = (piece.token, piece.logprob or 0.0)
            top = (own, *(other for other in piece.top if other[0] != piece.token)) if named else piece.top
            new = [Token(*own, top)]
        self.tokens += new
        self.text += piece.text
        if piece.finish is not None:
            self.finish, self.stop = FINISH[piece.finish], piece.stop
        return new

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.tokens) / max(1, len(self.tokens))


class Answer:
    """The state of one answer: its head, its outputs, its usage."""

    def __init__(self, prefix: str, kind: str, model_id: str, body: GenerationBody, streams: OpenStreams) -> None:
        self.head = {
            "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": streams.generation.fingerprint,
        }
        self.codec = streams.generation.codec
        self.body = body
        self.streams = streams
        self.outputs = [Output(choice) for choice in streams.choices]

    def take(self, piece: Piece) -> list[Token]:
        """Adds a piece to its output; its token, if it has one."""
        return self.outputs[piece.choice].take(piece, bool(self.body.logprob_token_ids))

    def top(self, token: Token) -> Top:
        """The tokens to report in an output token's place."""
        return token.top if self.body.logprob_token_ids else token.top[: self.body.num_top]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of each prompt once, and of every output. Of a prompt of several choices, what the first did not need to compute."""
        prompt = prompt_tokens(self.streams.choices)
        cached = {id(output.choice.request.prompt): output.choice.num_cached for output in reversed(self.outputs)}
        completion = sum(len(output.tokens) for output in self.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream, with the usage so far where that is wanted."""
        options = self.body.stream_options
        usage = {"usage": self.usage} if options is not None and options.include_usage and options.continuous_usage_stats else {}
        return self.head | {"choices": choices} | usage

    def usage_chunks(self) -> list[dict[str, Any]]:
        """The chunk behind the last, where usage is wanted."""
        options = self.body.stream_options
        return [self.head | {"choices": [], "usage": self.usage}] if options is not None and options.include_usage else []

    def token_text(self, id: int) -> str:
        """A token by itself."""
        return self.codec.decode([id])

    def token_name(self, id: int) -> str:
        """A token as `logprobs` show it."""
        return f"token_id:{id}" if self.body.return_tokens_as_token_ids else self.token_text(id)

    def prompt_logprobs(self, output: Output) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`: for each prompt token but the first, it and the likeliest in its place, by id. Null where they are not
        asked for.
        """
        count = self.body.prompt_logprobs
        if count is None:
            return {"prompt_logprobs": None}
        entries: list[dict[str, Any] | None] = [None]
        for score in output.choice.prompt_scores:
            top = {id: (rank, logprob) for rank, (id, logprob) in enumerate(score.top[:count], 1)}
            top.setdefault(score.token, (score.rank, score.logprob))
            entries.append(
                {str(id): {"logprob": logprob, "rank": rank, "decoded_token": self.token_text(id)} for id, (rank, logprob) in top.items()}
            )
        return {"prompt_logprobs": entries}

    def token_ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """vLLM's `return_token_ids`: the output's, which stand in each choice."""
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def prompt_token_ids(self, output: Output | None) -> dict[str, Any]:
        """The same of an output's prompt: in each choice of completions, once in the reply of chat."""
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": None if output is None else output.choice.request.prompt}
