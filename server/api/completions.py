"""/v1/completions: prompts to requests, pieces to text_completion objects."""

from dataclasses import replace
from typing import Any

from server.api.openai_fields import CompletionBody
from server.api.replies import Answer, Output, Token
from server.fim import FillInTheMiddle, cut_last_token
from server.generation import Generation, Request, with_choices
from server.stream import OpenStreams, Piece, Top
from server.text import Detokenizer, TextCodec


class CompletionReply(Answer):
    """One answer. Sequences are numbered prompt by prompt, `best_of` of each."""

    body: CompletionBody

    def __init__(self, body: CompletionBody, model_id: str, streams: OpenStreams, prompts: list[str]) -> None:
        super().__init__("cmpl", "text_completion", model_id, body, streams)
        self.prompts = prompts
        """The text of each prompt, where it is to be repeated."""
        self.per_prompt = len(self.outputs) // max(1, len(body.prompt))
        self.offsets = [TextOffsets(self.codec, len(self._echo(output))) for output in self.outputs]

    @classmethod
    async def open(cls, generation: Generation, fim: FillInTheMiddle, body: CompletionBody, model_id: str) -> "CompletionReply":
        """Encodes the prompts and starts their sequences. Raises RequestError."""
        grammar = await generation.grammar(body.source())
        requests: list[Request] = []
        prompts: list[str] = []
        for prompt in body.prompt:
            request, text = await _request(generation, fim, body, prompt, healing=not grammar)
            requests += with_choices(replace(request, grammar=grammar), body.best_of or body.n or 1)
            if body.echo:
                prompts.append(text)
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
        } | self._token_ids(output, tokens, begins)
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
                choices.append(choice | self.prompt_logprobs(output) | self._token_ids(output, output.tokens, True))
        return self.head | {"choices": choices, "usage": self.usage}

    def _token_ids(self, output: Output, tokens: list[Token], with_prompt: bool) -> dict[str, Any]:
        return self.token_ids(tokens) | self.prompt_token_ids(output if with_prompt else None)

    def _echo(self, output: Output) -> str:
        return self.prompts[output.choice.index // self.per_prompt] if self.prompts else ""

    def _logprobs(self, output: Output, tokens: list[Token], with_prompt: bool) -> dict[str, list[Any]] | None:
        """The legacy object: parallel lists, the prompt's tokens first where it is repeated."""
        if self.body.logprobs is None:
            return None
        rows = self._prompt_rows(output, self.body.logprobs) if with_prompt and self.body.echo else []
        skipped = () if self.body.skip_special_tokens is False else self.codec.special_ids
        offsets = self.offsets[output.choice.index]
        rows += [
            (offsets.next(token.id, token.id not in skipped), *self._row(token.id, token.logprob, self.top(token))) for token in tokens
        ]
        return {
            "text_offset": [offset for offset, _, _, _ in rows],
            "token_logprobs": [logprob for _, _, logprob, _ in rows],
            "tokens": [name for _, name, _, _ in rows],
            "top_logprobs": [top for _, _, _, top in rows],
        }

    def _prompt_rows(self, output: Output, count: int) -> list[tuple[int, str, float | None, dict[str, float] | None]]:
        """(offset, name, log-probability, alternatives) of each prompt token; the first has only the two former."""
        choice, text, offsets = output.choice, self._echo(output), TextOffsets(self.codec)

        def offset(id: int) -> int:
            # What the tokenizer adds, such as a beginning of sequence, is no part of the text; what was written as such is.
            return offsets.next(id, id not in self.codec.special_ids or text.startswith(self.token_text(id), offsets.place))

        first = choice.request.prompt[0]
        rows: list[tuple[int, str, float | None, dict[str, float] | None]] = [(offset(first), self.token_name(first), None, None)]
        for score in choice.prompt_scores:
            rows.append((offset(score.token), *self._row(score.token, score.logprob, score.top[:count])))
        return rows

    def _row(self, id: int, logprob: float, others: Top) -> tuple[str, float, dict[str, float]]:
        name = self.token_name(id)
        top: dict[str, float] = {}
        for other, its_logprob in others:
            top.setdefault(self.token_name(other), its_logprob)
        top.setdefault(name, logprob)
        return name, logprob, top


class TextOffsets:
    """Where each token's text begins, in a text that is made of them token by token and begins at `place`."""

    def __init__(self, codec: TextCodec, place: int = 0) -> None:
        self.place = place
        self._detokenizer = Detokenizer(codec)

    def next(self, id: int, shown: bool) -> int:
        """The place of the next token, which has text only if it is shown."""
        place = self.place
        if shown:
            self.place += len(self._detokenizer.push(id))
        return place


async def _request(
    generation: Generation, fim: FillInTheMiddle, body: CompletionBody, prompt: str | list[int], healing: bool
) -> tuple[Request, str]:
    """The internal request of one prompt, as yet without a grammar, and the text that `echo` repeats."""
    codec, healed, text = generation.codec, "", ""
    stops: tuple[int, ...] = ()
    if body.suffix is not None and isinstance(prompt, str):
        heal = healing if body.token_healing is None else body.token_healing
        filling = await generation.tokenizing(len(prompt) + len(body.suffix), fim.fill, prompt, body.suffix, heal)
        ids, healed, stops = filling.prompt, filling.healed, filling.stop_token_ids
    else:
        encode = codec.encode_bare if body.add_special_tokens is False else codec.encode
        whole = prompt if isinstance(prompt, list) else await generation.tokenizing(len(prompt), encode, prompt)
        ids = body.truncated(whole, generation.max_total_tokens)
        if body.echo:
            text = prompt if isinstance(prompt, str) and len(ids) == len(whole) else codec.decode(ids)
        if body.token_healing and isinstance(prompt, str):
            ids, healed = cut_last_token(codec, ids, prompt)
    request = body.request(codec, ids)
    scored = bool(body.echo) and body.logprobs is not None
    request = replace(
        request,
        healed=healed,
        score_prompt=request.score_prompt or scored,
        stop_token_ids=(*request.stop_token_ids, *stops),
    )
    return request, text
