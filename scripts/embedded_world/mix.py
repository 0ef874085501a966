"""The training documents: how many of each kind, and how a lesson is written as text.

Deterministic by seed. Invariant: no document holds a lesson of which a key is held out.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, Template

from commands.corpus import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from scripts.embedded_world import chat, decisions, facts, functions, numbers, records, tools
from scripts.embedded_world.lesson import Generator, Lesson

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MIX: dict[Generator, int] = {
    facts.ask: 18,
    facts.tell: 4,
    numbers.ask: 16,
    numbers.table: 8,
    records.ask: 10,
    functions.complete: 9,
    functions.fill_in: 10,
    functions.chat: 3,
    tools.ask: 10,
    tools.answer: 4,
    tools.no_call: 4,
    decisions.choose: 9,
    decisions.judge: 5,
    chat.ask: 3,
    chat.beyond: 4,
    chat.follow: 12,
}
"""Shares of the generators in the lessons."""
MOST_EXCHANGES = 4
"""Of one conversation."""
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


def text_of(lesson: Lesson, template: Template) -> str:
    """The lesson as the model reads it."""
    if lesson.messages:
        return template.render(messages=lesson.messages, tools=lesson.tools)
    if lesson.suffix:
        before, after = f"{FIM_PREFIX}{lesson.prompt}", f"{FIM_SUFFIX}{lesson.suffix}"
        return f"{before}{after}{FIM_MIDDLE}{lesson.completion}"
    return lesson.prompt + lesson.completion


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


def documents(count: int, seed: int) -> Iterator[str]:
    """Texts of `count` documents. Exchanges that stand alone are joined to short conversations."""
    rng, compiled, drawn = random.Random(seed), template(), lessons(seed)
    waiting: list[Lesson] = []
    made = 0
    while made < count:
        lesson = next(drawn)
        if lesson.messages and not lesson.tools and lesson.messages[0]["role"] == "user":
            waiting.append(lesson)
            if len(waiting) < rng.randint(1, MOST_EXCHANGES):
                continue
            turns = [turn for each in waiting for turn in each.messages]
            lesson, waiting = Lesson("conversation", (), turns), []
        made += 1
        yield text_of(lesson, compiled)


def write(folder: Path, count: int, seed: int) -> None:
    """Writes FOLDER/world.jsonl, one document a line, in its `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "world.jsonl").open("w", encoding="utf-8") as file:
        for text in documents(count, seed):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
