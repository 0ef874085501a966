"""Values to put into sentences: a table of pools by name, and how to fill a template from them."""

import random
import re
from typing import Any

from scripts.embedded_world.lesson import read_countries, read_table

WORDS = read_table("words")
COUNTRIES = read_countries()
ARTICLE = {"Gambia", "Maldives", "Netherlands", "Philippines", "United Kingdom", "United States"}
"""Countries that are named with "the"."""

CONSONANTS = read_table("invented")["consonants"]
INVENTED_NAMES = 0.12
"""The share of names that are invented."""


def named(country: str) -> str:
    """A country's name within a sentence."""
    return f"the {country}" if country in ARTICLE else country


_LISTS: dict[str, list[Any]] = {
    **read_table("pools"),
    "city": [row["capital"] for row in COUNTRIES],
    "capital": [row["capital"] for row in COUNTRIES],
    "country": [named(row["country"]) for row in COUNTRIES],
    "name": WORDS["names"],
    "surname": WORDS["surnames"],
    "job": WORDS["jobs"],
    "goods": WORDS["goods"],
    "event": WORDS["events"],
    "day": WORDS["days"],
    "word": [word for pair in WORDS["opposites"] for word in pair],
    "thing": read_table("labels")["things"],
    "nowhere": read_table("chat")["nowhere"],
    "title": read_table("chat")["titles"],
    "few": [*range(2, 10)],
    "small": [*range(2, 60)],
    "number": [*range(2, 1000)],
    "age": [*range(18, 90)],
    "hour": [*range(7, 22)],
    "warm": [*range(16, 25)],
    "degrees": [*range(1, 35)],
    "count": [*range(2, 900)],
    "year": [*range(1900, 2026)],
    "switch": [True, False],
    "yes": [True, False],
    "done": [True, False],
}
WRITTEN = {
    "yes": {True: "heated", False: "not heated"},
    "done": {True: "done", False: "not done"},
    "switch": {True: "on", False: "off"},
}
"""How a sentence says the values of a pool that are no texts or numbers."""


def invented(rng: random.Random) -> str:
    """A word of random syllables, so that a model learns to copy what it does not know."""
    syllables = (rng.choice(CONSONANTS) + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return "".join(syllables) + rng.choice(("", "", "n", "r", "s", "l"))


def value_of(pool: str, rng: random.Random) -> Any:
    """A value of a pool, sometimes an invented name; a person's full name is drawn from two."""
    if pool == "person":
        return f"{value_of('name', rng)} {value_of('surname', rng)}"
    if pool in ("name", "surname", "city") and rng.random() < INVENTED_NAMES:
        return invented(rng).capitalize()
    if pool in ("goods", "room", "event", "job") and rng.random() < INVENTED_NAMES:
        return invented(rng)
    return rng.choice(_LISTS[pool])


def fill(template: str, rng: random.Random, values: dict[str, Any] | None = None) -> str:
    """A template with {field} replaced: by `values`, else by a value of the pool of that name."""
    known = dict(values or {})

    def text(found: re.Match[str]) -> str:
        name = found[1]
        if name not in known:
            known[name] = value_of(name, rng)
        return str(known[name])

    return re.sub(r"\{(\w+)\}", text, template)
