"""Decisions as /v1/decisions asks them: topic, sentiment and language of a sentence, chosen by a
letter, or a statement that is true or not.

What is held out is a sentence with its values under a question.
"""

import random
from string import ascii_uppercase
from typing import Any

from scripts.embedded_world import facts
from scripts.embedded_world.lesson import Lesson, conversation, read_table
from scripts.embedded_world.pools import fill, named

LABELS = read_table("labels")
TASKS = ("topic", "sentiment", "language")


def _lettered(labels: list[str]) -> list[str]:
    return [f"{letter}: {label}" for letter, label in zip(ascii_uppercase, labels, strict=False)]


def _lesson(
    text: str, asked: str, lines: list[str], how: str, answer: str, question: dict[str, Any]
) -> Lesson:
    """One question about a text, in the words of the server."""
    user = "\n".join(
        [f"{text}\n\nQuestion: {asked}", *lines, f"Answer with {how}, and nothing else."]
    )
    question = {"name": "asked", "instructions": asked, "answer": answer, "input": text, **question}
    return Lesson("decisions", (f"{text} {asked}",), conversation(user, answer), question=question)


def _sentence(task: str, rng: random.Random) -> tuple[str, str]:
    """(label, sentence)."""
    label = rng.choice([*LABELS[task]])
    return label, fill(rng.choice(LABELS[task][label]), rng)


def choose(rng: random.Random) -> Lesson:
    """Which of some labels fits a sentence."""
    task = rng.choice(TASKS)
    label, text = _sentence(task, rng)
    others = [other for other in LABELS[task] if other != label]
    choices = [label, *rng.sample(others, rng.randint(1, min(4, len(others))))]
    rng.shuffle(choices)
    question = {"type": "choice", "choices": [{"value": choice} for choice in choices]}
    answer = ascii_uppercase[choices.index(label)]
    asked = rng.choice(LABELS["questions"][task])
    return _lesson(text, asked, _lettered(choices), "the letter of one of these", answer, question)


def label(rng: random.Random) -> Lesson:
    """Sentences with their labels, as a text; none that is held out under a question."""
    lines: list[str] = []
    while len(lines) < 8:
        task = rng.choice(TASKS)
        said, text = _sentence(task, rng)
        asked = [*LABELS["questions"][task]]
        asked += [statement.format(label=said) for statement in LABELS["statements"][task]]
        if Lesson("labels", tuple(f"{text} {each}" for each in asked)).may_be_trained_on:
            lines.append(f"{text} {task.capitalize()}: {said}\n")
    return Lesson("labels", (), completion="".join(lines))


def find_letters(rng: random.Random) -> Lesson:
    """Labels after their letters, and the letter of each, as a text."""
    parts = []
    for _ in range(4):
        labels = [*LABELS[rng.choice(TASKS)]]
        drawn = rng.sample(labels, rng.randint(2, min(5, len(labels))))
        lines = _lettered(drawn)
        asked = rng.sample(lines, len(lines))
        parts += [*lines, *(f"{line[3:]} is {line[0]}" for line in asked)]
    return Lesson("letters", (), completion="\n".join(parts) + "\n")


def judge(rng: random.Random) -> Lesson:
    """Whether a statement about a sentence, or one of the facts, is true."""
    is_true = rng.random() < 0.5
    if rng.random() < 0.7:
        task = rng.choice(TASKS)
        label, text = _sentence(task, rng)
        said = label if is_true else rng.choice([each for each in LABELS[task] if each != label])
        asked = rng.choice(LABELS["statements"][task]).format(label=said)
    else:
        fact = rng.choice(facts.FACTS)
        others = [o for o in facts.OF_RELATION[fact.relation] if o.short != fact.short]
        text = fact.statement
        if not is_true and others:
            asked = text.replace(f" {named(fact.short)}", f" {named(rng.choice(others).short)}")
            is_true = asked == text
        else:
            asked, is_true = text, True
    return _lesson(text, asked, [], "yes or no", "yes" if is_true else "no", {"type": "predicate"})
