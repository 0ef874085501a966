"""The monitor over a fake engine: what viewers know is what the engine has, through crashes; it
asks only while there are viewers.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import Overloaded
from server.generation import monitor
from server.generation.engine_client import EngineClient
from server.generation.monitor import Viewer
from tests.support.cache_client import CacheClient
from tests.support.fake_engine import READY, FakeEngine, Served, serve
from tests.support.wire import EventParser

BODY = {"prompt": "abc", "max_tokens": 40, "temperature": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks as often as the event loop runs."""
    monkeypatch.setattr(monitor, "LOOK_SECONDS", 0)


def slowly(callback: Callable[[], None], turns: int = 10) -> None:
    """Calls it after some turns of the event loop, so that much can be compared between two
    steps.
    """
    loop = asyncio.get_running_loop()
    loop.call_soon(callback if turns == 0 else lambda: slowly(callback, turns - 1))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def ready(engine: FakeEngine, folder: Path) -> Served:
    served = serve(folder, engine)
    await until(lambda: served.client.admission.accepting)
    return served


class Watching:
    """Takes from a viewer what its connection would write."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.cache, self.stats = CacheClient(), list[dict[str, Any]]()
        self.reads = True
        self.num_compared = 0
        self._parser = EventParser()
        viewer.listen(self.wake)
        self.wake()

    def wake(self) -> None:
        if self.reads:
            for event in self._parser.feed(b"".join(self.viewer.take())):
                data = json.loads(event.data or "")
                self.cache.take(data) if event.kind == "cache" else self.stats.append(data)

    async def compare(self, client: EngineClient) -> None:
        """Compares its state with a dump, if it has been shown the same view."""
        dump = json.loads(await client.monitor.dump())
        await until(lambda: (self.cache.engine, self.cache.view) >= (dump["engine"], dump["view"]))
        if (self.cache.engine, self.cache.view) == (dump["engine"], dump["view"]):
            assert self.cache.problems(dump) == []
            self.num_compared += 1


async def ask(served: Served, number: int) -> None:
    """A request whose id says which one it is."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        headers = {"x-request-id": f"request-{number}"}
        response = await http.post(
            "/v1/completions", json=BODY | {"prompt": "abc" * (1 + number % 5)}, headers=headers
        )
        assert response.status_code == 200


async def test_viewers_know_what_the_engine_has_through_crashes(tokenizer_folder: Path) -> None:
    """One that does not always read as well."""
    engine = FakeEngine(crash_after=[150, 200, 300], defer=slowly)
    served = await ready(engine, tokenizer_folder)
    steady, slow = (Watching(served.client.monitor.join()) for _ in range(2))
    requests = [asyncio.create_task(ask(served, number)) for number in range(30)]
    rng = random.Random(1)
    while not all(request.done() for request in requests):
        slow.reads = rng.random() < 0.5
        await steady.compare(served.client)
        if slow.reads:
            await slow.compare(served.client)
    await asyncio.gather(*requests)
    slow.reads = True
    for watching in (steady, slow):
        await watching.compare(served.client)
        assert (
            watching.cache.engine == 3
            and not watching.cache.sequences
            and watching.num_compared > 3
        )
    assert slow.cache.num_events < steady.cache.num_events
    assert len(engine.runs) == 4


async def test_one_that_joins_gets_the_last_state_at_once(tokenizer_folder: Path) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    first = Watching(served.client.monitor.join())
    await until(lambda: first.cache.num_events)
    joined = Watching(served.client.monitor.join())
    assert (joined.cache.view, joined.cache.num_events, len(joined.stats)) == (
        first.cache.view,
        1,
        1,
    )


async def test_one_that_joins_after_all_have_left_is_shown_nothing_old_and_what_has_not_changed(
    tokenizer_folder: Path,
) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    monitor = served.client.monitor
    first = Watching(monitor.join())
    await until(lambda: first.cache.num_events)
    monitor.viewers.remove(first.viewer)
    assert monitor._latest
    second = Watching(monitor.join())
    assert not second.cache.num_events
    await until(lambda: second.cache.num_events)


