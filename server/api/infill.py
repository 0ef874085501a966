"""/infill: llama.cpp's request for what stands between a prefix and a suffix, with its defaults and its answers."""

import secrets
import time
from dataclasses import replace
from typing import Any

from server import protocol
from server.api.fields import default
from server.api.openai_fields import InfillBody
from server.fim import FillInTheMiddle, cut_last_token
from server.generation import Generation, Request
from server.stream import OpenStreams, Piece

STOP_TYPE = {"length": "limit", "eos_token": "eos", "stop_sequence": "word", "timeout": "limit"}


class InfillReply:
    """One answer."""

    def __init__(self, model_id: str, streams: OpenStreams) -> None:
        self.streams = streams
        self.model_id = model_id
        self.text = ""
        self.num_tokens = 0
        self.end: Piece | None = None

    @classmethod
    async def open(cls, generation: Generation, fim: FillInTheMiddle, body: InfillBody, model_id: str) -> "InfillReply":
        """Lays out the prompt and starts its sequence. Raises RequestError."""
        codec = generation.codec
        heal = body.token_healing is not False
        extra = tuple((file.filename or "", file.text) for file in body.input_extra or ())
        filling = fim.fill(body.input_prefix, body.input_suffix, heal and not body.prompt, extra)
        ids, healed = filling.prompt, filling.healed
        if body.prompt:
            begun = codec.encode_plain(body.prompt)
            if heal:
                begun, healed = cut_last_token(codec, begun, body.prompt)
            ids = ids + begun
        most = None if body.n_predict in (None, -1) else body.n_predict
        request = Request(
            prompt=ids,
            sampling=_sampling(body),
            max_new_tokens=most,
            stop_strings=tuple(body.stop or ()),
            stop_token_ids=filling.stop_token_ids,
            keep_stop=False,
            healed=healed,
            priority=body.priority or 0,
            timeout_s=None if body.t_max_predict_ms is None else body.t_max_predict_ms / 1e3,
        )
        return cls(model_id, generation.start(replace(request)))

    def first(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self.text += piece.text
        self.num_tokens += piece.token is not None
        tokens = [] if piece.token is None else [piece.token]
        counts = {"tokens_predicted": self.num_tokens, "tokens_evaluated": len(self.streams.choices[0].request.prompt)}
        chunk = {"index": 0, "content": piece.text, "tokens": tokens, "stop": False, "id_slot": -1} | counts
        if piece.finish is None:
            return [chunk]
        self.end = piece
        return [chunk | self._ending()]

    def last(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> dict[str, Any]:
        counts = {"tokens_predicted": self.num_tokens, "tokens_evaluated": len(self.streams.choices[0].request.prompt)}
        return {"index": 0, "content": self.text, "tokens": [], "id_slot": -1} | counts | self._ending()

    def _ending(self) -> dict[str, Any]:
        assert self.end is not None
        word = self.end.stop if self.end.finish == "stop_sequence" else ""
        return {
            "stop": True,
            "model": self.model_id,
            "stop_type": STOP_TYPE[self.end.finish or "length"],
            "stopping_word": word,
            "truncated": False,
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, float]:
        choice = self.streams.choices[0]
        now = time.monotonic()
        started = choice.started or now
        num_prompt, milliseconds = len(choice.request.prompt), (now - started) * 1e3
        return {
            "prompt_n": num_prompt,
            "predicted_n": self.num_tokens,
            "predicted_ms": milliseconds,
            "predicted_per_token_ms": milliseconds / max(1, self.num_tokens),
            "predicted_per_second": 1e3 * self.num_tokens / max(1e-3, milliseconds),
        }


def _sampling(body: InfillBody) -> protocol.SamplingParams:
    return protocol.SamplingParams(
        temperature=default(body.temperature, 0.8),
        top_k=max(0, default(body.top_k, 40)),
        top_p=default(body.top_p, 0.95),
        min_p=default(body.min_p, 0.05),
        repetition_penalty=default(body.repeat_penalty, 1.0),
        presence_penalty=default(body.presence_penalty, 0.0),
        frequency_penalty=default(body.frequency_penalty, 0.0),
        seed=secrets.randbits(63) if body.seed in (None, -1) else body.seed,
    )
