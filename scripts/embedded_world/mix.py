"""The training documents: how many of each kind, and how a lesson is written as text.

Deterministic by seed. Invariant: no document holds a lesson of which a key is held out.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

from commands.corpus import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from scripts.embedded_world import chat, decisions, facts, functions, numbers, records, tools
from scripts.embedded_world.lesson import Generator, Lesson

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MIX: dict[Generator, int] = {
    facts.ask: 24,
    facts.tell: 3,
    numbers.ask: 24,
    numbers.table: 10,
    records.ask: 9,
    functions.complete: 5,
    functions.fill_in: 15,
    functions.chat: 2,
    tools.ask: 8,
    tools.answer: 2,
    tools.no_call: 9,
    decisions.choose: 36,
    decisions.judge: 9,
    decisions.label: 3,
    decisions.find_letters: 2,
    chat.ask: 4,
    chat.beyond: 10,
    chat.follow: 28,
}
"""Shares of the generators in the lessons."""
ASSISTANT = "<|assistant|>"
CONTINUED, MOST_EARLIER = 0.2, 3
"""The share of conversations that have earlier exchanges, and how many at most."""
LOOSE = 0.3
"""Share of the questions that are asked as people write them."""
LOOSE_KINDS = ("facts", "numbers", "chat", "refusals", "calls", "no calls", "system prompts")
BEFORE = (
    "please: ",
    "Hi, ",
    "Hello! ",
    "Please tell me: ",
    "I want to know: ",
    "Say, ",
    "Quick question: ",
)
AFTER = (" Please.", " Thanks!", " please", " I forgot it.", " Thank you.")


def template() -> Template:
    """The model's chat template, as the server compiles it."""
    return Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )


def parts_of(lesson: Lesson, template: Template) -> tuple[str, str]:
    """The lesson as the model reads it: what it is given, and what it has to write."""
    if lesson.messages:
        text = template.render(messages=lesson.messages, tools=lesson.tools)
        begin = text.rindex(ASSISTANT) + len(ASSISTANT)
        return text[:begin], text[begin:]
    if lesson.suffix:
        before, after = f"{FIM_PREFIX}{lesson.prompt}", f"{FIM_SUFFIX}{lesson.suffix}"
        return f"{before}{after}{FIM_MIDDLE}", lesson.completion
    return lesson.prompt, lesson.completion


def text_of(lesson: Lesson, template: Template) -> str:
    """Both parts of a lesson."""
    return "".join(parts_of(lesson, template))


def loosely(question: str, rng: random.Random) -> str:
    """A question without its capital or its mark, or with a polite word before or after it."""
    if rng.random() < 0.5:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.4:
        question = question.rstrip("?.!")
    if rng.random() < 0.3:
        return rng.choice(BEFORE) + question
    return question + rng.choice(AFTER) if rng.random() < 0.3 else question


def _asked_loosely(lesson: Lesson, rng: random.Random) -> Lesson:
    """A lesson whose question may be asked loosely, if it is of a kind that has one."""
    if lesson.kind not in LOOSE_KINDS or rng.random() > LOOSE:
        return lesson
    turns = [
        turn | {"content": loosely(turn["content"], rng)} if turn["role"] == "user" else turn
        for turn in lesson.messages
    ]
    return replace(lesson, messages=turns)


def lessons(seed: int) -> Iterator[Lesson]:
    """Lessons to train on, without end."""
    rng = random.Random(seed)
    generators, shares = [*MIX], [*MIX.values()]
    while True:
        lesson = rng.choices(generators, shares)[0](rng)
        if lesson.may_be_trained_on:
            yield _asked_loosely(lesson, rng)


def documents(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """`count` documents: a prompt, which may be empty, and its completion. Some conversations have
    earlier exchanges.
    """
    rng, compiled = random.Random(seed), template()
    earlier: list[dict[str, Any]] = []
    for lesson in islice(lessons(seed), count):
        prompt, completion = parts_of(lesson, compiled)
        if lesson.messages and not lesson.tools and lesson.messages[0]["role"] == "user":
            if earlier and rng.random() < CONTINUED:
                joined = replace(lesson, messages=earlier + lesson.messages)
                prompt, completion = parts_of(joined, compiled)
            earlier = (earlier + lesson.messages)[-2 * rng.randint(1, MOST_EARLIER) :]
        yield prompt, completion


def write(folder: Path, count: int, seed: int) -> None:
    """Writes FOLDER/world.jsonl, one document a line: `prompt` and `completion`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "world.jsonl").open("w", encoding="utf-8") as file:
        for prompt, completion in documents(count, seed):
            line = {"prompt": prompt, "completion": completion}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
