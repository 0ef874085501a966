"""Request bodies of /v1/decisions, as openai's client sends it, and of /v1/systemone; how their
questions are asked and answered.

Invariant: no label of a question is the beginning of another one. It knows no tokens.
"""

import json
from string import ascii_uppercase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.http import fields
from server.http.fields import Body, LimitedBody, Named
from server.http.openai.chat_fields import Message, TemplateFields, TextParts

MAX_QUESTIONS, MAX_CHOICES, MAX_LEVELS = 400, 255, 10


def as_text(value: Any) -> str:
    """A text as it is, and any other JSON value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class AnyQuestion(Body):
    """Base of the questions of both routes."""

    type: str

    @property
    def asked(self) -> str:
        """What is asked."""
        raise NotImplementedError

    @property
    def options(self) -> list[tuple[Any, Any]]:
        """The possible answers, in their order, each with what it means."""
        raise NotImplementedError

    @property
    def labels(self) -> list[tuple[str, ...]]:
        """The texts that stand for each answer at the beginning of a reply."""
        if self.type in ("predicate", "noul"):
            return [("yes", "Yes"), ("no", "No")]
        count = len(self.options)
        if self.type == "choice" and count <= len(ascii_uppercase):
            return [*zip(ascii_uppercase[:count])]
        return [(str(number).zfill(len(str(count - 1))),) for number in range(count)]

    @property
    def text(self) -> str:
        """The question as the model reads it."""
        lines, labels = [f"Question: {self.asked.strip()}"], self.labels
        for (label, *others), option in zip(labels, self.options, strict=True):
            # Yes and no are their own labels.
            if parts := " - ".join(
                as_text(part) for part in option[len(others) :] if part not in (None, "")
            ):
                lines.append(f"{label}: {parts}")
        how = {"y": "yes or no", "A": "the letter of one of these"}.get(
            labels[0][0][0], "the number of one of these"
        )
        return "\n".join([*lines, f"Answer with {how}, and nothing else."])

    def answer(self, shares: list[float], mass: float) -> dict[str, Any]:
        """Fields common to the answers of both routes. `shares`: the probability of each answer
        among all of them. `mass`: that of all labels together among all texts, of which the
        likeliest answer's part is the confidence.
        """
        likeliest, found = max(shares), shares[0]
        if self.type == "score":
            found = sum(i * share for i, share in enumerate(shares))
        elif self.type == "choice":
            found = self.options[shares.index(likeliest)][0]
        return {
            "type": self.type,
            self.type: found,
            "confidence": likeliest * mass,
            "label_mass": mass,
        }


class DecisionMessage(Message):
    """An item of the input: a message of text, of which parts are joined, a call of a tool, or what
    it returned.
    """

    type: (
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
        ]
        | None
    ) = None
    """A message, unless it is a call, with `call_id`, `name` and `arguments` or `input`, or what
    one returned, with `call_id` and `output`.
    """
    call_id: fields.Name | None = None
    """The call's id, which what it returned repeats."""
    arguments: fields.Text | None = None
    """The arguments of a function's call, as the text of a JSON object."""
    input: fields.Text | None = None
    """The input of a custom tool's call."""
    output: TextParts | None = None
    """What a call returned."""


class DecisionChoice(Body):
    """A possible answer to a question of the type choice."""

    value: fields.Json
    """The answer: a text, or true or false."""
    description: fields.Text | None = None
    """What the answer means. Default: none."""


class DecisionLevel(Body):
    """A level of a question of the type score."""

    label: fields.Text
    """The level's name."""
    description: fields.Text | None = None
    """What the level means. Default: none."""


class DecisionQuestion(AnyQuestion):
    """A question about the input."""

    type: Literal["predicate", "choice", "score"]
    """`predicate`: how likely a statement is true; `choice`: which of `choices` is right; `score`:
    which of `levels`, in their order."""
    instructions: TextParts
    """The question or the statement: a text, or a list of parts, which are joined."""
    name: fields.Name | None = None
    """Becomes the `name` of the answer. Default: none."""
    choices: list[DecisionChoice] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES, fail_fast=True
    )
    """The possible answers of the type choice: 1 to 255 different ones. Of a single one
    `label_mass` says how likely it is."""
    levels: list[DecisionLevel] | None = Field(
        default=None, min_length=1, max_length=MAX_LEVELS, fail_fast=True
    )
    """The levels of the type score: 1 to 10, from the lowest to the highest."""

    @model_validator(mode="after")
    def _check(self) -> "DecisionQuestion":
        if (self.choices is None) != (self.type != "choice") or (self.levels is None) != (
            self.type != "score"
        ):
            raise ValueError(
                "`choices` goes with the type choice, which needs it, and `levels` with the type "
                "score"
            )
        values = [choice.value for choice in self.choices or ()]
        if not all(isinstance(value, str | bool) for value in values) or len({*values}) < len(
            values
        ):
            raise ValueError("`choices` must have different values, strings or booleans")
        return self

    @property
    def asked(self) -> str:
        return "".join(part.text for part in self.instructions)

    @property
    def options(self) -> list[tuple[Any, Any]]:
        if self.choices is not None:
            return [(choice.value, choice.description) for choice in self.choices]
        return [(level.label, level.description) for level in self.levels or ()] or [
            ("yes", None),
            ("no", None),
        ]

    def answer(self, shares: list[float], mass: float) -> dict[str, Any]:
        """The answer as openai's client reads it, and the label mass."""
        if self.type == "predicate":
            return {
                "type": self.type,
                "name": self.name,
                "probability": shares[0],
                "label_mass": mass,
            }
        key = "value" if self.type == "choice" else "label"
        found: list[dict[str, Any]] = [
            {key: name, "probability": share}
            for (name, _), share in zip(self.options, shares, strict=True)
        ]
        if self.type == "score":
            found = [entry | {"value": i} for i, entry in enumerate(found)]
        return super().answer(shares, mass) | {"name": self.name, "probabilities": found}


