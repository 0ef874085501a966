"""Answers made in pieces: the JSON of JSONResponse, made when it is needed, with the event loop
running in between.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from server.http import pieces as module
from server.http.pieces import JsonAnswers, pieces

VALUES: tuple[Any, ...] = (
    {},
    [],
    None,
    {"a": 1, "b": [], "c": [1, 2.5, 1e-07, None, True], "d": {"e": {}, "f": 'é"\\\n\x01\x7f'}},
    [{"a": [{"b": 1}, {"b": 2}]}, {"c": [[1, 2], []]}],
    [{}],
    "text",
)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_value_is_that_of_a_json_response(value: Any) -> None:
    assert json.loads(b"".join(pieces(value))) == json.loads(bytes(JSONResponse(value).body))


@pytest.mark.parametrize("count", [0, 1, module.ROWS, module.ROWS + 1, 10 * module.ROWS])
def test_an_iterator_is_an_array_and_a_function_its_result(count: int) -> None:
    rows = [{"id": i, "text": "é"} for i in range(count)]
    lazy = {
        "rows": iter(rows),
        "choices": [lambda i=i: {"index": i, "tokens": iter(range(count))} for i in range(3)],
    }
    plain = {"rows": rows, "choices": [{"index": i, "tokens": [*range(count)]} for i in range(3)]}
    assert b"".join(pieces(lazy)) == JSONResponse(plain).body


def test_rows_are_made_when_their_turn_comes() -> None:
    made: list[int] = []

    def rows() -> Iterator[int]:
        for i in range(10 * module.ROWS):
            made.append(i)
            yield i

    for number, _ in enumerate(pieces(rows())):
        assert len(made) <= module.ROWS * (number + 1)
    assert len(made) == 10 * module.ROWS


async def sent(response: Response) -> tuple[bytes, dict[str, str], int]:
    """The body, the headers and the number of writes of a response."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return b"".join(message["body"] for message in messages[1:]), headers, len(messages) - 1


async def test_a_small_answer_has_its_length_and_a_large_one_comes_in_writes() -> None:
    answers = JsonAnswers()
    small = await answers.response({"a": iter([1, 2])}, {"x-one": "1"})
    body, headers, writes = await sent(small)
    assert (body, headers["content-length"], headers["content-type"], headers["x-one"], writes) == (
        b'{"a":[1,2]}',
        "11",
        "application/json",
        "1",
        1,
    )
    text = "x" * 1000
    large = await answers.response({"a": (text for _ in range(4000))}, {"x-one": "1"})
    assert isinstance(large, StreamingResponse)
    body, headers, writes = await sent(large)
    assert body == JSONResponse({"a": [text] * 4000}).body
    assert "content-length" not in headers and headers["x-one"] == "1" and writes > 1


async def test_others_run_while_answers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slices of no time each turn of the event loop makes one text, of one of the answers."""
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.0)
    answers, num_made, turns, most = JsonAnswers(), 0, 0, 0

    def rows() -> Iterator[int]:
        nonlocal num_made
        for i in range(20 * module.ROWS):
            num_made += 1
            yield i

    async def watch() -> None:
        nonlocal turns, most
        while True:
            before = num_made
            await asyncio.sleep(0)
            turns, most = turns + 1, max(most, num_made - before)

    watching = asyncio.create_task(watch())
    found = await asyncio.gather(*(answers.response({"a": rows()}) for _ in range(5)))
    watching.cancel()
    assert {response.body for response in found} == {
        JSONResponse({"a": [*range(20 * module.ROWS)]}).body
    }
    assert turns >= 5 * 20 and most <= 2 * module.ROWS
