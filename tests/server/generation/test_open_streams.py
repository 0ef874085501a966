"""OpenStreams gives arrived pieces at once and in order, then ends the request, without leaving
reference cycles.
"""

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import protocol
from server.config import ServerSection
from server.errors import GenerationFailed, QueueTimeout
from server.generation.engine_client import EngineClient
from server.generation.generation import Generation
from server.generation.request import Request
from server.generation.stream import OpenStreams
from server.http import sse
from server.http.exchange import exchange_of
from server.metrics import Metrics
from server.supervision.journal import SequenceEvent
from server.supervision.supervisor import State
from server.text.codec import TextCodec
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, serve
from tests.support.inline_workers import inline_texts


class Hand:
    """A supervisor whose engine is the test."""

    def __init__(self) -> None:
        self.state, self.ready, self.recovery_overdue = State.READY, READY, False
        self.open: dict[int, Callable[[SequenceEvent], None]] = {}
        self.cancelled: list[int] = []
        self._last = 0

    def submit(
        self,
        submit: protocol.Submit,
        deliver: Callable[[SequenceEvent], None],
        known: list[protocol.Token],
    ) -> int:
        self._last += 1
        self.open[self._last] = deliver
        return self._last

    def cancel(self, id: int) -> None:
        self.open.pop(id, None)
        self.cancelled.append(id)

    def say(self, id: int, index: int, finish: str | None = None) -> None:
        self.open[id](protocol.Token(id, index, 40 + index % 50, -0.5, finish))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder: Path = tmp_path_factory.mktemp("codec")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


async def start(codec: TextCodec, count: int = 1, **fields: Any) -> tuple[Hand, OpenStreams]:
    hand = Hand()
    client = EngineClient(hand, Metrics(), ServerSection(max_waiting=0), 64)  # type: ignore[arg-type]
    requests = [Request([1, 2], protocol.Sampling(), 50, **fields) for _ in range(count)]
    return hand, Generation(client, inline_texts(codec), ServerSection()).start(
        requests, client.reserve("tests")
    )


async def test_what_has_come_is_there_at_once_and_in_order(codec: TextCodec) -> None:
    hand, streams = await start(codec, count=2)
    assert streams.take() is None
    for index in range(3):
        hand.say(1, index)
        hand.say(2, index, "length" if index == 2 else None)
    taken = [piece for piece in iter(streams.take, None) if piece is not None]
    assert [(piece.choice, piece.token) for piece in taken] == [
        (choice, 40 + index) for index in range(3) for choice in (0, 1)
    ]
    assert taken[-1].finish == "length" and hand.cancelled == [2]
    hand.say(1, 3, "length")
    assert [piece.token async for piece in streams] == [43]


async def test_a_failure_comes_behind_the_tokens_before_it_and_again_whenever_it_is_asked_for(
    codec: TextCodec,
) -> None:
    hand, streams = await start(codec, count=2)
    hand.say(1, 0)
    hand.open[2](protocol.Failed(2, "gone", code="engine_gone"))
    hand.say(1, 1)
    assert (await anext(streams)).token == 40
    with pytest.raises(GenerationFailed, match="gone"):
        streams.take()
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="gone"):
            await anext(streams)
    streams.close()
    assert sorted(hand.cancelled) == [1, 2]


async def test_tokens_that_have_come_stand_before_the_end_of_the_time(codec: TextCodec) -> None:
    hand, streams = await start(codec, timeout_s=0.01)
    streams.choices[0].started = 1.0
    hand.say(1, 0)
    await asyncio.sleep(0.03)
    hand.say(1, 1)
    assert [(piece.token, piece.finish) async for piece in streams] == [
        (40, None),
        (41, None),
        (None, "timeout"),
    ]
    hand, streams = await start(codec, timeout_s=0.01)
    with pytest.raises(QueueTimeout):
        await anext(streams)


async def test_a_choice_that_its_reader_ends_gives_nothing_more(codec: TextCodec) -> None:
    hand, streams = await start(codec)
    for index in range(3):
        hand.say(1, index)
    assert (await anext(streams)).token == 40
    streams.finish(0)
    assert (
        streams.take() is None
        and [piece async for piece in streams] == []
        and hand.cancelled == [1]
    )


async def test_no_request_that_failed_holds_itself(codec: TextCodec) -> None:
    gc.collect()
    gc.disable()
    try:
        for fail in (True, False):
            hand, streams = await start(codec)
            hand.open[1](
                protocol.Failed(1, "gone") if fail else protocol.Token(1, 0, 40, -0.5, "length")
            )
            with pytest.raises(GenerationFailed if fail else StopAsyncIteration):
                while True:
                    await anext(streams)
            gone = weakref.ref(streams)
            del hand, streams
            await asyncio.sleep(0)
            assert gone() is None
    finally:
        gc.enable()


async def test_a_backlog_is_written_in_bounded_parts_and_others_get_their_turn() -> None:
    event, sent, turns = b"data: " + b"x" * 100 + b"\n\n", [], 0
    left = [[event] * sse.MAX_EVENTS_PER_WRITE for _ in range(20)]

    class Backlog:
        ended = property(lambda _: not left)

        def take(self) -> list[bytes]:
            return left.pop() if left else []

        def listen(self, wake: Any) -> None:
            """All has come."""

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def never() -> Any:
        await asyncio.Event().wait()

    task = asyncio.create_task(other())
    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.4"},
        "method": "POST",
        "path": "/",
        "headers": [],
    }
    await sse.EventResponse(Backlog(), lambda: None, {}, 15.0)(scope, never, send)
    task.cancel()
    assert (
        sum(sent) == 20 * sse.MAX_EVENTS_PER_WRITE * len(event)
        and max(sent) <= sse.MAX_EVENTS_PER_WRITE * len(event)
        and turns >= 20
    )


@pytest.mark.parametrize("path", ["/live", "/generate"])
async def test_no_request_holds_its_own_way_to_the_socket(tmp_path: Path, path: str) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    served = serve(tmp_path)
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "headers": [],
        "query_string": b"",
        "asgi": {},
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    await served.app(scope, receive, send)
    assert sent and exchange_of(scope).chunks is None
