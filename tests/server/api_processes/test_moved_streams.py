"""A resumable stream has the same events in whichever API process it is read, also when the one that made it is gone."""

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api_processes.open_requests import StreamRecord
from server.http.streams import SUPERSEDED
from tests.server.api_processes.test_requests import counted, until
from tests.support.fake_engine import FakeEngine
from tests.support.fake_fleet import FakeFleet, FakeProcess

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 20, "temperature": 1.0}),
    # Its events depend on the order of the tokens of all its sequences.
    ("/v1/completions", {"prompt": "abc", "max_tokens": 20, "n": 3, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 20, "details": True, "do_sample": True, "top_n_tokens": 2}}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 30, "temperature": 0, "stop": ["a", "b", "c"]}),
]


class SlowEngine(FakeEngine):
    """Sends so many messages after Ready, and the others when `go` is called."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.left, self.waiting = num_calls, list[Any]()
        send = self.defer

        def defer(call: Any) -> None:
            if self.left > 0:
                self.left -= 1
                send(call)
            else:
                self.waiting.append(call)

        self.defer = defer

    def go(self, num_calls: int = 10**9) -> None:
        self.left, waiting, self.waiting = num_calls, self.waiting, []
        for call in waiting:
            self.defer(call)


async def begin(process: FakeProcess, path: str, body: dict[str, Any]) -> str:
    """Starts a resumable stream, whose client leaves at once; its id."""
    id, left = "", asyncio.Event()
    whole = [httpx.Request("POST", "http://test", json=body | {"stream": True, "resumable": True}).content]

    async def receive() -> Any:
        if whole:
            return {"type": "http.request", "body": whole.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal id
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
            id = dict(message["headers"])[b"x-stream-id"].decode()
            left.set()

    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "asgi": {"spec_version": "2.3"}}
    await process.app(scope, receive, send)
    assert id
    return id


async def read(process: FakeProcess, id: str, after: int = 0) -> str:
    response = await process.http.get(f"/v1/streams/{id}?after={after}")
    assert response.status_code == 200, response.text
    return response.text


def events(text: str) -> list[str]:
    """The events, without comments."""
    return [event for event in text.split("\n\n") if event and not event.startswith(":")]


@pytest.mark.parametrize("calls", [2, 6])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("dies", [False, True])
async def test_events_are_the_same_in_another_process(
    tokenizer_folder: Path, path: str, body: dict[str, Any], dies: bool, calls: int
) -> None:
    engine = SlowEngine(calls)
    fleet = await FakeFleet(tokenizer_folder, engine).ready()
    one, other = fleet.processes
    id = await begin(one, path, body)
    await until(lambda: engine.left == 0)
    for _ in range(20):
        await asyncio.sleep(0)
    before = [event for event in one.publisher.store.find(id, "").kept]
    reading = asyncio.create_task(read(one, id))
    await until(lambda: one.publisher.store.find(id, "").reader)
    if dies:
        one.die()
    moved = asyncio.create_task(read(other, id))
    await until(lambda: id in other.publisher.writers)
    await until(lambda: other.publisher.store.find(id, "").num_events == len(before) and other.publisher.store.find(id, "").reader)
    assert other.publisher.store.find(id, "").kept == before
    assert fleet.records.num_bytes > 0
    (seed, *_) = [sampling.seed for sampling in fleet.records.live(id)[1].samplings]
    engine.go()
    text = await moved
    assert text.encode().startswith(b"".join(before)) and events(text)[-1]
    assert path != "/generate" or f'"seed":{seed}' in events(text)[-1], "the seed that was drawn first"
    if not dies:
        assert (await reading).encode() == b"".join(before) + SUPERSEDED
    numbers = [int(number) for number in re.findall(rf"id: {re.escape(id)}\.(\d+)", text)]
    assert numbers == list(range(1, len(numbers) + 1)) and "error" not in text
    reading.cancel()
    await until(lambda: counted(fleet) == (0, 0, 0, 0))
    assert await read(other, id, after=2) == "".join(f"{event}\n\n" for event in events(text)[2:])
    assert dies or (one.publisher.writers == {} and one.client._open == {})


async def test_an_ended_stream_is_read_in_every_process(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    one, other = fleet.processes
    id = await begin(one, *REQUESTS[0])
    text = await read(one, id)
    one.publisher.store.sweep(1e9)
    one.die()
    assert await read(other, id) == text
    assert (await other.http.get(f"/v1/streams/{id}?after={len(events(text))}")).status_code == 204
    assert (await other.http.get(f"/v1/streams/{id}?after={len(events(text)) + 1}")).status_code == 400
    other.publisher.store.sweep(1e9)
    fleet.records.sweep(1e9)
    assert (await other.http.get(f"/v1/streams/{id}")).status_code == 410


async def test_a_stream_of_another_caller_is_no_stream_in_any_process(tokenizer_folder: Path) -> None:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")}
    engine = SlowEngine(3)
    fleet = await FakeFleet(tokenizer_folder, engine, api_keys=tuple(keys.values())).ready()
    one, other = fleet.processes
    one.http.headers["authorization"] = "Bearer one"
    task = asyncio.create_task(one.http.post("/v1/completions", json=REQUESTS[0][1] | {"stream": True, "resumable": True}))
    await until(lambda: one.publisher.writers)
    (id,) = one.publisher.writers
    for key, status in (("two", 404), ("none", 401)):
        assert (await other.http.get(f"/v1/streams/{id}", headers={"authorization": f"Bearer {key}"})).status_code == status
    engine.go()
    assert (await task).status_code == 200
    for key, status in (("two", 404), ("one", 200)):
        assert (await other.http.get(f"/v1/streams/{id}", headers={"authorization": f"Bearer {key}"})).status_code == status


async def test_a_stream_is_cancelled_through_another_process(tokenizer_folder: Path) -> None:
    engine = SlowEngine(5)
    fleet = await FakeFleet(tokenizer_folder, engine).ready()
    one, other = fleet.processes
    id = await begin(one, *REQUESTS[0])
    assert (await other.http.delete(f"/v1/streams/{id}")).status_code == 204
    await until(lambda: counted(fleet) == (0, 0, 0, 0))
    assert "the stream was cancelled" in events(await read(one, id))[-2]
    assert (await other.http.delete("/v1/streams/unknown")).status_code == 404


async def test_an_event_of_the_future_is_refused_after_a_move(tokenizer_folder: Path) -> None:
    engine = SlowEngine(6)
    fleet = await FakeFleet(tokenizer_folder, engine).ready()
    id = await begin(fleet.processes[0], *REQUESTS[0])
    response = await fleet.processes[1].http.get(f"/v1/streams/{id}?after=1000")
    assert response.status_code == 400 and response.json()["error"]["code"] == "future_event"


async def test_an_orphan_is_dropped_when_nobody_asks_for_it(tokenizer_folder: Path) -> None:
    engine = SlowEngine(5)
    fleet = await FakeFleet(tokenizer_folder, engine, detach_grace=30.0).ready()
    one, other = fleet.processes
    id = await begin(one, *REQUESTS[0])
    one.die()
    (orphan,) = fleet.records.orphans
    fleet.records.sweep(orphan[2].idle_since + 29.0)
    assert len(fleet.served.supervisor.open) == 1
    fleet.records.sweep(orphan[2].idle_since + 30.0)
    assert counted(fleet) == (0, 0, 0, 0) and engine.cancels
    assert (await other.http.get(f"/v1/streams/{id}")).status_code == 410


async def test_a_time_limit_goes_on_in_the_next_process(tokenizer_folder: Path) -> None:
    engine = SlowEngine(5)
    fleet = await FakeFleet(tokenizer_folder, engine).ready()
    one, other = fleet.processes
    id = await begin(one, "/v1/completions", REQUESTS[0][1] | {"timeout_s": 0.3})
    one.die()
    began = asyncio.get_running_loop().time()
    assert '"timeout"' in await read(other, id) and asyncio.get_running_loop().time() - began < 0.4


@pytest.mark.parametrize("outcome", ["cancelled", "timeout"])
async def test_an_end_that_was_not_told_is_an_expired_stream(tokenizer_folder: Path, outcome: str) -> None:
    fleet = await FakeFleet(tokenizer_folder, SlowEngine(5)).ready()
    one, other = fleet.processes
    id = await begin(one, *REQUESTS[0])
    request, record = fleet.records.live(id)
    assert isinstance(record, StreamRecord)
    record.outcomes.add(outcome)
    one.die()
    assert request.owner is None and counted(fleet) == (0, 0, 0, 0)
    assert (await other.http.get(f"/v1/streams/{id}")).status_code == 410
