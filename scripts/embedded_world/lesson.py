"""What one training document and one question of the small world are: a conversation or a source
text, with the part that the model has to write.

Invariant: whether a lesson is held out depends on its keys alone, so that training and examination,
which draw from the same generators, never share one. Knows no kind of lesson.
"""

import csv
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_name("tables")
HELD_OUT = 8
"""One key in so many is kept from training."""


def read_table(name: str) -> Any:
    """The value in tables/NAME.json."""
    return json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))


def read_countries() -> list[dict[str, str]]:
    """Rows of country, capital, currency, continent and language."""
    with (TABLES / "countries.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, slots=True)
class Lesson:
    """Of a conversation `messages` holds all turns, in OpenAI's form, and the assistant's last one
    is what the model has to write. Of a source text that is `completion`, after `prompt`.
    """

    kind: str
    keys: tuple[str, ...]
    """What the lesson is about: itself first, then what else it holds an answer to."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt: str = ""
    completion: str = ""
    suffix: str = ""
    """What follows the completion in the text, where the model fills in the middle."""
    question: dict[str, Any] = field(default_factory=dict)
    """Of a decision: the question in the form of /v1/decisions, with the right `answer`."""

    @property
    def may_be_asked(self) -> bool:
        """Whether it is held out, as a question."""
        return _is_held_out(self.keys[0])

    @property
    def may_be_trained_on(self) -> bool:
        return not any(map(_is_held_out, self.keys))


def _is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT == 0


Generator = Callable[[random.Random], Lesson]
"""Draws one lesson of a kind."""


def conversation(user: str, answer: str, system: str = "") -> list[dict[str, Any]]:
    """The messages of one exchange."""
    before = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return [*before, *turns]