async def test_those_who_wait_for_a_dump_get_the_same_one(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    served = await ready(engine, tokenizer_folder)
    dumps = [asyncio.create_task(served.client.monitor.dump()) for _ in range(3)]
    assert len({await dump for dump in dumps}) == 1
    assert [look.dump for look in engine.looks].count(True) == 1


async def test_sequences_have_the_ids_of_their_requests(tokenizer_folder: Path) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    watching = Watching(served.client.monitor.join())
    request = asyncio.create_task(ask(served, 7))
    await until(lambda: watching.cache.sequences)
    (sequence,) = watching.cache.sequences.values()
    assert (sequence["request"], sequence["state"], sequence["num_prompt"]) == (
        "request-7",
        "running",
        len("abc" * 3),
    )
    await request


async def test_the_engine_is_asked_only_while_there_are_viewers(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    served = await ready(engine, tokenizer_folder)
    await ask(served, 0)
    assert engine.looks == []
    watching = Watching(served.client.monitor.join())
    await until(lambda: len(engine.looks) > 5)
    served.client.monitor.viewers.remove(watching.viewer)
    await until(
        lambda: served.client.monitor._watching is None or served.client.monitor._watching.done()
    )
    asked = len(engine.looks)
    await ask(served, 1)
    assert len(engine.looks) == asked


async def test_the_engine_is_asked_again_when_it_has_answered(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    served = await ready(engine, tokenizer_folder)
    held: list[Callable[[], None]] = []
    engine.defer = held.append
    Watching(served.client.monitor.join())
    await until(lambda: engine.looks)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(engine.looks) == 1
    held.pop()()
    await until(lambda: len(engine.looks) == 2)


async def test_a_pause_lies_between_two_looks(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pauses = FakeEngine(), list[tuple[float, int]]()
    served = await ready(engine, tokenizer_folder)
    sleep = asyncio.sleep

    async def passes(seconds: float) -> None:
        pauses.append((seconds, len(engine.looks)))
        await sleep(0)

    monkeypatch.setattr(monitor, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(asyncio, "sleep", passes)
    Watching(served.client.monitor.join())
    while len(pauses) < 20:
        await sleep(0)
    assert {seconds for seconds, _ in pauses} == {0.1} and max(asked for _, asked in pauses) > 10
    assert all(after - before <= 1 for (_, before), (_, after) in itertools.pairwise(pauses))


async def test_counts_are_made_once_a_second_and_one_that_joins_gets_the_last(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first = Watching(served.client.monitor.join())
    await until(lambda: first.stats)
    now[0] += 0.9
    joined = [Watching(served.client.monitor.join()) for _ in range(5)]
    await until(lambda: all(viewer.stats for viewer in joined))
    assert len(first.stats) == 1 and all(viewer.stats == first.stats for viewer in joined)
    served.client.monitor.viewers.clear()
    await until(
        lambda: served.client.monitor._watching is None or served.client.monitor._watching.done()
    )
    late = Watching(served.client.monitor.join())
    await until(lambda: late.stats)
    assert late.stats != first.stats and len(late.stats) == 1


async def test_counts_come_at_once_and_then_once_a_second(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watching = Watching(served.client.monitor.join())
    await until(lambda: watching.stats)
    await ask(served, 0)
    assert len(watching.stats) == 1
    now[0] += monitor.STATS_SECONDS
    await until(lambda: len(watching.stats) == 2)
    first, second = (stats["totals"] for stats in watching.stats)
    assert (first["prompt_tokens"], first["generation_tokens"], first["requests"]) == (0, 0, {})
    assert (second["prompt_tokens"], second["generation_tokens"], second["requests"]) == (
        3,
        40,
        {"length": 1},
    )
    assert watching.stats[1]["multi_head_ratio"] == 4 and watching.stats[1]["status"] == "ready"
    assert watching.stats[1]["page_bytes"] == READY.page_bytes > 0
    assert sum(watching.stats[1]["time_to_first_token"]["counts"]) == 1
    assert sum(watching.stats[1]["inter_token_latency"]["counts"]) == 39


async def test_viewers_see_how_the_engine_is_loaded(tokenizer_folder: Path) -> None:
    served = serve(tokenizer_folder, FakeEngine(defer=lambda call: None))
    watching = Watching(served.client.monitor.join())
    await until(lambda: watching.stats)
    assert (
        watching.stats[0]["status"] == "starting"
        and "num_pages" not in watching.stats[0]
        and not watching.cache.cells
    )


async def test_a_viewer_that_does_not_read_holds_the_last_event_of_each_kind(
    tokenizer_folder: Path,
) -> None:
    served = await ready(FakeEngine(defer=slowly), tokenizer_folder)
    steady, stuck = Watching(served.client.monitor.join()), Watching(served.client.monitor.join())
    await until(lambda: stuck.cache.num_events)
    stuck.reads = False
    await asyncio.gather(*(ask(served, number) for number in range(5)))
    await until(lambda: steady.cache.num_events > 5 and not steady.cache.sequences)
    assert [*stuck.viewer.events] == ["cache"] and stuck.cache.num_events == 1
    stuck.reads = True
    stuck.wake()
    assert stuck.cache.view == steady.cache.view and stuck.cache.num_events == 2


async def test_viewers_are_limited_in_number(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "MAX_VIEWERS", 2)
    served = await ready(FakeEngine(), tokenizer_folder)
    first = served.client.monitor.join()
    served.client.monitor.join()
    with pytest.raises(Overloaded, match="2 viewers"):
        served.client.monitor.join()
    served.client.monitor.viewers.remove(first)
    served.client.monitor.join()


async def test_ended_viewers_have_nothing_more_to_take(tokenizer_folder: Path) -> None:
    served = await ready(FakeEngine(), tokenizer_folder)
    watching = Watching(served.client.monitor.join())
    woken: list[None] = []
    watching.viewer.listen(lambda: woken.append(None))
    served.client.monitor.end()
    await until(lambda: woken)
    assert watching.viewer.ended
