"""Calls of tools: which one of several, its arguments from the sentence, none where none is wanted,
and the answer from a result. Names of tools vary, and some tools are invented.

What is held out is a sentence with its values.
"""

import random
from typing import Any

from scripts.embedded_world import chat, facts, numbers
from scripts.embedded_world.lesson import Lesson, read_table
from scripts.embedded_world.pools import WRITTEN, fill, value_of

TOOLS = read_table("tools")
INVENTED_TOOLS = 0.35
"""The share of the tools that are put together from words."""
INVENTED_WORDS = read_table("invented")
PARAMETERS: dict[str, tuple[str, str]] = INVENTED_WORDS["parameters"]
"""Type and pool by name."""


def invent(rng: random.Random) -> dict[str, Any]:
    """A tool in the form of the table's."""
    verb, noun = rng.choice(INVENTED_WORDS["verbs"]), rng.choice(INVENTED_WORDS["nouns"])
    keys = rng.sample([*PARAMETERS], rng.randint(1, 3))
    spaced = rng.choice(("{key} {{{key}}}", "the {key} {{{key}}}")).format
    listed = " and ".join(spaced(key=key) for key in keys)
    return {
        "names": [f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"],
        "description": f"{verb.capitalize()} the {noun}",
        "parameters": {key: (*PARAMETERS[key], f"The {key}") for key in keys},
        "sentences": [
            f"{verb} the {noun} with {listed}.",
            f"Please {verb} the {noun} with {listed}",
            f"I want to {verb} the {noun} with {listed}.",
            f"{noun} to {verb}: {listed}",
        ],
        "result": "done",
        "reply": f"I did {verb} the {noun}.",
    }


def declared(tool: dict[str, Any], name: str) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    properties = {
        key: {"type": type, "description": description}
        for key, (type, _, description) in tool["parameters"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {
        "type": "function",
        "function": {"name": name, "description": tool["description"], "parameters": parameters},
    }


def draw_tools(
    rng: random.Random, without: tuple[str, ...] = ()
) -> list[tuple[dict[str, Any], str]]:
    """One to four tools, each under one of its names; none whose first name is in `without`."""
    offered = [tool for tool in TOOLS if tool["names"][0] not in without]
    tools = rng.sample(offered, rng.randint(1, 4))
    drawn = [invent(rng) if rng.random() < INVENTED_TOOLS else tool for tool in tools]
    distinct = {tool["description"]: tool for tool in drawn}.values()
    return [(tool, rng.choice(tool["names"])) for tool in distinct]


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message of one call."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def ask(rng: random.Random) -> Lesson:
    """A wish that one of the tools fulfils."""
    drawn = draw_tools(rng)
    tool, name = rng.choice(drawn)
    arguments = {key: value_of(pool, rng) for key, (_, pool, _) in tool["parameters"].items()}
    said = {
        key: WRITTEN["switch"][value] if isinstance(value, bool) else value
        for key, value in arguments.items()
    }
    user = fill(rng.choice(tool["sentences"]), rng, said)
    user = user[0].upper() + user[1:]
    turns = [{"role": "user", "content": user}, called(name, arguments)]
    return Lesson("calls", (user,), turns, [declared(*each) for each in drawn])


def answer(rng: random.Random) -> Lesson:
    """A wish, the call, its result, and the answer made of it."""
    drawn = draw_tools(rng)
    tool, name = rng.choice(drawn)
    arguments = {key: value_of(pool, rng) for key, (_, pool, _) in tool["parameters"].items()}
    said = {
        key: WRITTEN["switch"][value] if isinstance(value, bool) else value
        for key, value in arguments.items()
    }
    said |= {
        pool: value_of(pool, rng)
        for pool in ("degrees", "sky", "count", "hour", "year")
        if pool not in said
    }
    if "a" in said:
        said["sum"] = said["a"] + said["b"]
    user = fill(rng.choice(tool["sentences"]), rng, said)
    user = user[0].upper() + user[1:]
    result = {"role": "tool", "name": name, "content": fill(tool["result"], rng, said)}
    reply = {"role": "assistant", "content": fill(tool["reply"], rng, said)}
    turns = [{"role": "user", "content": user}, called(name, arguments), result, reply]
    return Lesson("results", (user,), turns, [declared(*each) for each in drawn])


def no_call(rng: random.Random) -> Lesson:
    """A question that the model answers itself although there are tools."""
    lesson = rng.choice((facts.ask, numbers.ask, chat.ask, chat.beyond))(rng)
    # Where a tool adds or finds people, calling it would be right as well.
    tools = [declared(*each) for each in draw_tools(rng, ("add", "find_user"))]
    return Lesson("no calls", lesson.keys, lesson.messages, tools)
