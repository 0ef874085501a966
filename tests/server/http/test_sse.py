"""The encoding of events, and a response that closes its stream in whatever way it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.http.sse import EventResponse, event

SCOPE: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "POST", "path": "/", "headers": []}


def test_an_event_is_one_data_line_whatever_the_text() -> None:
    text = "a\r\nb\n\n\u2028\x00\x85data: x"
    lines = event({"text": text}).decode().split("\n")
    assert lines[0].startswith("data: ") and lines[1:] == ["", ""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}


async def events() -> AsyncIterator[list[bytes]]:
    while True:
        yield [event(1)]


async def never() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fails_at", [0, 1, 5])
async def test_a_client_that_leaves_closes_the_stream_at_once(fails_at: int) -> None:
    closed, sent = [], 0

    async def send(message: Any) -> None:
        nonlocal sent
        if sent == fails_at:
            raise OSError("gone")
        sent += 1

    with pytest.raises(Exception):  # noqa: B017  (what Starlette makes of it is its own affair)
        await EventResponse(events(), lambda: closed.append(True), {}, 15.0)(SCOPE, never, send)
    assert closed == [True]


async def test_a_client_that_leaves_while_a_write_is_paused_closes_the_stream_at_once() -> None:
    closed: list[bool] = []

    async def paused(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    task = asyncio.create_task(EventResponse(events(), lambda: closed.append(True), {}, 15.0)(SCOPE, never, paused))
    await asyncio.sleep(0.01)
    assert closed == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed == [True]


async def test_a_comment_in_every_silence_and_none_before_the_start_or_behind_the_end() -> None:
    sent: list[Any] = []

    async def slow() -> AsyncIterator[list[bytes]]:
        await asyncio.sleep(0.1)
        yield [event(1)]
        await asyncio.sleep(0.1)
        yield [event(2)]

    async def send(message: Any) -> None:
        sent.append(message)

    await EventResponse(slow(), lambda: None, {"x-name": "value"}, 0.03)(SCOPE, never, send)
    await asyncio.sleep(0.1)
    assert sent[0]["type"] == "http.response.start" and (b"x-name", b"value") in sent[0]["headers"]
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[-1] == b"" and [body for body in bodies if body.startswith(b"data")] == [event(1), event(2)]
    assert set(bodies) == {event(1), event(2), b": keep-alive\n\n", b""}
    # At least two in each silence of 0.1 s, unless the machine is very busy, and never two without a pause between them.
    assert 2 <= bodies.count(b": keep-alive\n\n") <= 8
