"""Parts: the parts of an answer in the order in which they are drawn: thoughts, text and calls of
tools, one after the other. Knows no dialect.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from server.generation.stream import Piece

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


def is_whole(arguments: str) -> bool:
    """Whether the arguments of a call are not cut, as a limit or a stop token may do."""
    try:
        msgspec.json.decode(arguments, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


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
