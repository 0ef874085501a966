"""/infill: llama.cpp's fill-in-the-middle request, with its defaults and its form of replies."""

import re
import secrets
import time
from typing import Any

from server import protocol
from server.generation.generation import Generation
from server.generation.request import Request
from server.generation.reservation import Reservation
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Reply
from server.http.fields import default
from server.http.openai.infill_fields import InfillBody
from server.supervision.token_writer import COUNT, TEXT, TOKEN_ID
from server.text.codec import TextCodec
from server.text.fim import Filling
from server.text.jobs import Fill

ALL_SAMPLERS = ("top_k", "top_p", "min_p", "temperature")
_LINE_START = re.compile(r"\n([ \t]*)(?=[^ \t\r\n])")
STOP_TYPE = {"length": "limit", "eos_token": "eos", "stop_sequence": "word", "timeout": "limit"}


class InfillReply(Reply):
    """A reply of /infill."""

    def __init__(self, body: InfillBody, model_id: str, codec: TextCodec, streams: OpenStreams) -> None:
        self.body = body
        self.codec = codec
        self.streams = streams
        self.model_id = model_id
        self.text = ""
        self.given = 0
        """Characters of the text that have been sent. With `n_indent` a line of spaces is held back until its indentation is known."""
        self.num_tokens = 0
        self.end: Piece | None = None

    @classmethod
    async def open(cls, generation: Generation, body: InfillBody, model_id: str, reservation: Reservation) -> "InfillReply":
        """Builds the fill-in-the-middle prompt and starts its sequence. Raises RequestError."""
        extra = tuple((file.filename or "", file.text) for file in body.input_extra or ())
        heal = body.token_healing is not False
        job = Fill(body.input_prefix, body.input_suffix, heal, extra, "input_suffix", body.prompt or "")
        filling: Filling = await generation.tokenize(job, reservation.client)
        request = Request(
            prompt=filling.prompt,
            sampling=_sampling(body),
            max_new_tokens=None if body.n_predict in (None, -1) else body.n_predict,
            stop_strings=tuple(body.stop or ()),
            stop_token_ids=filling.stop_token_ids,
            keep_stop=False,
            healed=filling.healed,
            priority=body.priority or 0,
            timeout_s=None if body.t_max_predict_ms is None else body.t_max_predict_ms / 1e3,
            salt=secrets.token_hex(16) if body.cache_prompt is False else "",
        )
        return cls(body, model_id, generation.codec, await generation.start([request], reservation))

    def take(self, piece: Piece) -> None:
        """Adds a piece. `end` becomes the last piece: the sequence's last one, or the one after which a line is known to be indented by
        less than `n_indent`.
        """
        self.text += piece.text
        self.num_tokens += piece.token is not None
        cut = self._outdent()
        if cut is not None:
            self.text = self.text[:cut]
            self.streams.finish(0)
            self.end = Piece(0, piece.token, "", finish="length")
        elif piece.finish is not None:
            self.end = piece

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self.take(piece)
        certain = len(self.text) if self.end is not None else self._certain()
        content, self.given = self.text[self.given : certain], certain
        tokens = [] if piece.token is None else [piece.token]
        chunk = {"index": 0, "content": content, "tokens": tokens, "stop": False, "id_slot": -1} | self._counts()
        return [chunk if self.end is None else self._selected(chunk | self._ending())]

    def plain_chunk(self, choice: int) -> dict[str, Any] | None:
        if self.body.n_indent:
            return None
        counts = self._counts() | {"tokens_predicted": COUNT}
        return {"index": 0, "content": TEXT, "tokens": [TOKEN_ID], "stop": False, "id_slot": -1} | counts

    def add_written(self, choice: int, ids: list[int]) -> None:
        self.text += self.codec.plain_texts(ids)
        self.given = len(self.text)
        self.num_tokens += len(ids)

    def _certain(self) -> int:
        """Length of the text that no later token can remove."""
        line = self.text.rfind("\n")
        return len(self.text) if not self.body.n_indent or line < 0 or self.text[line:].strip() else line

    def _outdent(self) -> int | None:
        """Start of the first line indented by less than `n_indent`, not counting the line that the prefix has begun; None without one."""
        if not self.body.n_indent:
            return None
        for match in _LINE_START.finditer(self.text):
            if len(match[1]) < self.body.n_indent:
                return match.start()
        return None

    def full_response(self) -> dict[str, Any]:
        return self._selected({"index": 0, "content": self.text, "tokens": [], "id_slot": -1} | self._counts() | self._ending())

    def _counts(self) -> dict[str, int]:
        return {"tokens_predicted": self.num_tokens, "tokens_evaluated": len(self.streams.choices[0].request.prompt)}

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields named by `response_fields`, `a/b` for b inside a; missing ones are left out."""
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

    def _ending(self) -> dict[str, Any]:
        assert self.end is not None
        return {
            "stop": True,
            "model": self.model_id,
            "stop_type": STOP_TYPE[self.end.finish or "length"],
            "stopping_word": self.end.stop if self.end.finish == "stop_sequence" else "",
            "truncated": False,
            "tokens_cached": 0,
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, float]:
        choice, now = self.streams.choices[0], time.monotonic()
        first = choice.first or now
        timings: dict[str, float] = {}
        for name, count, seconds in (
            ("prompt", len(choice.request.prompt), first - choice.arrival),
            ("predicted", self.num_tokens, now - first),
        ):
            milliseconds = max(1e-3, seconds * 1e3)
            timings[f"{name}_n"] = count
            timings[f"{name}_ms"] = milliseconds
            timings[f"{name}_per_token_ms"] = milliseconds / max(1, count)
            timings[f"{name}_per_second"] = 1e3 * count / milliseconds
        return timings


def _sampling(body: InfillBody) -> protocol.Sampling:
    """Sampling parameters with llama.cpp's defaults. A sampler that is not in `samplers` is off."""
    samplers = ALL_SAMPLERS if body.samplers is None else body.samplers
    return protocol.Sampling(
        temperature=default(body.temperature, 0.8) if "temperature" in samplers else 1.0,
        top_k=max(0, default(body.top_k, 40)) if "top_k" in samplers else 0,
        top_p=default(body.top_p, 0.95) if "top_p" in samplers else 1.0,
        min_p=default(body.min_p, 0.05) if "min_p" in samplers else 0.0,
        repetition_penalty=default(body.repeat_penalty, 1.0),
        presence_penalty=default(body.presence_penalty, 0.0),
        frequency_penalty=default(body.frequency_penalty, 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )
