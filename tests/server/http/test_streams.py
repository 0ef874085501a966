"""Resumable streams: a reader gets each event after its last one exactly once, wherever connections
were cut, and only of its own streams.

The first tests use the buffer alone, the others the routes of the real application over a fake
engine that computes a hash.
"""

import asyncio
import contextlib
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerSection
from server.errors import MalformedBody, NotFound, StreamExpired
from server.http.stream_buffer import Retention, StreamBuffer, StreamStore
from tests.support.fake_engine import FakeEngine, Served, serve

KEYS = ["key of the first", "key of the second"]
LONG = {"max_new_tokens": 12}


def store_of(**bounds: Any) -> StreamStore:
    ids = iter(range(10**6))
    return StreamStore(Retention(**bounds), lambda: f"stream{next(ids)}")


def ignore(reason: str) -> None: ...


def test_only_so_many_streams_are_remembered_as_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.http.stream_buffer.MAX_EXPIRED", 1)
    store = store_of(seconds=1.0)
    for _ in range(2):
        store.end(store.open("me", ignore, 0.0), 0.0)
    store.sweep(10.0)
    with pytest.raises(NotFound):
        store.find("stream0", "me")
    with pytest.raises(StreamExpired):
        store.find("stream1", "me")


def test_a_reader_gets_every_event_once_however_often_it_is_cut_off() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        store = store_of()
        buffer = store.open("me", ignore, 0.0)
        reader, seen, got = None, 0, []
        while seen < 40:
            act = rng.random()
            if act < 0.4 and buffer.num_events < 40:
                store.append(buffer, f"event {buffer.num_events + 1}".encode())
                if buffer.num_events == 40:
                    store.end(buffer, 0.0)
            elif act < 0.6:
                reader = store.attach(buffer, seen, lambda: None)
            elif act < 0.7 and reader is not None:
                store.detach(reader, 0.0)
                reader = None
            elif reader is not None:
                gap, events = reader.take(rng.randint(1, 50))
                assert not gap
                arrived = events[: rng.randint(0, len(events))]
                got += arrived
                seen = got[-1][0] if got else 0
                if len(arrived) < len(events):  # Cut off in the middle, and back.
                    reader = store.attach(buffer, seen, lambda: None)
        assert got == [(n, f"event {n}".encode()) for n in range(1, 41)], seed
        assert store.num_bytes == buffer.num_bytes


def test_the_newer_of_two_readers_wins_and_the_older_is_woken() -> None:
    store, woken = store_of(), []
    buffer = store.open("me", ignore, 0.0)
    old = store.attach(buffer, 0, lambda: woken.append("old"))
    new = store.attach(buffer, 0, lambda: woken.append("new"))
    store.append(buffer, b"x")
    assert old.superseded and not new.superseded and woken == ["old", "new"]
    store.detach(old, 5.0)
    assert buffer.reader is new


def test_what_is_not_kept_is_a_gap_and_what_is_not_there_an_error() -> None:
    store = store_of(stream_bytes=400)
    buffer = store.open("me", ignore, 0.0)
    for number in range(10):
        store.append(buffer, bytes(36))
        assert buffer.num_bytes <= 400 and number < 10
    assert buffer.after(3, 100)[0] and [number for number, _ in buffer.after(3, 100)[1]] == [
        7,
        8,
        9,
        10,
    ]
    assert buffer.after(6, 100) == (False, buffer.after(3, 100)[1]) and buffer.after(10, 100) == (
        False,
        [],
    )
    with pytest.raises(MalformedBody):
        store.attach(buffer, 11, lambda: None)


def test_memory_is_taken_from_those_that_ended_first() -> None:
    store = store_of(total_bytes=1000)
    streams = [store.open("me", ignore, 0.0) for _ in range(4)]
    for stream in streams:
        for _ in range(3):
            store.append(stream, bytes(36))
    assert store.num_bytes == 1000 and [len(stream.after(0, 100)[1]) for stream in streams] == [
        3,
        3,
        3,
        1,
    ]
    store.end(streams[1], 1.0)
    store.append(streams[0], bytes(36))
    assert store.num_bytes == 800 and len(streams[0].after(0, 100)[1]) == 4
    with pytest.raises(StreamExpired):
        store.find(streams[1].id, "me")
    with pytest.raises(NotFound):
        store.find(streams[1].id, "you")


def test_ended_streams_expire_and_unread_ones_are_stopped() -> None:
    reasons: dict[str, list[str]] = {"first": [], "second": [], "third": []}
    store = store_of(seconds=60.0, detach_seconds=30.0, max_detached=2)
    first, second, third = (store.open("me", reasons[name].append, 0.0) for name in reasons)
    readers = [store.attach(stream, 0, lambda: None) for stream in (first, second, third)]
    for now, reader in enumerate(readers):
        store.detach(reader, float(now))
    assert len(reasons["first"]) == 1 and store.num_detached == 3, (
        "one too many: the longest without a reader goes"
    )
    store.end(first, 5.0)
    store.sweep(30.9)
    store.sweep(31.5)
    assert [len(said) for said in reasons.values()] == [1, 1, 0]
    store.sweep(64.0)
    assert store.find(first.id, "me") is first
    store.sweep(65.0)
    with pytest.raises(StreamExpired):
        store.find(first.id, "me")
    assert store.num_bytes == 0


def test_the_client_with_most_streams_without_a_reader_loses_one() -> None:
    cancelled: list[str] = []
    store = store_of(max_detached=64)

    def leave(client: str, now: float) -> None:
        def stop(reason: str) -> None:
            cancelled.append(client)
            store.end(buffer, now)

        buffer = store.open("", stop, now, client=client)
        store.detach(store.attach(buffer, 0), now)

    for client in ("victim", "other", "other"):
        leave(client, 0.0)
    for number in range(70):
        leave("hog", 1.0 + number)
    assert cancelled == ["hog"] * 9
    for number in range(40):
        leave("other", 100.0 + number)
    assert set(cancelled) == {"hog", "other"} and store.num_detached == 64
    assert Counter(buffer.client for buffer in store._detached()) == {
        "victim": 1,
        "hog": 31,
        "other": 32,
    }


@pytest.mark.parametrize("ended", [True, False])
def test_memory_is_taken_from_the_client_that_has_most(ended: bool) -> None:
    """Whether its streams have ended or run, and whoever's event comes next."""
    store = store_of(total_bytes=2000)
    done, runs = (store.open("me", ignore, 0.0, client="me") for _ in range(2))
    for _ in range(3):
        store.append(done, bytes(36))
    store.end(done, 0.0)
    hog = [store.open("hog", ignore, 1.0) for _ in range(6)]
    for stream in hog:
        for _ in range(4):
            store.append(stream, bytes(36))
        if ended:
            store.end(stream, 1.0)
    for _ in range(5):
        store.append(runs, bytes(36))
    assert (
        store.find(done.id, "me") is done
        and len(done.after(0, 100)[1]) == 3
        and len(runs.after(0, 100)[1]) == 5
    )
    assert store.num_bytes == sum(store._bytes.values()) <= 2000
    for stream in (done, runs, *hog):
        if stream.id in store._streams and not stream.ended:
            store.end(stream, 2.0)
    store.sweep(1000.0)
    assert not store._bytes and not store.num_bytes


@pytest.fixture
async def served(tokenizer_folder: Path) -> Served:
    digests = ",".join(hashlib.sha256(key.encode()).hexdigest() for key in KEYS)
    served = serve(
        tokenizer_folder, FakeEngine(), ServerSection.model_validate({"api_keys": digests})
    )
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    return served


@pytest.mark.parametrize("with_keys", [True, False])
async def test_streams_share_their_bounds_by_key_or_address(
    with_keys: bool, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []

    def open_noted(self: StreamStore, *arguments: Any, **named: Any) -> StreamBuffer:
        buffer = StreamStore.open(self, *arguments, **named)
        opened.append((buffer.owner, buffer.client))
        return buffer

    digest = hashlib.sha256(KEYS[0].encode()).hexdigest()
    section = ServerSection.model_validate({"api_keys": digest} if with_keys else {})
    monkeypatch.setattr(
        "tests.support.fake_engine.StreamStore", type("Noted", (StreamStore,), {"open": open_noted})
    )
    served = serve(tokenizer_folder, FakeEngine(), section)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    await Client(served).request(
        "POST",
        "/generate_stream",
        {"inputs": "a", "parameters": {"max_new_tokens": 2}, "resumable": True},
    )
    assert opened == [(digest, digest) if with_keys else ("", "127.0.0.1")]


class Client:
    """One of the two, over the application without a socket: a response is whole, or was cut off
    after so many events.
    """

    def __init__(self, served: Served, key: str = KEYS[0]) -> None:
        self.served = served
        self.headers = {"authorization": f"Bearer {key}"}

    async def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers=self.headers | headers)

    async def cut(self, method: str, path: str, body: Any, count: int, **headers: str) -> "Cut":
        """Reads so many events, then disconnects."""
        cut = Cut()
        with contextlib.suppress(asyncio.CancelledError):
            await cut.run(self.served, method, path, body, count, self.headers | headers)
        return cut


class Cut:
    """An exchange that ends in a disconnect after some events."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, str]] = []

    async def run(
        self, served: Served, method: str, path: str, body: Any, count: int, headers: dict[str, str]
    ) -> None:
        left = asyncio.Event()
        sent = [
            {
                "type": "http.request",
                "body": json.dumps(body).encode() if body else b"",
                "more_body": False,
            }
        ]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif len(self.events) < count:
                self.events += events_of(message.get("body", b"").decode())
            if len(self.events) >= count:
                left.set()

        raw = [
            (name.encode(), value.encode())
            for name, value in {"content-type": "application/json", **headers}.items()
        ]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": raw,
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
        }
        await served.app(
            {
                **scope,
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "scheme": "http",
                "server": ("x", 1),
            },
            receive,
            send,
        )


def events_of(text: str) -> list[dict[str, str]]:
    """The events of a stream, parsed into fields as WHATWG HTML 9.2 defines."""
    events, event = [], {}
    for line in text.split("\n"):
        name, _, value = line.partition(": ")
        if line and name:
            event[name] = value
        elif not line and event:
            events.append(event)
            event = {}
    return events


async def whole(client: Client, path: str, body: Any) -> list[str]:
    response = await client.request("POST", path, body)
    assert response.status_code == 200, response.text
    return [event["data"] for event in events_of(response.text)]


def request_of(dialect: str) -> tuple[str, dict[str, Any]]:
    if dialect == "tgi":
        return "/generate", {
            "inputs": "def f(",
            "parameters": {"max_new_tokens": 12, "details": True},
            "stream": True,
        }
    return "/v1/completions", {
        "prompt": "def f(",
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
    }


def without_names(data: list[str]) -> list[Any]:
    """An answer without its ids and dates, which differ between two answers to the same request."""
    values = [json.loads(text) if text != "[DONE]" else text for text in data]
    return [
        {k: v for k, v in value.items() if k not in ("id", "created")}
        if isinstance(value, dict)
        else value
        for value in values
    ]


@pytest.mark.parametrize("dialect", ["tgi", "openai"])
async def test_cut_anywhere_and_resumed_it_is_the_uncut_stream(
    served: Served, dialect: str
) -> None:
    client = Client(served)
    path, body = request_of(dialect)
    expected = without_names(await whole(client, path, body))
    for count in range(1, len(expected) + 1):
        first = await client.cut("POST", path, body | {"resumable": True}, count)
        stream = first.headers["x-stream-id"]
        seen = first.events[:count]
        assert first.status == 200 and seen[0]["retry"] == "1000"
        rest = await client.request(
            "GET", f"/v1/streams/{stream}", **{"last-event-id": seen[-1]["id"]}
        )
        events = [*seen, *events_of(rest.text)]
        assert without_names([event["data"] for event in events]) == expected
        assert [event["id"] for event in events] == [
            f"{stream}.{n}" for n in range(1, len(expected) + 1)
        ]
        assert rest.status_code == (200 if count < len(expected) else 204)
    assert served.supervisor.open == {}


async def test_the_header_asks_as_the_field_does_and_only_streams_are_resumable(
    served: Served,
) -> None:
    client = Client(served)
    path, body = request_of("tgi")
    cut = await client.cut("POST", path, body, 1, **{"x-stream-resumable": "1"})
    assert "x-stream-id" in cut.headers
    for path, body in (request_of("tgi"), request_of("openai")):
        response = await client.request("POST", path, {**body, "stream": False, "resumable": True})
        assert response.status_code in (400, 422) and "resumable" in response.text
    assert "x-stream-id" not in (await client.request("POST", *request_of("tgi"))).headers


async def test_a_stream_can_be_read_again_from_any_place(served: Served) -> None:
    client = Client(served)
    cut = await client.cut("POST", *with_resumable("tgi"), 3)
    path = f"/v1/streams/{cut.headers['x-stream-id']}"
    everything = events_of((await client.request("GET", path)).text)
    assert len(everything) == 12
    after = events_of((await client.request("GET", f"{path}?after=7")).text)
    assert after == everything[7:]


def with_resumable(dialect: str) -> tuple[str, dict[str, Any]]:
    path, body = request_of(dialect)
    return path, body | {"resumable": True}


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        ("{id}.999", 400, "future_event"),
        ("{id}", 400, "invalid_event_id"),
        ("{id}.x", 400, "invalid_event_id"),
        ("{id}.-1", 400, "invalid_event_id"),
        ("{id}.1.1", 400, "invalid_event_id"),
        ("other.1", 400, "invalid_event_id"),
        ("", 400, "invalid_event_id"),
        ("9" * 5000, 400, "invalid_event_id"),
    ],
)
async def test_an_event_id_that_cannot_be(
    served: Served, last: str, status: int, code: str
) -> None:
    client = Client(served)
    cut = await client.cut("POST", *with_resumable("openai"), 3)
    id = cut.headers["x-stream-id"]
    response = await client.request(
        "GET", f"/v1/streams/{id}", **{"last-event-id": last.replace("{id}", id)}
    )
    assert response.status_code == status and response.json()["error"]["code"] == code


async def test_nobody_elses_and_none_are_the_same(served: Served) -> None:
    mine, other = Client(served), Client(served, KEYS[1])
    cut = await mine.cut("POST", *with_resumable("tgi"), 3)
    path = f"/v1/streams/{cut.headers['x-stream-id']}"
    for method in ("GET", "DELETE"):
        foreign = await other.request(method, path)
        unknown = await other.request(method, f"/v1/streams/{'x' * 32}")
        assert (
            foreign.status_code == unknown.status_code == 404 and foreign.json() == unknown.json()
        )
        assert (await Client(served, "no key").request(method, path)).status_code == 401
    assert (await mine.request("GET", path)).status_code == 200


async def test_leaving_is_not_cancelling_and_cancelling_is(tokenizer_folder: Path) -> None:
    loop = asyncio.get_running_loop()
    served = serve(
        tokenizer_folder, FakeEngine(defer=lambda act: loop.call_later(0.005, act)), ServerSection()
    )
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    client = Client(served)
    path, body = with_resumable("openai")
    left = await client.cut("POST", path, body | {"max_tokens": 50}, 1)
    assert not any(
        id in served.engine.cancels for id in (submit.id for submit in served.engine.submits)
    )
    cancelled = await client.cut("POST", path, body | {"max_tokens": 50}, 1)
    assert (
        await client.request("DELETE", f"/v1/streams/{cancelled.headers['x-stream-id']}")
    ).status_code == 204
    rest = events_of(
        (await client.request("GET", f"/v1/streams/{left.headers['x-stream-id']}")).text
    )
    assert rest[-1]["data"] == "[DONE]" and not any("error" in event["data"] for event in rest)
    end = events_of(
        (await client.request("GET", f"/v1/streams/{cancelled.headers['x-stream-id']}")).text
    )
    assert (
        end[-1]["data"] == "[DONE]" and json.loads(end[-2]["data"])["error"]["code"] == "cancelled"
    )
    assert served.supervisor.open == {}


async def test_a_stream_whose_events_cannot_be_kept_ends_and_frees_what_it_holds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = StreamStore.append
    left = 2

    def fails_once(self: StreamStore, *args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError
        append(self, *args)

    monkeypatch.setattr(StreamStore, "append", fails_once)
    response = await Client(served).request("POST", *with_resumable("openai"))
    events = events_of(response.text)
    assert (
        events[-1]["data"] == "[DONE]"
        and "internal error" in events[-2]["data"]
        and len(events) < 12
    )
    assert served.supervisor.open == {} and served.client.admission.num_open == 0


async def test_a_stream_that_has_ended_cannot_be_cancelled(served: Served) -> None:
    client = Client(served)
    whole = await client.request("POST", *with_resumable("openai"))
    path = f"/v1/streams/{whole.headers['x-stream-id']}"
    assert (await client.request("DELETE", path)).status_code == 204
    assert (await client.request("GET", path)).text == whole.text


async def test_keys_share_nothing_that_is_computed(served: Served) -> None:
    path, body = request_of("openai")
    for key in (KEYS[0], KEYS[0], KEYS[1]):
        assert (await Client(served, key).request("POST", path, body)).status_code == 200
    salts = [submit.salt for submit in served.engine.submits]
    assert salts[0] == salts[1] != salts[2]
