"""A stream whose server is killed goes on in the next one: every event once, as if it had not been.

The state at the kill is a copy of the journal's folder, of which the last bytes may be missing.
"""

import asyncio
import hashlib
import random
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from server.config import ServerSection
from server.errors import ConfigurationError
from server.generation.generation import Generation
from server.http.exchange import exchange_of
from server.http.stream_journal import StreamJournal
from server.http.streams import MAX_REPEATS, StreamPublisher
from tests.server.http.test_streams import KEYS, Client, events_of, request_of, whole, without_names
from tests.support.fake_engine import FakeEngine, Served, serve

DIGESTS = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    request_of("tgi"),
    request_of("openai"),
    ("/v1/completions", request_of("openai")[1] | {"n": 2, "temperature": 1.0, "seed": 3}),
    ("/v1/completions", request_of("openai")[1] | {"temperature": 1.0}),
    ("/v1/completions", request_of("openai")[1] | {"logprobs": 2, "max_tokens": 20}),
]


async def _server(
    tokenizer_folder: Path, folder: Path | None, digests: list[str] = DIGESTS
) -> Served:
    section = ServerSection.model_validate({"api_keys": ",".join(digests)})
    journal = None if folder is None else StreamJournal(folder)
    served = serve(tokenizer_folder, FakeEngine(), section, journal=journal)
    served.publisher.restore(served.app)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    return served


class Reader:
    """A client that has read some events, and reads on."""

    def __init__(self, request: tuple[str, dict[str, Any]]) -> None:
        self.path, self.body = request[0], request[1] | {"resumable": True}
        self.events: list[dict[str, str]] = []
        self.stream = ""

    async def begin(self, served: Served, count: int) -> None:
        cut = await Client(served).cut("POST", self.path, self.body, count)
        self.stream, self.events = cut.headers["x-stream-id"], cut.events[:count]

    async def read_on(self, served: Served) -> None:
        last = {"last-event-id": self.events[-1]["id"]} if self.events else {}
        answer = await Client(served).request("GET", f"/v1/streams/{self.stream}", **last)
        assert answer.status_code in (200, 204), answer.text
        self.events += events_of(answer.text)

    @property
    def data(self) -> list[Any]:
        """The events' contents, those of each choice by themselves, and the stream's id."""
        numbers = [f"{self.stream}.{number}" for number in range(1, len(self.events) + 1)]
        assert [event["id"] for event in self.events] == numbers, "each event once, in order"
        return sorted(
            without_names([event["data"] for event in self.events]),
            key=lambda value: "choices" in value and value["choices"][0]["index"],
        )


def _copy(folder: Path, to: Path, rng: random.Random, most_lost: int) -> Path:
    shutil.copytree(folder, to)
    for path in to.glob("*.stream1"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            asked = 8 + int.from_bytes(path.read_bytes()[:4])
            file.truncate(max(asked, size - rng.randint(0, most_lost)))
    return to


@pytest.mark.parametrize("seed", range(12))
async def test_streams_outlive_servers(tokenizer_folder: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    served = await _server(tokenizer_folder, tmp_path / "0")
    readers = [Reader(request) for request in REQUESTS]
    for reader in readers:
        await reader.begin(served, rng.randint(1, 6))
    for number in range(1, 3):
        for _ in range(rng.randint(0, 40)):
            await asyncio.sleep(0)
        # What a power cut takes is generated again.
        folder = _copy(tmp_path / str(number - 1), tmp_path / str(number), rng, 300 * (seed % 2))
        served = await _server(tokenizer_folder, folder)
        again = asyncio.create_task(served.publisher.go_on(served.app))
        if number == 1:
            for _ in range(rng.randint(0, 10)):
                await asyncio.sleep(0)
            continue  # Killed while it goes on.
        for reader in readers:
            await reader.read_on(served)
        await again
    plain = await _server(tokenizer_folder, None)
    for reader, (path, body) in zip(readers, REQUESTS, strict=True):
        if "seed" in body or not body.get("temperature"):
            expected = without_names(await whole(Client(plain), path, body))
            by_choice = sorted(
                expected, key=lambda value: "choices" in value and value["choices"][0]["index"]
            )
            assert reader.data == by_choice
        else:
            assert len(reader.data) == 13, "its seed was drawn once"
    assert served.supervisor.open == {}


async def test_one_that_had_ended_is_read_without_an_engine(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    first = await _server(tokenizer_folder, tmp_path / "0")
    reader = Reader(REQUESTS[1])
    await reader.begin(first, 2)
    while first.supervisor.open:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    folder = _copy(tmp_path / "0", tmp_path / "1", random.Random(), 0)
    second = await _server(tokenizer_folder, folder)
    await reader.read_on(second)
    expected = without_names(await whole(Client(first), *REQUESTS[1]))
    assert reader.data == expected and second.supervisor._next_id == 0
    second.publisher.store.sweep(1e9)
    assert [*(tmp_path / "1").glob("*.stream1")] == [], "it is kept no longer than the stream"


@pytest.mark.parametrize("change", ["model", "key"])
async def test_what_cannot_go_on_says_so(
    tokenizer_folder: Path, tmp_path: Path, change: str
) -> None:
    first = await _server(tokenizer_folder, tmp_path / "0")
    reader = Reader(("/v1/completions", REQUESTS[1][1] | {"max_tokens": 40}))
    await reader.begin(first, 2)
    folder = _copy(tmp_path / "0", tmp_path / "1", random.Random(1), 10**6)
    second = await _server(tokenizer_folder, folder, DIGESTS if change == "model" else DIGESTS[1:])
    if change == "model":
        second.publisher.model = lambda: "another"
    await second.publisher.go_on(second.app)
    (buffer,) = second.publisher.store._streams.values()
    *_, (_, error), (_, last) = buffer.after(0, 100)[1]
    assert buffer.ended and b"not_restored" in error and b"[DONE]" in last
    assert second.supervisor.open == {}


async def _queued(tokenizer_folder: Path, tmp_path: Path) -> tuple[Reader, Served, Path]:
    """A reader of a stream that has yet to go on in the next server."""
    first = await _server(tokenizer_folder, tmp_path / "0")
    reader = Reader(("/v1/completions", REQUESTS[1][1] | {"max_tokens": 40}))
    await reader.begin(first, 2)
    folder = _copy(tmp_path / "0", tmp_path / "1", random.Random(1), 10**6)
    return reader, await _server(tokenizer_folder, folder), folder


async def test_one_that_is_cancelled_before_it_goes_on_stays_cancelled(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    reader, second, folder = await _queued(tokenizer_folder, tmp_path)
    await Client(second).request("DELETE", f"/v1/streams/{reader.stream}")
    await second.publisher.go_on(second.app)
    third = await _server(tokenizer_folder, _copy(folder, tmp_path / "2", random.Random(), 0))
    await third.publisher.go_on(third.app)
    (buffer,) = third.publisher.store._streams.values()
    assert buffer.ended and b"cancelled" in buffer.after(0, 100)[1][-2][1]
    assert third.supervisor._next_id == 0


async def test_one_that_is_cancelled_while_it_begins_again_leaves_nothing_behind(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, _ = await _queued(tokenizer_folder, tmp_path)
    (buffer,) = second.publisher.store._streams.values()
    start = Generation.start

    def cancelled(*arguments: Any) -> Any:
        streams = start(*arguments)
        buffer.stop("cancelled meanwhile")
        return streams

    monkeypatch.setattr(Generation, "start", cancelled)
    await second.publisher.go_on(second.app)
    assert second.supervisor.open == {} and not second.client.admission._usages


@pytest.mark.parametrize("tail", [bytes(4096), bytes(3), b"x" * 5000])
async def test_a_tail_of_anything_costs_nothing_before_it(
    tokenizer_folder: Path, tmp_path: Path, tail: bytes
) -> None:
    first = await _server(tokenizer_folder, tmp_path / "0")
    reader = Reader(REQUESTS[1])
    await reader.begin(first, 2)
    folder = _copy(tmp_path / "0", tmp_path / "1", random.Random(), 0)
    (path,) = folder.glob("*.stream1")
    path.write_bytes(path.read_bytes() + tail)
    second = await _server(tokenizer_folder, folder)
    again = asyncio.create_task(second.publisher.go_on(second.app))
    await reader.read_on(second)
    await again
    assert reader.data == without_names(await whole(Client(first), *REQUESTS[1]))


async def test_what_ends_one_server_after_the_other_is_not_asked_for_for_ever(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    _, served, folder = await _queued(tokenizer_folder, tmp_path)
    for number in range(2, 2 + MAX_REPEATS):
        (buffer,) = served.publisher.store._streams.values()
        assert not buffer.ended
        folder = _copy(folder, tmp_path / str(number), random.Random(), 0)
        served = await _server(tokenizer_folder, folder)
    (buffer,) = served.publisher.store._streams.values()
    assert buffer.ended and b"not_restored" in buffer.after(0, 100)[1][-2][1]
    assert b"[DONE]" in buffer.after(0, 100)[1][-1][1]


async def test_an_error_of_one_and_a_drain_leave_the_others(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, _ = await _queued(tokenizer_folder, tmp_path)
    (buffer,) = second.publisher.store._streams.values()
    second.client.admission.draining = True
    await second.publisher.go_on(second.app)
    assert not buffer.ended, "it is the next server's"
    second.client.admission.draining = False

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of the server")

    monkeypatch.setattr(Generation, "start", broken)
    await second.publisher.go_on(second.app)
    assert buffer.ended and b"status 500" in buffer.after(0, 100)[1][-2][1]


async def test_without_a_journal_no_body_is_kept(tokenizer_folder: Path) -> None:
    served = await _server(tokenizer_folder, None)
    bodies = []
    publish = StreamPublisher.publish

    def noted(self: StreamPublisher, http: Any, *arguments: Any) -> Any:
        bodies.append(http)
        return publish(self, http, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamPublisher, "publish", noted)
        await Reader(REQUESTS[1]).begin(served, 2)
    assert [exchange_of(http).body for http in bodies] == [b""]


def test_only_one_server_has_a_folder_and_only_its_owner(tmp_path: Path) -> None:
    journal = StreamJournal(tmp_path / "journal")
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    with pytest.raises(ConfigurationError, match="another server uses it"):
        StreamJournal(tmp_path / "journal")
    (tmp_path / "journal" / f"{32 * 'a'}.stream1").write_bytes(b"no frame")
    assert [*journal.read()] == []
    with pytest.raises(ConfigurationError, match="Not a directory"):
        StreamJournal(tmp_path / "journal" / "lock" / "journal")


async def test_a_file_that_cannot_be_written_ends_no_stream(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    served = await _server(tokenizer_folder, tmp_path / "journal")
    reader = Reader(REQUESTS[1])
    await reader.begin(served, 1)
    for path in (tmp_path / "journal").glob("*.stream1"):
        path.unlink()
    await reader.read_on(served)
    assert reader.data == without_names(await whole(Client(served), *REQUESTS[1]))
    assert [*(tmp_path / "journal").glob("*.stream1")] == []
