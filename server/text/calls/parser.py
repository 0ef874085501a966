"""Splits a reply, as its tokens arrive, into text, thoughts and calls of tools.

Calls are read as the grammar of server.text.calls.rules writes them: this is its inverse, and
checks nothing. Invariant: what is returned does not depend on how the text is divided between
tokens. It knows no engine and no dialects.
"""

import json
from collections.abc import Generator, Sequence
from typing import Literal

import msgspec

from server.text.calls.formats import CallFormat

NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
"""Characters of the names of functions."""
Calls = Literal["none", "auto", "first", "required"]


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    """An addition to the call number `index`: its name once, then its arguments, JSON text."""

    index: int
    name: str | None
    arguments: str


class Parsed(msgspec.Struct, frozen=True, gc=False):
    """The parts of a reply that became final with a token."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()


def ends_in_thought(form: CallFormat, prompt: Sequence[int]) -> bool:
    """Whether a prompt has begun a thought."""
    marks = (form.thought, form.thought_end)
    return (
        form.thought != ""
        and next((id for id in reversed(prompt) if id in marks), None) == form.thought
    )


class ReplyParser:
    """Parses one output. `calls`: none are looked for; after an opening mark; after one that begins
    the output; or the whole output is calls. `in_thought`: whether the prompt has begun a thought.
    """

    def __init__(self, form: CallFormat, calls: Calls, in_thought: bool) -> None:
        self._form = form
        self._opening = form.opening if calls in ("auto", "first") else ""
        self._only_first = calls == "first"
        self._calls = _CallReader(form) if calls == "required" else None
        self._in_thought = in_thought
        self._head = ""
        """What is left out if the thought begins with it."""
        self._held = ""
        """The end of the text that may begin an opening, or the beginning of a thought that may be
        its head's."""

    def push(self, token: int | None, text: str, special: bool, is_last: bool) -> Parsed:
        """Takes a token and the text that became final with it. No text is held back after the last
        one.
        """
        parsed = self._push(token, text, special)
        if not is_last:
            return parsed
        held = self._flush()
        return Parsed(parsed.text + held.text, parsed.thought + held.thought, parsed.calls)

    def _push(self, token: int | None, text: str, special: bool) -> Parsed:
        form = self._form
        if self._calls is not None:
            return Parsed(calls=self._calls.push(token, text))
        if token is not None and token == self._opening:
            self._calls = _CallReader(form)
            return self._flush()
        if token is not None and token in (form.thought, form.thought_end):
            held = self._flush()
            self._in_thought, self._head = token == form.thought, form.thought_head
            return held
        if self._in_thought:
            text, head, self._held = self._held + text, self._head, ""
            if len(text) < len(head) and head.startswith(text):
                self._held = text
                return Parsed()
            self._head = ""
            return Parsed(thought=text.removeprefix(head))
        text = self._until_opening(text, special)
        if text and self._only_first:
            self._opening = ""
        return Parsed(text)

    def _until_opening(self, text: str, special: bool) -> str:
        """The text that cannot be part of an opening. An opening that is a text ends where a token
        ends, and holds no special token.
        """
        opening = self._opening
        if not isinstance(opening, str) or not opening:
            return text
        text, self._held = self._held + text, ""
        if special:
            return text
        if text.endswith(opening):
            self._calls = _CallReader(self._form)
            return text.removesuffix(opening)
        length = next(n for n in range(len(opening) - 1, -1, -1) if text.endswith(opening[:n]))
        self._held = opening[:length]
        return text.removesuffix(self._held)

    def _flush(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(thought=held) if self._in_thought else Parsed(held)


class _CallReader:
    """Reads what follows an opening: an automaton over characters and the ids of marks."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._marks = form.opening, form.closing, form.quote, *form.stops
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        self._num_calls = 0
        self._automaton = self._run()
        next(self._automaton)

    def push(self, token: int | None, text: str) -> tuple[CallDelta, ...]:
        for item in [token] if token in self._marks else text:
            self._automaton.send(item)
        deltas = tuple(
            CallDelta(index, self._names.get(index), text)
            for index, text in self._arguments.items()
        )
        self._names.clear()
        self._arguments.clear()
        return deltas

    def _run(self) -> Generator[None, str | int | None, None]:
        form = self._form
        while True:
            seen = ""
            while seen != form.before:
                seen = f"{seen}{(yield)}"[-len(form.before) :]
            name, item = "", (yield)
            while item in NAME:
                name, item = f"{name}{item}", (yield)
            index = self._num_calls
            self._num_calls, self._names[index], self._arguments[index] = index + 1, name, ""
            for _ in form.after:
                item = yield
            arguments = _Arguments(form.quote or '"')
            self._arguments[index] = arguments.push(item)
            while arguments.levels:
                written = arguments.push((yield))
                self._arguments[index] = self._arguments.get(index, "") + written


class _Arguments:
    """Converts the arguments of a call to JSON, one character or mark at a time. They end when the
    last of `levels` is closed.
    """

    def __init__(self, quote: str | int) -> None:
        self._quote = quote
        self._is_json = quote == '"'
        self._in_text = self._escaped = self._in_key = False
        self._key_follows = False
        self.levels: list[str] = []

    def push(self, item: str | int | None) -> str:
        if item == self._quote and not self._escaped:
            self._in_text = not self._in_text
            return '"'
        letter = str(item)
        if self._in_text:
            self._escaped = self._is_json and letter == "\\" and not self._escaped
            return letter if self._is_json else json.dumps(letter, ensure_ascii=False)[1:-1]
        if letter in "{[":
            self.levels.append(letter)
        elif letter in "}]":
            self.levels.pop()
        return letter if self._is_json else self._with_quoted_key(letter)

    def _with_quoted_key(self, letter: str) -> str:
        if self._in_key:
            self._in_key = letter != ":"
            return '":' if letter == ":" else letter
        if self._key_follows and letter not in "{}[],":
            self._key_follows, self._in_key = False, True
            return f'"{letter}'
        self._key_follows = letter == "{" or (letter == "," and self.levels[-1] == "{")
        return letter
