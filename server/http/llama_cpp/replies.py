"""/infill and /completion: llama.cpp's requests, with its defaults and its form of replies."""

import re
import time
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request, with_choices
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Output, OutputToken, Reply
from server.http.llama_cpp.fields import LlamaCppBody

_LINE_START = re.compile(r"\n([ \t]*)(?=[^ \t\r\n])")
STOP_TYPE = {"length": "limit", "eos_token": "eos", "stop_sequence": "word", "timeout": "limit"}


@dataclass(slots=True, kw_only=True)
class LlamaCppOutput(Output):
    """One sequence so far. It has finished too when `n_indent` or `max_seconds` is known to be
    exceeded.
    """

    n_indent: int
    max_seconds: float
    """Since the first token. The first line is not cut."""
    given: int = 0
    """Characters of the text that have been sent. With `n_indent` a line of spaces is held back
    until its indentation is known."""

    def add(self, piece: Piece) -> bool:
        """Adds a piece. Returns whether the sequence has to be ended before its end."""
        self.take(piece)
        cut = self._outdent()
        if (
            cut is None
            and piece.finish is None
            and "\n" in self.text
            and time.monotonic() - self.choice.first > self.max_seconds
        ):
            cut = len(self.text)
        if cut is not None:
            self.text = self.text[:cut]
            self.finish, self.stop = "length", None
        return cut is not None

    def next_text(self) -> str:
        """The text that was not sent yet and that no later token can remove."""
        line, certain = self.text.rfind("\n"), len(self.text)
        if self.n_indent and self.finish is None and line >= 0 and not self.text[line:].strip():
            certain = line
        text, self.given = self.text[self.given : certain], certain
        return text

    def _outdent(self) -> int | None:
        """Start of the first line indented by less than `n_indent`, not counting the line that the
        prefix has begun; None without one.
        """
        if not self.n_indent:
            return None
        for match in _LINE_START.finditer(self.text):
            if len(match[1]) < self.n_indent:
                return match.start()
        return None

    def fields(self, content: str, tokens: list[int]) -> dict[str, Any]:
        """The fields of each event and answer, with this text and these tokens."""
        return {
            "index": self.choice.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": len(self.choice.request.prompt),
        }

    def timings(self) -> dict[str, float]:
        """Times and speeds of the prompt and of the output."""
        choice, now = self.choice, time.monotonic()
        first = choice.first or now
        timings: dict[str, float] = {}
        for name, count, seconds in (
            ("prompt", len(choice.request.prompt), first - choice.arrival),
            ("predicted", len(self.tokens), now - first),
        ):
            milliseconds = max(1e-3, seconds * 1e3)
            timings[f"{name}_n"] = count
            timings[f"{name}_ms"] = milliseconds
            timings[f"{name}_per_token_ms"] = milliseconds / max(1, count)
            timings[f"{name}_per_second"] = 1e3 * count / milliseconds
        return timings


class LlamaCppReply(Reply):
    """A reply of /infill or /completion: an object, or a list of them where there are several
    sequences.
    """

    def __init__(
        self, body: LlamaCppBody, model_id: str, generation: Generation, streams: OpenStreams
    ) -> None:
        self.body = body
        self.codec = generation.codec
        self.n_ctx = generation.max_total_tokens
        self.streams = streams
        self.model_id = model_id
        n_indent, limit = body.n_indent or 0, body.t_max_predict_ms or 0
        seconds = limit / 1e3 if limit > 0 else inf
        self.outputs = [
            LlamaCppOutput(choice, n_indent=n_indent, max_seconds=seconds)
            for choice in streams.choices
        ]

    @classmethod
    async def open(
        cls, generation: Generation, body: LlamaCppBody, model_id: str, reservation: Reservation
    ) -> "LlamaCppReply":
        """Makes the prompts and starts their sequences. Raises RequestError."""
        requests: list[Request] = []
        sampling = await body.draws(generation, reservation.client)
        grammar = await generation.texts.grammar(body.source(), reservation.client)
        for filling in await body.prompts(generation, reservation.client):
            request = Request(
                prompt=filling.prompt,
                sampling=replace(sampling, seed=body.drawn_seed()),
                stop_strings=tuple(body.stop or ()),
                stop_token_ids=(*filling.stop_token_ids, *(body.stop_token_ids or ())),
                ignore_eos=bool(body.ignore_eos),
                min_new_tokens=body.min_tokens or 0,
                keep_stop=False,
                num_top=body.n_probs or 0,
                grammar=grammar,
                healed=filling.healed,
                priority=body.priority or 0,
                salt=body.salt(),
            )
            request = generation.within_context(request, body.n_predict)
            requests += with_choices(request, body.n_cmpl or 1)
        return cls(body, model_id, generation, generation.start(requests, reservation))

    def take(self, piece: Piece) -> LlamaCppOutput:
        """Adds a piece to its output, which is returned."""
        output = self.outputs[piece.choice]
        if output.add(piece):
            self.streams.finish(piece.choice)
        return output

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        output = self.take(piece)
        new = output.tokens[len(output.tokens) - (piece.token is not None) :]
        chunk = output.fields(output.next_text(), [token.id for token in new])
        chunk |= self._probabilities(new)
        if self.body.timings_per_token:
            chunk["timings"] = output.timings()
        return [chunk if output.finish is None else self._selected(chunk | self._ending(output))]

    def full_response(self) -> Any:
        answers = [
            self._selected(
                output.fields(
                    output.text, [token.id for token in output.tokens if self.body.return_tokens]
                )
                | self._probabilities(output.tokens)
                | self._ending(output)
            )
            for output in self.outputs
        ]
        return answers if len(answers) > 1 else answers[0]

    def _probabilities(self, tokens: list[OutputToken]) -> dict[str, Any]:
        """The log-probabilities of these tokens, if `n_probs` asks for them."""
        rows = (
            self._entry(token.id, token.logprob)
            | {"token": token.text, "top_logprobs": [self._entry(*top) for top in token.top]}
            for token in tokens
        )
        return {"completion_probabilities": rows} if self.body.n_probs else {}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        text, bytes = self.codec.token_text(id), [*self.codec.token_bytes(id)]
        return {"id": id, "token": text, "bytes": bytes, "logprob": logprob}

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields named by `response_fields`, `a/b` for b inside a; missing ones are left
        out.
        """
        if not self.body.response_fields:
            return answer
        selected = {}
        for path in self.body.response_fields:
            value: Any = answer
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected

    def _ending(self, output: LlamaCppOutput) -> dict[str, Any]:
        return {
            "stop": True,
            "model": self.model_id,
            "stop_type": STOP_TYPE[output.finish or "length"],
            "stopping_word": output.stop if output.finish == "stop_sequence" else "",
            "truncated": False,
            "tokens_cached": output.choice.num_cached,
            "generation_settings": {"n_ctx": self.n_ctx},
            "timings": output.timings(),
        }
