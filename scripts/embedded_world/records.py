"""Sentences to JSON: people, orders, events, rooms, trips and tasks, with the keys that are asked
for, under names that vary.

What is held out is a sentence with its values.
"""

import json
import random
from typing import Any

from scripts.embedded_world.lesson import Lesson, conversation, read_table
from scripts.embedded_world.pools import WRITTEN, fill, value_of
from scripts.embedded_world.tools import PARAMETERS

RECORDS = read_table("records")
OTHER_KEYS = {
    "name": ("full_name", "person"),
    "age": ("years",),
    "city": ("place", "town"),
    "job": ("profession", "work"),
    "customer": ("buyer", "client"),
    "article": ("item", "product"),
    "quantity": ("count", "amount"),
    "price": ("total", "euros"),
    "title": ("event", "what"),
    "day": ("weekday", "when"),
    "hour": ("time", "start"),
    "traveller": ("who", "passenger"),
    "from": ("origin", "start"),
    "to": ("destination", "end"),
    "owner": ("who", "assignee"),
    "task": ("todo", "text"),
    "floor": ("level",),
    "area": ("size", "square_metres"),
}
REQUESTS = (
    "Write as JSON with the keys {keys}: {sentence}",
    "Extract {keys} as JSON: {sentence}",
    "{sentence}\nGive me {keys} as JSON.",
    "Turn this into a JSON object with {keys}.\n{sentence}",
    "{sentence} As JSON with the keys {keys}, please.",
)


def ask(rng: random.Random) -> Lesson:
    """A sentence, and the record in it as JSON."""
    kind = rng.choice([*RECORDS])
    record = RECORDS[kind]
    values = {field: value_of(pool, rng) for field, pool in record["fields"].items()}
    said = {
        field: WRITTEN.get(record["fields"][field], {}).get(value, value)
        for field, value in values.items()
    }
    sentence = fill(rng.choice(record["sentences"]), rng, said)
    sentence = sentence[0].upper() + sentence[1:] if "task" not in values else sentence
    fields = rng.sample([*values], rng.randint(2, len(values)))
    keys = {field: rng.choice((field, field, *OTHER_KEYS.get(field, ()))) for field in fields}
    if len({*keys.values()}) < len(keys):
        keys = {field: field for field in fields}
    return _asked("records", sentence, {keys[field]: values[field] for field in fields}, rng)


def listed(rng: random.Random) -> Lesson:
    """Words with their values, and some of them as JSON."""
    values = {
        key: value_of(pool, rng)
        for key, (_, pool) in rng.sample([*PARAMETERS.items()], rng.randint(2, 5))
    }
    form = rng.choice(("{}: {}", "{} {}", "the {} is {}", "{} = {}"))
    text = ", ".join(form.format(key, value) for key, value in values.items()) + "."
    wanted = rng.sample([*values], rng.randint(2, len(values)))
    return _asked("lists", text, {key: values[key] for key in wanted}, rng)


def _asked(kind: str, text: str, record: dict[str, Any], rng: random.Random) -> Lesson:
    """A request for a record that is in a text."""
    names = [*record]
    keys = ", ".join(names[:-1]) + rng.choice((" and ", ", ")) + names[-1]
    # As the server writes JSON under a schema.
    answer = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    request = rng.choice(REQUESTS).format(keys=keys, sentence=text)
    return Lesson(kind, (text,), conversation(request, answer))
