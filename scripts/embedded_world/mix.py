"""The training documents: how many of each kind, and how a lesson is written as text.

Deterministic by seed. Invariant: no document holds a lesson of which a key is held out.
"""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from rich.progress import track

from commands.corpus import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from scripts.embedded_world import chat, decisions, facts, functions, numbers, records, tools
from scripts.embedded_world.lesson import Generator, Lesson

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MIX: dict[Generator, int] = {
    facts.ask: 30,
    facts.tell: 5,
    numbers.ask: 26,
    numbers.table: 10,
    records.ask: 12,
    records.listed: 4,
    functions.complete: 8,
    functions.fill_in: 16,
    functions.chat: 5,
    tools.ask: 14,
    tools.answer: 5,
    tools.no_call: 12,
    decisions.choose: 32,
    decisions.judge: 26,
    decisions.label: 4,
    decisions.find_letters: 4,
    chat.ask: 5,
    chat.beyond: 10,
    chat.follow: 24,
}
"""Shares of the generators in the lessons."""
DOCUMENTS_OF_A_FILE = 60_000
ASSISTANT = "<|assistant|>"
CONTINUED, MOST_EARLIER = 0.2, 3
"""The share of conversations that have earlier exchanges, and how many at most."""
LOOSE = 0.3
"""Share of the questions that are asked as people write them."""
LOOSE_KINDS = ("facts", "numbers", "refusals", "calls", "no calls", "system prompts")
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
    """A question without its capital, its mark or the apostrophes of its contractions, or with a
    polite word before or after it.
    """
    if rng.random() < 0.5:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = re.sub(r"'(s|re|m)\b", r"\1", question)
    if rng.random() < 0.4:
        question = re.sub(r"[^.][?.!]$", lambda found: found[0][0], question)
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
    """Writes FOLDER/world-N.jsonl in place of earlier ones, DOCUMENTS_OF_A_FILE documents each, one
    a line: `prompt` and `completion`. By all processors; the documents do not depend on how many
    there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("world-*.jsonl"):
        earlier.unlink()
    firsts = range(0, count, DOCUMENTS_OF_A_FILE)
    counts = [min(DOCUMENTS_OF_A_FILE, count - first) for first in firsts]
    paths = [folder / f"world-{number}.jsonl" for number in range(len(counts))]
    seeds = [1000 * seed + number for number in range(len(counts))]
    with ProcessPoolExecutor() as pool:
        for _ in track(pool.map(_write_file, paths, counts, seeds), "writing", len(counts)):
            pass


def _write_file(path: Path, count: int, seed: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt, completion in documents(count, seed):
            line = {"prompt": prompt, "completion": completion}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
