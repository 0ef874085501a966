"""Calls of tools: which one of several, its arguments from the sentence, none where none is wanted,
and the answer from a result. Names of tools vary.

What is held out is a sentence with its values.
"""

import random
from typing import Any

from scripts.embedded_world import chat, facts, numbers
from scripts.embedded_world.lesson import Lesson, read_table
from scripts.embedded_world.pools import WRITTEN, fill, value_of

TOOLS = read_table("tools")


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


def draw_tools(rng: random.Random) -> list[tuple[dict[str, Any], str]]:
    """One to four tools, each under one of its names."""
    return [(tool, rng.choice(tool["names"])) for tool in rng.sample(TOOLS, rng.randint(1, 4))]


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
    tools = [declared(*each) for each in draw_tools(rng)]
    return Lesson("no calls", lesson.keys, lesson.messages, tools)
