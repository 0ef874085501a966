"""The embedded model's world: what is asked was never taught, references are right, and answers are
judged rightly.
"""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.checkpoint.families import read_spec
from scripts.embedded_world import functions, mix, start
from scripts.embedded_world.examine import KINDS, Examiner, expected_answer, held_out
from scripts.embedded_world.lesson import Lesson, read_table
from server.config import EMBEDDED_MODEL


def taught(lesson: Lesson) -> str:
    """The part of a document by which a lesson would be known."""
    if not lesson.messages:
        return mix.text_of(lesson, mix.template())
    if lesson.kind == "numbers" and "=" in (said := expected_answer(lesson)):
        return f"\n{said}\n"
    return mix.text_of(
        Lesson(lesson.kind, lesson.keys, lesson.messages, lesson.tools), mix.template()
    )


def test_no_document_holds_a_question() -> None:
    texts = [*map("".join, mix.documents(4000, seed=1))]
    assert texts[:50] == [*map("".join, mix.documents(50, seed=1))]
    together = "\n".join(texts)
    for kind, generators in KINDS.items():
        questions = held_out(generators, 60)
        assert len(questions) == 60, kind
        assert not [each for each in questions if taught(each) in together], kind
    drawn = [each for each in islice(mix.lessons(seed=1), 200) if each.kind == "facts"]
    assert any(taught(each) in together for each in drawn)


def test_references_give_what_they_give_and_others_do_not() -> None:
    rng = random.Random(0)
    for _ in range(12):
        lesson = functions.complete(rng)
        source = lesson.prompt + lesson.completion
        assert functions.same_results(source, source)
        assert not functions.same_results(lesson.prompt + "\n    return object()\n", source)
    add = "def add(a, b):\n    return a + b"
    assert not functions.same_results("def add(a, b):\n    return a - b", add)
    assert not functions.same_results("def add(a, b:", add)
    assert functions.same_results("def plus(x, y):\n    return y + x", add)


@pytest.mark.parametrize("kind", [*KINDS])
def test_an_answer_is_judged(kind: str) -> None:
    (lesson, *_) = held_out(KINDS[kind], 3)
    for is_right in (True, False):
        examiner = Examiner("http://server")
        transport = httpx.MockTransport(lambda request, is_right=is_right: reply(lesson, is_right))
        examiner.client = httpx.Client(transport=transport, base_url="http://server")
        assert examiner.ask(lesson)[0] is is_right


def reply(lesson: Lesson, is_right: bool) -> httpx.Response:
    """What a server answers that knows the lesson, or does not."""
    body: Any
    if question := lesson.question:
        if question["type"] == "predicate":
            body = {"answers": [{"probability": float((question["answer"] == "yes") is is_right)}]}
        else:
            place = (ord(question["answer"]) - ord("A") + (not is_right)) % len(question["choices"])
            body = {"answers": [{"choice": question["choices"][place]["value"]}]}
    elif not lesson.messages:
        body = {"generated_text": lesson.completion if is_right else "?"}
    else:
        message: dict[str, Any] = (
            dict(lesson.messages[-1]) if is_right else {"content": "def f(): pass"}
        )
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            sent = {**function, "arguments": json.dumps(function["arguments"])}
            message["tool_calls"] = [{"function": sent}]
        body = {"choices": [{"message": message, "finish_reason": "stop"}]}
    return httpx.Response(200, json=body)


def test_the_questions_by_hand_are_sixty_and_in_no_document() -> None:
    rows = read_table("by_hand")
    together = "\n".join(map("".join, mix.documents(2000, seed=2)))
    assert len(rows) == 60
    for kind, asked, expected in rows:
        assert expected and (kind in ("no calls", "chat") or asked not in together), asked


def test_training_starts_from_a_checkpoint_like_the_embedded_model(tmp_path: Path) -> None:
    start.write(tmp_path, EMBEDDED_MODEL / "tokenizer.json")
    for path in tmp_path.iterdir():
        if path.suffix in (".json", ".jinja"):
            assert path.read_bytes() == (EMBEDDED_MODEL / path.name).read_bytes(), path.name
    assert read_spec(tmp_path) == read_spec(EMBEDDED_MODEL)
