"""/v1/completions: prompts to requests, pieces to text_completion objects."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from server.api.openai_fields import CompletionBody
from server.api.replies import Answer, Output, Token
from server.fim import FillInTheMiddle, cut_last_token
from server.generation import Generation, Request, with_choices
from server.stream import OpenStreams, Piece


class CompletionReply(Answer):
    """One answer. Sequences are numbered prompt by prompt, `best_of` of each."""

    body: CompletionBody

    def __init__(self, body: CompletionBody, model_id: str, streams: OpenStreams, prompts: list[str]) -> None:
        super().__init__("cmpl", "text_completion", model_id, body, streams)
        self.prompts = prompts
        """The text of each prompt, where it is to be repeated."""
        self.offsets = [0] * len(self.outputs)
        """Where the next token's text begins, in each output that is streamed with log-probabilities."""
        self.per_prompt = len(self.outputs) // max(1, len(body.prompt))

    @classmethod
    async def open(cls, generation: Generation, fim: FillInTheMiddle, body: CompletionBody, model_id: str) -> "CompletionReply":
        """Encodes the prompts and starts their sequences. Raises RequestError."""
        grammar = await generation.grammar(body.source())
        requests: list[Request] = []
        for prompt in body.prompt:
            request = replace(await _request(generation, fim, body, prompt, healing=not grammar), grammar=grammar)
            requests += with_choices(request, body.best_of or body.n or 1)
        prompts = []
        if body.echo:
            prompts = [prompt if isinstance(prompt, str) else generation.codec.decode(prompt) for prompt in body.prompt]
        return cls(body, model_id, generation.start(*requests), prompts)

    def first(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        output = self.outputs[piece.choice]
        begins = not output.text and not output.tokens
        tokens = self.take(piece)
        text = (self._echo(output) if begins else "") + piece.text
        if not text and piece.finish is None and self.body.logprobs is None and not self.body.return_token_ids:
            return []
        choice = {
            "index": piece.choice,
            "text": text,
            "logprobs": self._logprobs(output, tokens, with_prompt=begins),
            "finish_reason": output.finish,
            "stop_reason": output.stop,
        } | self.token_ids(output, tokens, begins)
        return [self.chunk([choice])]

    def last(self) -> list[dict[str, Any]]:
        return self.usage_chunks()

    def whole(self) -> dict[str, Any]:
        wanted = self.body.n or 1
        choices: list[dict[str, Any]] = []
        for begin in range(0, len(self.outputs), self.per_prompt):
            outputs = self.outputs[begin : begin + self.per_prompt]
            if wanted < len(outputs):
                outputs = sorted(outputs, key=lambda output: -output.mean_logprob)[:wanted]
            for output in outputs:
                choice = {
                    "index": len(choices),
                    "text": self._echo(output) + output.text,
                    "logprobs": self._logprobs(output, output.tokens, with_prompt=True),
                    "finish_reason": output.finish,
                    "stop_reason": output.stop,
                }
                choices.append(choice | self.prompt_logprobs(output) | self.token_ids(output, output.tokens, True))
        return self.head | {"choices": choices, "usage": self.usage}

    def _echo(self, output: Output) -> str:
        return self.prompts[output.choice.index // self.per_prompt] if self.prompts else ""

    def _logprobs(self, output: Output, tokens: list[Token], with_prompt: bool) -> dict[str, list[Any]] | None:
        """The legacy object: parallel lists, the prompt's tokens first where it is repeated."""
        count = self.body.logprobs
        if count is None:
            return None
        rows: list[tuple[str, float | None, dict[str, float] | None]] = []
        if with_prompt and self.body.echo:
            choice = output.choice
            rows.append((self.token_text(choice.request.prompt[0]), None, None))
            rows += [self._row(Token(score.token, score.logprob, score.top), count) for score in choice.prompt_scores]
        rows += [self._row(token, count) for token in tokens]
        # A chunk's offsets go on where the chunks before it ended.
        ends = list(accumulate((len(text) for text, _, _ in rows), initial=0 if with_prompt else self.offsets[output.choice.index]))
        offsets, self.offsets[output.choice.index] = ends[:-1], ends[-1]
        return {
            "text_offset": offsets,
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "tokens": [text for text, _, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
        }

    def _row(self, token: Token, count: int) -> tuple[str, float, dict[str, float]]:
        text = self.token_text(token.id)
        top: dict[str, float] = {}
        for id, logprob in token.top[:count]:
            top.setdefault(self.token_text(id), logprob)
        top.setdefault(text, token.logprob)
        return text, token.logprob, top


async def _request(generation: Generation, fim: FillInTheMiddle, body: CompletionBody, prompt: str | list[int], healing: bool) -> Request:
    """The internal request of one prompt, as yet without a grammar."""
    codec, healed = generation.codec, ""
    stops: tuple[int, ...] = ()
    if body.suffix is not None and isinstance(prompt, str):
        heal = healing if body.token_healing is None else body.token_healing
        filling = await generation.tokenizing(len(prompt) + len(body.suffix), fim.fill, prompt, body.suffix, heal)
        ids, healed, stops = filling.prompt, filling.healed, filling.stop_token_ids
    elif isinstance(prompt, list):
        ids = prompt
    else:
        ids = await generation.tokenizing(len(prompt), codec.encode_bare if body.add_special_tokens is False else codec.encode, prompt)
        if body.token_healing:
            ids, healed = cut_last_token(codec, ids, prompt)
    request = body.request(codec, ids)
    scored = bool(body.echo) and body.logprobs is not None
    return replace(
        request,
        healed=healed,
        score_prompt=request.score_prompt or scored,
        stop_token_ids=(*request.stop_token_ids, *stops),
    )