class AnyDecisionBody(Named, TemplateFields, LimitedBody):
    """Base of the bodies of both routes."""

    stream: Literal[False] | None = None
    """Answers are not streamed: only false is accepted."""
    resumable: Literal[False] | None = None
    """Answers are not streamed: only false is accepted."""


def _in_messages(value: Any) -> Any:
    """Calls of tools, and what they returned, as messages of a chat; calls in a row are one
    message.
    """
    if isinstance(fields.text_or_list(value), str):
        return [{"role": "user", "content": value}]
    messages: list[Any] = []
    calls: list[Any] | None = None
    for item in value or ():
        kind = str(item.get("type")) if isinstance(item, dict) else ""
        if kind.endswith("_call"):
            if calls is None:
                messages.append({"role": "assistant", "tool_calls": (calls := [])})
            given = item.get("arguments") or json.dumps({"input": item.get("input", "")})
            function = {"name": item.get("name"), "arguments": given}
            calls.append({"id": item.get("call_id"), "function": function})
            continue
        calls = None
        if kind.endswith("_output"):
            item = {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": item.get("output"),
            }
        messages.append(item)
    return messages


Messages = Annotated[list[DecisionMessage], Field(min_length=1, max_length=1024, fail_fast=True)]


class DecisionBody(AnyDecisionBody):
    """The body of POST /v1/decisions. Null is the default of every field but `input` and
    `questions`.
    """

    input: Annotated[Messages, BeforeValidator(_in_messages, fields.Text | Messages)]
    """What the questions are about: a text, or 1 to 1024 messages, after which each question is
    asked alone."""
    questions: list[DecisionQuestion] = Field(
        min_length=1, max_length=MAX_QUESTIONS, fail_fast=True
    )
    """1 to 400 questions, none of which sees another."""


class SystemQuestion(AnyQuestion):
    """A question about the state."""

    type: Literal["choice", "noul", "score"]
    """`noul`: yes or no; `choice`: which of several answers is right; `score`: which of several
    levels, in their order."""
    instructions: fields.Text | None = None
    """The question. Default: none."""
    criteria: fields.Json = None
    """The possible answers. choice: an object of 1 to 255 answers with what they mean, or null.
    score: a list of 1 to 10 levels, from the lowest to the highest. noul: an object of what `true`
    and `false` mean, or nothing. What is no text is written as JSON.
    """

    @model_validator(mode="after")
    def _check(self) -> "SystemQuestion":
        given: Any = {} if self.criteria is None else self.criteria
        if self.type == "score":
            fits = isinstance(given, list) and 1 <= len(given) <= MAX_LEVELS
            shape = f"a list of 1 to {MAX_LEVELS} levels"
        elif self.type == "choice":
            fits = isinstance(given, dict) and 1 <= len(given) <= MAX_CHOICES
            shape = f"an object of 1 to {MAX_CHOICES} answers"
        else:
            fits = isinstance(given, dict) and given.keys() <= {"true", "false"}
            shape = "an object of `true` and `false`"
        if not fits:
            raise ValueError(f"`criteria` of the type {self.type} must be {shape}")
        return self

    @property
    def asked(self) -> str:
        return self.instructions or ""

    @property
    def options(self) -> list[tuple[Any, Any]]:
        given = self.criteria or {}
        if self.type == "noul":
            return [("yes", given.get("true")), ("no", given.get("false"))]
        return [(level, None) for level in given] if self.type == "score" else [*given.items()]

    def answer(self, shares: list[float], mass: float) -> dict[str, Any]:
        """The answer by the names of its options, or the numbers of its levels."""
        answer, names = super().answer(shares, mass), [name for name, _ in self.options]
        if self.type == "score":
            answer["legend"] = {str(i): name for i, name in enumerate(names)}
            names = [*answer["legend"]]
        return answer | {"probabilities": dict(zip(names, shares, strict=True))}


class SystemBody(AnyDecisionBody):
    """The body of POST /v1/systemone. Null is the default of every field but `state` and
    `questions`.
    """

    state: fields.Json
    """What the questions are about: a text, or any other JSON value but null, which is written as
    JSON."""
    questions: dict[fields.Name, SystemQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    """1 to 400 questions by their ids, none of which sees another."""
