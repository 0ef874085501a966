"""The encoding of events, and a response that closes its stream in whatever way it ends."""

import asyncio
import json
import time
from collections import deque
from typing import Any

import pytest

from server.generation.arrivals import SLICE_SECONDS, Arrivals, Wake
from server.http.exchange import exchange_of
from server.http.sse import MAX_EVENTS_PER_WRITE, EventResponse, event

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"spec_version": "2.4"},
    "method": "POST",
    "path": "/",
    "headers": [],
}


def test_an_event_is_one_data_line_whatever_the_text() -> None:
    text = "a\r\nb\n\n\u2028\x00\x85data: x"
    lines = event({"text": text}).decode().split("\n")
    assert lines[0].startswith("data: ") and lines[1:] == ["", ""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}


class Endless:
    """A source that always has an event."""

    ended = False

    def take(self) -> list[bytes]:
        return [event({"n": 1})]

    def listen(self, wake: Wake) -> None:
        """Nothing has to be waited for."""


class Given:
    """A source of the events that a test gives it."""

    def __init__(self) -> None:
        self.batches: deque[list[bytes]] = deque()
        self.is_last = False
        self.wake: Wake = lambda: None

    @property
    def ended(self) -> bool:
        return self.is_last and not self.batches

    def take(self) -> list[bytes]:
        return self.batches.popleft() if self.batches else []

    def listen(self, wake: Wake) -> None:
        self.wake = wake

    def give(self, *events: bytes, is_last: bool = False) -> None:
        self.batches.append([*events])
        self.is_last = is_last
        if (act := self.wake()) is not None:
            act()


class Parts:
    """A connection that keeps the parts of a response's body."""

    def __init__(self, sent: list[bytes]) -> None:
        self.may_write = True
        self._sent = sent

    def write(self, data: bytes) -> None:
        self._sent.append(data)


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
        await EventResponse(Endless(), lambda: closed.append(True), {}, 15.0)(SCOPE, never, send)
    assert closed == [True]


async def test_a_client_that_leaves_while_a_write_is_paused_closes_the_stream_at_once() -> None:
    closed: list[bool] = []

    async def paused(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    task = asyncio.create_task(
        EventResponse(Endless(), lambda: closed.append(True), {}, 15.0)(SCOPE, never, paused)
    )
    await asyncio.sleep(0.01)
    assert closed == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed == [True]


async def test_a_comment_in_every_silence_and_none_before_the_start_or_behind_the_end() -> None:
    sent: list[Any] = []

    source, loop = Given(), asyncio.get_running_loop()
    loop.call_later(0.1, source.give, event({"n": 1}))
    loop.call_later(0.2, lambda: source.give(event({"n": 2}), is_last=True))

    async def send(message: Any) -> None:
        sent.append(message)

    await EventResponse(source, lambda: None, {"x-name": "value"}, 0.03)(SCOPE, never, send)
    await asyncio.sleep(0.1)
    assert sent[0]["type"] == "http.response.start" and (b"x-name", b"value") in sent[0]["headers"]
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[-1] == b"" and [body for body in bodies if body.startswith(b"data")] == [
        event({"n": 1}),
        event({"n": 2}),
    ]
    assert set(bodies) == {event({"n": 1}), event({"n": 2}), b": keep-alive\n\n", b""}
    # At least two in each silence of 0.1 s, unless the machine is very busy, and never two without
    # a pause between them.
    assert 2 <= bodies.count(b": keep-alive\n\n") <= 8


async def test_what_has_come_is_written_by_the_call_that_says_so_unless_the_client_does_not_keep_up() -> (  # noqa: E501
    None
):
    source, sent = Given(), list[bytes]()
    scope = SCOPE | {}
    chunks = Parts(sent)
    exchange_of(scope).chunks = chunks

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"head"))

    task = asyncio.create_task(EventResponse(source, lambda: None, {}, 15.0)(scope, never, send))
    await asyncio.sleep(0.01)
    assert sent == [b"head"]
    source.give(event({"n": 1}), event({"n": 2}))
    assert sent == [b"head", event({"n": 1}) + event({"n": 2})]
    chunks.may_write = False
    source.give(event({"n": 3}))
    assert len(sent) == 2
    await asyncio.sleep(0.01)
    assert sent[2:] == [event({"n": 3})]
    chunks.may_write = True
    many = [event({"n": i}) for i in range(MAX_EVENTS_PER_WRITE)]
    source.give(*many)
    source.give(event({"n": 4}), is_last=True)
    assert sent[3:] == [b"".join(many)]
    await task
    assert sent[4:] == [event({"n": 4}), b""]


async def test_tokens_without_events_are_a_silence() -> None:
    source, sent, scope = Given(), list[bytes](), SCOPE | {}
    exchange_of(scope).chunks = Parts(sent)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"head"))

    task = asyncio.create_task(EventResponse(source, lambda: None, {}, 0.05)(scope, never, send))
    for _ in range(20):
        await asyncio.sleep(0.01)
        source.give()
    assert b": keep-alive\n\n" in sent
    source.give(is_last=True)
    await task


async def test_an_error_in_what_has_come_ends_the_response() -> None:
    source, closed, scope = Given(), list[bool](), SCOPE | {}
    exchange_of(scope).chunks = Parts([])

    async def send(message: Any) -> None: ...

    def take() -> list[bytes]:
        raise ValueError("nothing to take")

    task = asyncio.create_task(
        EventResponse(source, lambda: closed.append(True), {}, 15.0)(scope, never, send)
    )
    await asyncio.sleep(0.01)
    source.take = take  # type: ignore[method-assign]
    source.give(event({"n": 1}))  # Raises nothing: it may be called for several responses.
    with pytest.raises(BaseException) as raised:
        await asyncio.wait_for(task, 1.0)
    assert "nothing to take" in repr(raised.value) and closed == [True]


async def test_an_error_of_one_stream_leaves_the_others_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrivals, told = Arrivals(), list[int]()
    arrivals.add(lambda: told.append(1))
    arrivals.add(lambda: told.append(1 // 0))
    arrivals.add(lambda: lambda: told.append(3))
    arrivals.add(lambda: lambda: told.append(1 // 0))
    arrivals.add(lambda: lambda: told.append(4))
    arrivals.add(lambda: told.append(2))
    assert told == []
    await asyncio.sleep(0)
    assert told == [1, 2, 3, 4] and "could not be handled" in caplog.text


async def test_other_tasks_run_between_slices_of_many_streams() -> None:
    arrivals, told = Arrivals(), 0

    def tell() -> None:
        nonlocal told
        told += 1
        time.sleep(SLICE_SECONDS / 2)

    for _ in range(10):
        arrivals.add(tell)
    seen = []
    while told < 10:
        await asyncio.sleep(0)
        seen.append(told)
    assert len(seen) >= 3 and seen == sorted(seen)
