"""Anthropic's form of answers: a message of blocks, whole or as named events."""

from collections.abc import Iterable, Iterator
from typing import Any

from server.generation.stream import Piece
from server.http import sse
from server.http.anthropic.fields import MessagesBody
from server.http.parts import Change, Part, PartsReply

STOP_REASONS = {"eos_token": "end_turn", "length": "max_tokens"}
DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kinds of parts -> the kind of what is added to their blocks, and its field."""


class MessagesReply(PartsReply):
    """An answer of /v1/messages."""

    body: MessagesBody
    form = sse.NAMED_EVENTS

    def take(self, piece: Piece) -> list[Change]:
        self.output.take(piece)
        return self.parts.take(piece)

    def first_chunks(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message([], None, None)}]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return [*self._events(self.take(piece))]

    def last_chunks(self) -> list[dict[str, Any]]:
        reason, stop = self._ending()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        ended = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return [*self._events(self.parts.end()), ended, {"type": "message_stop"}]

    def full_response(self) -> dict[str, Any]:
        blocks = [self._block(index, part) for index, part in enumerate(self.parts.all)]
        return self._message(blocks, *self._ending())

    def _events(self, changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
        for what, index, part, text in changes:
            if what == "begin":
                block = self._block(index, part)
                yield {"type": "content_block_start", "index": index, "content_block": block}
            elif what == "add":
                type, field = DELTAS[part.kind]
                delta = {"type": type, field: text}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            else:
                yield {"type": "content_block_stop", "index": index}

    def _block(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        if part.kind == "thought":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        id = f"toolu_{self.streams.reservation.reply_id}_{index}"
        return {"type": "tool_use", "id": id, "name": part.name, "input": part.arguments}

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.streams.reservation.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    def _ending(self) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)"""
        finish = self.output.finish or "length"
        if finish == "stop_sequence":
            return finish, str(self.output.stop)
        if finish == "eos_token" and any(part.kind == "call" for part in self.parts.all):
            return "tool_use", None
        # The context holds fewer tokens than were asked for.
        most = self.output.choice.request.max_new_tokens
        if finish == "length" and most != self.body.max_tokens:
            return "model_context_window_exceeded", None
        return STOP_REASONS[finish], None

    def _usage(self) -> dict[str, int]:
        choice = self.output.choice
        return {
            "input_tokens": len(choice.request.prompt) - choice.num_cached,
            "cache_read_input_tokens": choice.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(self.output.tokens),
        }
