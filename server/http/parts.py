"""Parts: the parts of an answer in the order in which they are drawn: thoughts, text and calls of
tools, one after the other; PartsReply: the base of replies that are made of them. Knows no dialect
but OpenAI's chat, as which such requests are read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.request import Request
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Output, Reply
from server.http.openai.chat import ChatReply

Change = tuple[Literal["begin", "add", "end"], int, "Part", str]
"""(what happens, the part's number, the part as it then is, the text that is added)"""


@dataclass(slots=True)
class Part:
    """A thought, a text, or a call of the tool `name`, of which `text` has the arguments."""

    kind: Literal["thought", "text", "call"]
    name: str = ""
    text: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call: none if a limit of tokens has cut them."""
        try:
            return dict(json.loads(self.text))
        except ValueError:
            return {}

    @property
    def is_whole(self) -> bool:
        """Whether the arguments of a call are not cut."""
        return self.arguments != {} or "".join(self.text.split()) == "{}"


class Parts:
    """The parts so far. One ends where the next begins, or by `end`."""

    def __init__(self) -> None:
        self.all: list[Part] = []

    def take(self, piece: Piece) -> list[Change]:
        """Adds a piece of an answer."""
        return [*self._take(piece)]

    def _take(self, piece: Piece) -> Iterator[Change]:
        for kind, text in (("thought", piece.thought), ("text", piece.text)):
            if text:
                if not self.all or self.all[-1].kind != kind:
                    yield from self._begin(Part(kind))  # type: ignore[arg-type]
                yield self._add(text)
        for call in piece.calls:
            if call.name is not None:
                yield from self._begin(Part("call", call.name))
            if call.arguments:
                yield self._add(call.arguments)

    def end(self) -> Iterator[Change]:
        """Ends the last part."""
        if self.all:
            yield "end", len(self.all) - 1, self.all[-1], ""

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self.end()
        self.all.append(part)
        yield "begin", len(self.all) - 1, replace(part), ""

    def _add(self, text: str) -> Change:
        self.all[-1].text += text
        return "add", len(self.all) - 1, self.all[-1], text


class PartsReply(Reply):
    """Base of the replies of one sequence that show its parts."""

    def __init__(self, body: Any, model: str, generation: Generation, streams: OpenStreams) -> None:
        self.body, self.model = body, model
        self.codec = generation.codec
        self.streams = streams
        self.output = Output(streams.choices[0])
        self.parts = Parts()

    @staticmethod
    async def request(generation: Generation, body: Any, client: str) -> Request:
        """The internal request of a body which says what it is as one of a chat, and how many
        tokens it asks for. Raises RequestError.
        """
        request = await ChatReply.prepare(generation, body.chat, client)
        return generation.within_context(request, body.max_output_tokens)

    @classmethod
    async def open(
        cls, generation: Generation, body: Any, model: str, reservation: Reservation
    ) -> Self:
        """Starts the sequence of a body. Raises RequestError."""
        request = await cls.request(generation, body, reservation.client)
        return cls(body, model, generation, generation.start([request], reservation))
