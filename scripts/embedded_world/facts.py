"""Facts: countries, units, days and months, colours, opposites, plurals, planets, animals.

A fact is a statement, the words that answer it shortly, and the ways to ask for it. What is held
out is a way to ask for a fact, never the fact. Source of the countries: common knowledge, compared
with Unicode CLDR (Unicode-3.0).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.embedded_world.lesson import Lesson, conversation, read_table
from scripts.embedded_world.pools import COUNTRIES, WORDS, named

FORMS = read_table("facts")
"""Of each relation the statement and the questions, with {c} for the subject and {v} for what is
said of it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`questions` ask for `statement`, of which `short` is the answer."""

    relation: str
    subject: str
    statement: str
    short: str
    questions: tuple[str, ...]


def _fact(relation: str, subject: str, short: str, name: str = "", many: str = "") -> Fact:
    """`name`: how the subject is called in a sentence, if not by itself. `many`: of a unit, what
    its parts are called.
    """
    value = named(short) if relation == "country" else short
    filled = [form.format(c=name or subject, v=value, many=many) for form in FORMS[relation]]
    statement, *questions = (text[0].upper() + text[1:] for text in filled)
    return Fact(relation, subject, statement, short, tuple(questions))


def _countries() -> Iterator[Fact]:
    for row in COUNTRIES:
        country, capital = row["country"], row["capital"]
        for relation in ("capital", "currency", "continent", "language"):
            yield _fact(relation, country, row[relation], named(country))
        if capital != country:
            yield _fact("country", capital, country)


def _words() -> Iterator[Fact]:
    for one, other in WORDS["opposites"]:
        yield _fact("opposite", one, other)
        yield _fact("opposite", other, one)
    for one, two, mixed in WORDS["mixtures"]:
        yield _fact("mixture", f"{one} and {two}", mixed)
        yield _fact("mixture", f"{two} and {one}", mixed)
    for relation, table in (("plural", "plurals"), ("colour", "colours")):
        for subject, short in WORDS[table].items():
            yield _fact(relation, subject, short)


def _measures() -> Iterator[Fact]:
    for one, many, number in WORDS["units"]:
        name = f"{'an' if one == 'hour' else 'a'} {one}"
        yield _fact("unit", f"{one} {many}", f"{number} {many}", name, many)
    for relation, names in (("day", WORDS["days"]), ("month", WORDS["months"])):
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            yield _fact(f"next {relation}", name, following)
            yield _fact(f"last {relation}", following, name)
    for month, length in zip(WORDS["months"], WORDS["lengths"], strict=True):
        yield _fact("length", month, str(length))
    for place, planet in enumerate(WORDS["planets"], 1):
        yield _fact("planet", planet, str(place))
    for animal, values in WORDS["animals"].items():
        for relation, value in zip(("young", "sound", "legs"), values, strict=True):
            yield _fact(relation, animal, str(value))


FACTS = [*_countries(), *_words(), *_measures()]
OF_RELATION: dict[str, list[Fact]] = {}
OF_SUBJECT: dict[str, list[Fact]] = {}
for _each in FACTS:
    OF_RELATION.setdefault(_each.relation, []).append(_each)
    OF_SUBJECT.setdefault(_each.subject, []).append(_each)
SUBJECTS = [*OF_SUBJECT]


def questions_of(relation: str, subject: str) -> tuple[str, ...]:
    """The ways to ask for a fact that there is."""
    return next(fact.questions for fact in OF_SUBJECT[subject] if fact.relation == relation)


def ask(rng: random.Random) -> Lesson:
    """A question in one of its ways, answered by the statement."""
    fact = rng.choice(FACTS)
    question = rng.choice(fact.questions)
    return Lesson("facts", (question,), conversation(question, fact.statement))


def tell(rng: random.Random) -> Lesson:
    """A paragraph: all that is known of some subjects, in the order of the tables, so that a long
    text says each thing once.
    """
    first = rng.randrange(len(SUBJECTS))
    subjects = SUBJECTS[first : first + rng.randint(1, 6)]
    statements = (fact.statement for subject in subjects for fact in OF_SUBJECT[subject])
    return Lesson("statements", (), completion=" ".join(statements))
