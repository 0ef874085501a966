"""/v1/completions: converts prompts to requests, and pieces to text_completion objects."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request, with_choices
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Output, OutputToken
from server.http.fields import default
from server.http.openai.fields import CompletionBody
from server.http.openai.replies import OpenAIReply
from server.protocol import PromptScore
from server.text.codec import Detokenizer
from server.text.fim import Filling, cut_last_token
from server.text.jobs import Decode, Prompts

MAX_EVENT_LOGPROBS = 2**14
"""Made in one go of about 10 ms, where answers that are not streamed are made in pieces."""


class CompletionReply(OpenAIReply):
    """A completion. Sequences are numbered prompt by prompt, `best_of` for each."""

    body: CompletionBody
    objects = "text_completion", "text_completion"
    """`object` of a whole reply, and of a chunk."""

    def __init__(
        self,
        body: CompletionBody,
        model_id: str,
        generation: Generation,
        streams: OpenStreams,
        prompts: list[str],
    ) -> None:
        super().__init__(
            "cmpl", self.objects[bool(body.stream)], model_id, body, generation, streams
        )
        self.prompts = prompts
        """The text of each prompt with `echo`, else empty."""
        self.per_prompt = len(self.outputs) // max(1, len(body.prompt))
        self.next_offsets = [len(self._echo(output)) for output in self.outputs]
        """The text offset of each output's next token, for log-probabilities."""

    @staticmethod
    async def prepare(
        generation: Generation, body: CompletionBody, client: str
    ) -> list[tuple[Request, str]]:
        """For each prompt its internal request, and its text for `echo`. Raises RequestError."""
        # Once: a list of token ids may be long, and the prompts many.
        common = await body.request(generation, client, [])
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        job = Prompts(
            texts,
            body.add_special_tokens is False,
            body.suffix,
            default(body.token_healing, not common.grammar),
        )
        truncated = body.suffix is None and body.truncate_prompt_tokens is not None
        filled = iter(await generation.tokenize(job, client, truncated) if texts else [])
        made = [
            _request(
                generation,
                body,
                common,
                prompt,
                next(filled) if isinstance(prompt, str) else Filling(prompt),
            )
            for prompt in body.prompt
        ]
        echoed = [shown for _, shown in made if not isinstance(shown, str)]
        written = iter(await generation.texts.run(Decode(echoed), client))
        return [
            (request, shown if isinstance(shown, str) else next(written)) for request, shown in made
        ]

    @classmethod
    async def open(
        cls, generation: Generation, body: CompletionBody, model_id: str, reservation: Reservation
    ) -> "CompletionReply":
        """Encodes the prompts and starts their sequences. Raises RequestError."""
        prepared = await cls.prepare(generation, body, reservation.client)
        requests = [
            choice
            for request, _ in prepared
            for choice in with_choices(
                request, body.best_of or body.n or 1, all_score=bool(body.stream)
            )
        ]
        prompts = [text for _, text in prepared] if body.echo else []
        return cls(body, model_id, generation, generation.start(requests, reservation), prompts)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        output = self.outputs[piece.choice]
        begins = not output.text and not output.tokens
        tokens = self.take(piece)
        text = (self._echo(output) if begins else "") + piece.text
        if (
            not text
            and piece.finish is None
            and self.body.logprobs is None
            and not self.body.return_token_ids
        ):
            return []
        choice = {
            "index": piece.choice,
            "text": text,
            "logprobs": self._logprobs(
                output, tokens, output.choice.prompt_scores if begins else None
            ),
        }
        choice |= self.ending(output) | self.token_ids(tokens)
        return [self.chunk([choice | self.prompt_token_ids(output) if begins else choice])]

    def full_response(self) -> dict[str, Any]:
        wanted = self.body.n or 1
        shown: list[tuple[Output, Output]] = []
        for begin in range(0, len(self.outputs), self.per_prompt):
            outputs = self.outputs[begin : begin + self.per_prompt]
            best = (
                sorted(outputs, key=lambda output: -output.mean_logprob)[:wanted]
                if wanted < len(outputs)
                else outputs
            )
            shown += ((output, outputs[0]) for output in best)
        return self.head | {
            "choices": [partial(self._choice, i, *outputs) for i, outputs in enumerate(shown)],
            "usage": self.usage,
        }

    def _choice(self, index: int, output: Output, first: Output) -> dict[str, Any]:
        """A choice of a reply that is not streamed. `first`: the output of the same prompt that has
        the prompt's scores.
        """
        choice = {
            "index": index,
            "text": self._echo(output) + output.text,
            "logprobs": self._logprobs(output, output.tokens, first.choice.prompt_scores),
        }
        return (
            choice
            | self.ending(output)
            | self.prompt_logprobs(first)
            | self.token_ids(output.tokens)
            | self.prompt_token_ids(output)
        )

    def _echo(self, output: Output) -> str:
        return self.prompts[output.choice.index // self.per_prompt] if self.prompts else ""

    def _logprobs(
        self, output: Output, tokens: list[OutputToken], scores: Iterable[PromptScore] | None
    ) -> dict[str, Any] | None:
        """OpenAI's legacy `logprobs`: parallel lists; with `echo` the prompt's tokens come first,
        where `scores` are given.
        """
        count, choice = self.body.logprobs, output.choice
        if count is None:
            return None
        is_shown = self.body.skip_special_tokens is False
        lengths = [len(token.text) if is_shown or not token.special else 0 for token in tokens]
        *offsets, self.next_offsets[choice.index] = accumulate(
            lengths, initial=self.next_offsets[choice.index]
        )
        if scores is not None and self.body.echo:
            prompt, within = self._prompt_tokens(output)
            for token, score in zip(prompt[1:], scores, strict=True):
                token.logprob, token.top = score.logprob, score.top[:count]
            tokens, offsets = prompt + tokens, within + offsets
        return {
            "text_offset": offsets,
            "token_logprobs": (token.logprob for token in tokens),
            "tokens": (self.token_name(token.id, token.text) for token in tokens),
            "top_logprobs": map(self._top, tokens),
        }

    def _prompt_tokens(self, output: Output) -> tuple[list[OutputToken], list[int]]:
        """The tokens of a prompt that is echoed, whose texts joined are its text, and the text
        offset of each. Special tokens that the tokenizer has added, such as BOS, are not part of
        it. The last token has the text that token healing has removed.
        """
        ids, text = output.choice.request.prompt, self._echo(output)
        detokenizer = Detokenizer(self.codec)
        place = 0
        tokens = list[OutputToken]()
        offsets = list[int]()
        for id in ids:
            name, offset = self.codec.token_text(id), place
            if id not in self.codec.special_ids or text.startswith(name, place):
                name = detokenizer.push(id)
                place += len(name)
            tokens.append(OutputToken(id, None, text=name))
            offsets.append(offset)
        tokens[-1].text += detokenizer.flush() + output.choice.request.healed
        return tokens, offsets

    def _top(self, token: OutputToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, logprob in ((token.id, token.logprob), *token.top):
            top.setdefault(self.token_name(id, token.text if id == token.id else None), logprob)
        return top


def _request(
    generation: Generation,
    body: CompletionBody,
    common: Request,
    prompt: str | list[int],
    filling: Filling,
) -> tuple[Request, str | list[int]]:
    """The internal request of one prompt, made from what all prompts have in common, and the text
    for `echo`, or its tokens.
    """
    codec, ids, healed = generation.codec, filling.prompt, filling.healed
    text: str | list[int] = ""
    if body.suffix is None or not isinstance(prompt, str):
        ids = body.truncated(ids, generation.max_total_tokens)
        if body.echo:
            text = prompt if isinstance(prompt, str) and len(ids) == len(filling.prompt) else ids
        if body.token_healing and isinstance(prompt, str):
            ids, healed = cut_last_token(codec, ids, prompt)
    scored = bool(body.echo) and body.logprobs is not None
    if (
        scored
        and body.stream
        and (num_logprobs := len(ids) * ((body.logprobs or 0) + 1)) > MAX_EVENT_LOGPROBS
    ):
        raise InvalidRequest(
            f"`echo` with `logprobs` makes {num_logprobs} log-probabilities of a prompt, and an "
            "event of a stream holds at most "
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
