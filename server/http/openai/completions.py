"""/v1/completions: converts prompts to requests, and pieces to text_completion objects."""

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.generation.request import Request, with_choices
from server.generation.reservation import Reservation
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Output, OutputToken
from server.http.fields import default
from server.http.openai.fields import CompletionBody
from server.http.openai.replies import OpenAIReply
from server.protocol import PromptScore
from server.text.codec import Detokenizer
from server.text.fim import Filling, cut_last_token
from server.text.jobs import Prompts

MAX_EVENT_LOGPROBS = 2**14
"""Made in one go of about 10 ms, where answers that are not streamed are made in pieces."""


class CompletionReply(OpenAIReply):
    """A completion. Sequences are numbered prompt by prompt, `best_of` for each."""

    body: CompletionBody
    objects = "text_completion", "text_completion"
    """`object` of a whole reply, and of a chunk."""

    def __init__(self, body: CompletionBody, model_id: str, generation: Generation, streams: OpenStreams, prompts: list[str]) -> None:
        super().__init__("cmpl", self.objects[bool(body.stream)], model_id, body, generation, streams)
        self.prompts = prompts
        """The text of each prompt with `echo`, else empty."""
        self.per_prompt = len(self.outputs) // max(1, len(body.prompt))
        self.next_offsets = [*map(self._first_offset, self.outputs)]
        """The text offset of each output's next token, for log-probabilities."""
        self.detokenizers = [Detokenizer(self.codec) for _ in self.outputs]

    @staticmethod
    async def prepare(generation: Generation, body: CompletionBody, client: str) -> list[tuple[Request, str]]:
        """For each prompt its internal request, and its text for `echo`. Raises RequestError."""
        common = await body.request(generation, client, [])  # Once: a list of token ids may be long, and the prompts many.
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        job = Prompts(texts, body.add_special_tokens is False, body.suffix, default(body.token_healing, not common.grammar))
        truncated = body.suffix is None and body.truncate_prompt_tokens is not None
        filled = iter(await generation.tokenize(job, client, truncated) if texts else [])
        return [
            _request(generation, body, common, prompt, next(filled) if isinstance(prompt, str) else Filling(prompt))
            for prompt in body.prompt
        ]

    @classmethod
    async def open(cls, generation: Generation, body: CompletionBody, model_id: str, reservation: Reservation) -> "CompletionReply":
        """Encodes the prompts and starts their sequences. Raises RequestError."""
        prepared = await cls.prepare(generation, body, reservation.client)
        requests = [
            choice for request, _ in prepared for choice in with_choices(request, body.best_of or body.n or 1, all_score=bool(body.stream))
        ]
        prompts = [text for _, text in prepared] if body.echo else []
        return cls(body, model_id, generation, await generation.start(requests, reservation), prompts)

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
            "logprobs": self._logprobs(output, tokens, output.choice.prompt_scores if begins else None),
        }
        choice |= self.ending(output) | self.token_ids(tokens)
        return [self.chunk([choice | self.prompt_token_ids(output) if begins else choice])]

    def full_response(self) -> dict[str, Any]:
        wanted = self.body.n or 1
        shown: list[tuple[Output, Output]] = []
        for begin in range(0, len(self.outputs), self.per_prompt):
            outputs = self.outputs[begin : begin + self.per_prompt]
            best = sorted(outputs, key=lambda output: -output.mean_logprob)[:wanted] if wanted < len(outputs) else outputs
            shown += ((output, outputs[0]) for output in best)
        return self.head | {"choices": [partial(self._choice, i, *outputs) for i, outputs in enumerate(shown)], "usage": self.usage}

    def _choice(self, index: int, output: Output, first: Output) -> dict[str, Any]:
        """A choice of a reply that is not streamed. `first`: the output of the same prompt that has the prompt's scores."""
        choice = {
            "index": index,
            "text": self._echo(output) + output.text,
            "logprobs": self._logprobs(output, output.tokens, first.choice.prompt_scores),
        }
        return choice | self.ending(output) | self.prompt_logprobs(first) | self.token_ids(output.tokens) | self.prompt_token_ids(output)

    def _echo(self, output: Output) -> str:
        return self.prompts[output.choice.index // self.per_prompt] if self.prompts else ""

    def _first_offset(self, output: Output) -> int:
        """The text offset of the output's first token. With token healing the first tokens repeat the removed end of the prompt."""
        return len(self._echo(output)) - len(output.choice.request.healed)

    def _logprobs(self, output: Output, tokens: list[OutputToken], scores: Iterable[PromptScore] | None) -> dict[str, Any] | None:
        """OpenAI's legacy `logprobs`: parallel lists; with `echo` the prompt's tokens come first, where `scores` are given."""
        count, choice = self.body.logprobs, output.choice
        if count is None:
            return None
        skipped = frozenset() if self.body.skip_special_tokens is False else self.codec.special_ids
        *offsets, self.next_offsets[choice.index] = text_offsets(
            self.detokenizers[choice.index], tokens, self.next_offsets[choice.index], skipped
        )
        if scores is not None and self.body.echo:
            scored = [OutputToken(score.token, score.logprob, score.top[:count]) for score in scores]
            prompt = [OutputToken(choice.request.prompt[0], None), *scored]
            *within, end = text_offsets(Detokenizer(self.codec), prompt)
            # Special tokens that the tokenizer adds before the text, such as BOS, have no place in it: their offsets are below 0.
            offsets = [place + self._first_offset(output) - end for place in within] + offsets
            tokens = prompt + tokens
        return {
            "text_offset": (max(0, offset) for offset in offsets),
            "token_logprobs": (token.logprob for token in tokens),
            "tokens": (self.token_name(token.id) for token in tokens),
            "top_logprobs": map(self._top, tokens),
        }

    def _top(self, token: OutputToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, logprob in (*token.top, (token.id, token.logprob)):
            top.setdefault(self.token_name(id), logprob)
        return top


def text_offsets(detokenizer: Detokenizer, tokens: list[OutputToken], begin: int = 0, skipped: Set[int] = frozenset()) -> list[int]:
    """The text offset of each token, and that of a next one. Skipped token ids have no text."""
    return list(accumulate((0 if token.id in skipped else len(detokenizer.push(token.id)) for token in tokens), initial=begin))


def _request(
    generation: Generation, body: CompletionBody, common: Request, prompt: str | list[int], filling: Filling
) -> tuple[Request, str]:
    """The internal request of one prompt, made from what all prompts have in common, and the text for `echo`."""
    codec, ids, healed, text = generation.codec, filling.prompt, filling.healed, ""
    if body.suffix is None or not isinstance(prompt, str):
        ids = body.truncated(ids, generation.max_total_tokens)
        if body.echo:
            text = prompt if isinstance(prompt, str) and len(ids) == len(filling.prompt) else codec.decode(ids)
        if body.token_healing and isinstance(prompt, str):
            ids, healed = cut_last_token(codec, ids, prompt)
    scored = bool(body.echo) and body.logprobs is not None
    if scored and body.stream and (num_logprobs := len(ids) * ((body.logprobs or 0) + 1)) > MAX_EVENT_LOGPROBS:
        raise InvalidRequest(
            f"`echo` with `logprobs` makes {num_logprobs} log-probabilities of a prompt, and an event of a stream holds at most "
            f"{MAX_EVENT_LOGPROBS}; ask for fewer, or without `stream`",
            param="logprobs",
        )
    request = replace(
        common,
        prompt=ids,
        sampling=replace(common.sampling, seed=body.drawn_seed()),
        healed=healed,
        score_prompt=common.score_prompt or scored,
        stop_token_ids=(*common.stop_token_ids, *filling.stop_token_ids),
    )
    return request, text
