"""Held-out questions of each kind to a running server, over HTTP and greedily: a table of how many
are answered rightly, and some failures of each kind.

An answer is right if it is the expected one; a function, if it gives what the reference gives; a
call, if its name and arguments do. Questions written by hand are right if the expected text occurs.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from commands.corpus import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from scripts.embedded_world import chat, decisions, facts, functions, numbers, records, tools
from scripts.embedded_world.lesson import Generator, Lesson, read_table

AT_ONCE = 16
KINDS: dict[str, tuple[Generator, ...]] = {
    "facts": (facts.ask,),
    "numbers": (numbers.ask,),
    "functions": (functions.complete,),
    "holes": (functions.fill_in,),
    "functions in chat": (functions.chat,),
    "records": (records.ask,),
    "calls": (tools.ask,),
    "no calls": (tools.no_call,),
    "results": (tools.answer,),
    "decisions": (decisions.choose, decisions.judge),
    "system prompts": (chat.follow,),
    "refusals": (chat.beyond,),
}
HAND_TOOLS = ("get_weather", "set_light", "set_timer", "call", "order")
Answer = tuple[bool, str]
"""Whether it is right, and what was answered."""


class Examiner:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=120.0)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The reply's JSON. Raises httpx.HTTPStatusError."""
        return self.client.post(path, json=body).raise_for_status().json()

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The reply's text, or NAME ARGUMENTS of its first call."""
        messages = [_as_sent(message) for message in messages]
        body = {"messages": messages, "temperature": 0, "max_tokens": 200}
        reply = self.post("/v1/chat/completions", body | ({"tools": tools} if tools else {}))
        message = reply["choices"][0]["message"]
        if message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            if reply["choices"][0]["finish_reason"] == "length":
                return f"{function['name']} {function['arguments']}"
            return _call(function["name"], json.loads(function["arguments"]))
        return message["content"] or ""

    def complete(self, prompt: str) -> str:
        """The greedy continuation of a text."""
        parameters = {"max_new_tokens": 160, "do_sample": False}
        reply = self.post("/generate", {"inputs": prompt, "parameters": parameters})
        return str(reply["generated_text"])

    def decide(self, question: dict[str, Any]) -> str:
        """The label of the likeliest answer."""
        asked = {key: value for key, value in question.items() if key not in ("answer", "input")}
        body = {"input": question["input"], "questions": [asked]}
        (answer,) = self.post("/v1/decisions", body)["answers"]
        if question["type"] == "predicate":
            return "yes" if answer["probability"] > 0.5 else "no"
        values = [choice["value"] for choice in question["choices"]]
        return chr(ord("A") + values.index(answer["choice"]))

    def ask(self, lesson: Lesson) -> Answer:
        """Asks one question and judges the answer."""
        if lesson.question:
            said = self.decide(lesson.question)
            return said == lesson.question["answer"], said
        if not lesson.messages:
            prompt = lesson.prompt
            if lesson.suffix:
                prompt = f"{FIM_PREFIX}{prompt}{FIM_SUFFIX}{lesson.suffix}{FIM_MIDDLE}"
            said = self.complete(prompt)
            return _same_function(lesson, said), said
        said = self.chat(lesson.messages[:-1], lesson.tools)
        if lesson.kind == "functions in chat":
            code = said.removeprefix("```python\n").split("```")[0]
            expected = (
                lesson.messages[-1]["content"].removeprefix("```python\n").removesuffix("```")
            )
            return functions.same_results(code, expected), said
        return said == expected_answer(lesson), said


def _same_function(lesson: Lesson, said: str) -> bool:
    source = lesson.prompt + said + lesson.suffix
    return functions.same_results(source, lesson.prompt + lesson.completion + lesson.suffix)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form, where arguments are a text and calls have ids."""
    if message["role"] == "tool":
        return message | {"tool_call_id": "call_1"}
    calls = [
        {
            "id": "call_1",
            "type": "function",
            "function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def expected_answer(lesson: Lesson) -> str:
    """What the last message of a conversation says or calls."""
    message = lesson.messages[-1]
    if "tool_calls" in message:
        function = message["tool_calls"][0]["function"]
        return _call(function["name"], function["arguments"])
    return str(message["content"])


def held_out(generators: tuple[Generator, ...], count: int) -> list[Lesson]:
    """At most `count` different questions that training never saw."""
    rng, found = random.Random(2026), dict[tuple[str, str], Lesson]()
    for _ in range(200 * count):
        lesson = rng.choice(generators)(rng)
        if lesson.may_be_asked:
            found.setdefault((lesson.keys[0], lesson.prompt), lesson)
        if len(found) == count:
            break
    return [*found.values()]


def asked_of(lesson: Lesson) -> str:
    """The question, for a table of failures."""
    if lesson.messages:
        return " | ".join(str(m.get("content") or "call") for m in lesson.messages[:-1])
    return lesson.prompt + (f"<hole>{lesson.suffix}" if lesson.suffix else "")


def by_hand(examiner: Examiner) -> list[tuple[str, str, Answer]]:
    """(question, expected, answer) of the questions that were written by hand."""
    declared = [
        tools.declared(tool, name)
        for name in HAND_TOOLS
        for tool in tools.TOOLS
        if name in tool["names"]
    ]

    def ask(row: tuple[str, str, str]) -> tuple[str, str, Answer]:
        kind, asked, expected = row
        if kind == "functions":
            said = examiner.complete(asked)
        else:
            turns = [{"role": "user", "content": asked}]
            said = examiner.chat(turns, declared if kind in ("calls", "no calls") else [])
        right = said == expected if kind in ("calls", "records", "decisions") else expected in said
        return asked, expected, (right, said)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(ask, read_table("by_hand"))]


def run(url: str, questions: int, failures: int) -> int:
    """Prints the table and the failures. The exit status is 1 where no server answers, else 0,
    whatever the results are.
    """
    examiner, console = Examiner(url), Console(highlight=False)
    try:
        examiner.client.get("/health").raise_for_status()
    except httpx.HTTPError as error:
        console.print(
            f"no server answers at {url} ({error}); start one: scripts/serve", markup=False
        )
        return 1
    results: dict[str, list[tuple[str, str, Answer]]] = {}
    for kind, generators in track(KINDS.items(), "examining", console=Console(stderr=True)):
        lessons = held_out(generators, questions)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [*pool.map(examiner.ask, lessons)]
        results[kind] = [
            (asked_of(lesson), _expected(lesson), answer)
            for lesson, answer in zip(lessons, answers, strict=True)
        ]
    results["by hand"] = by_hand(examiner)
    table = Table("kind", "questions", "right", "share")
    for kind, rows in results.items():
        right = sum(answer[0] for _, _, answer in rows)
        table.add_row(kind, str(len(rows)), str(right), f"{right / len(rows):.1%}")
    for kind, rows in results.items():
        wrong = [row for row in rows if not row[2][0]]
        for asked, expected, (_, said) in wrong[:failures]:
            console.print(
                f"{kind}: {asked!r}\n  expected {expected!r}\n  answered {said!r}", markup=False
            )
    console.print(table)
    return 0


def _expected(lesson: Lesson) -> str:
    if lesson.question:
        return str(lesson.question["answer"])
    return expected_answer(lesson) if lesson.messages else lesson.completion
