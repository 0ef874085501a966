"""/monitor over HTTP: keys, limits, the option that turns it off, viewers that do not read, the end
of a drain.
"""

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerSection
from server.generation import monitor as watching
from server.http.page import monitor
from tests.support.bad_inputs import KEY_HASHES, KEYS
from tests.support.cache_client import CacheClient
from tests.support.fake_engine import FakeEngine, Served, serve
from tests.support.processes import ServerProcess, kill
from tests.support.report import usage
from tests.support.wire import Wire, http_request

PATHS = "/monitor", "/monitor/cache"
SMALL = "--cache.pages", "32"
MOST_BYTES = 20 * 2**20


def http_of(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://test")


async def test_a_key_is_needed_where_there_are_any(tokenizer_folder: Path) -> None:
    served = serve(tokenizer_folder, section=ServerSection.model_validate({"api_keys": KEY_HASHES}))
    async with http_of(served) as http:
        assert [(await http.get(path)).status_code for path in PATHS] == [401, 401]
        assert (
            await http.get("/monitor/cache", headers={"authorization": f"Bearer {KEYS[0]}"})
        ).status_code == 200


async def test_the_option_turns_it_off(tokenizer_folder: Path) -> None:
    async with http_of(serve(tokenizer_folder, section=ServerSection(ui=False))) as http:
        assert [(await http.get(path)).status_code for path in PATHS] == [404, 404]


async def test_one_viewer_too_many_is_refused(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_VIEWERS", 0)
    async with http_of(serve(tokenizer_folder)) as http:
        refused = await http.get("/monitor")
        assert (
            refused.status_code == 429
            and refused.headers["retry-after"]
            and refused.json()["error_type"] == "overloaded"
        )


async def test_a_dump_needs_an_engine(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "DUMP_SECONDS", 0.01)
    served = serve(tokenizer_folder, FakeEngine(defer=lambda call: None))
    async with http_of(served) as http:
        refused = await http.get("/monitor/cache")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"


class Watching:
    """A viewer in a thread, until the server ends the response."""

    def __init__(self, port: int) -> None:
        self.cache = CacheClient()
        self.num_stats = 0
        self.problem: BaseException | None = None
        self.changed = threading.Condition()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.sendall(http_request("GET", "/monitor"))
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        try:
            with self._socket:
                for event in Wire(self._socket).response().events():
                    with self.changed:
                        if event.kind == "cache":
                            self.cache.take(json.loads(event.data or ""))
                        self.num_stats += event.kind == "stats"
                        self.changed.notify_all()
        except (OSError, ValueError) as error:
            self.problem = error

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30), "it has not come"

    def ended(self) -> bool:
        """Whether the response ends by itself, with its last chunk."""
        self.thread.join(30)
        return not self.thread.is_alive() and self.problem is None

    def agrees(self, dump: dict[str, Any]) -> bool:
        """Whether its state equals a dump of the same view; False where it has gone on."""
        self.wait(lambda: (self.cache.engine, self.cache.view) >= (dump["engine"], dump["view"]))
        with self.changed:
            if (self.cache.engine, self.cache.view) != (dump["engine"], dump["view"]):
                return False
            assert self.cache.problems(dump) == []
        return True


def dump_of(server: ServerProcess) -> dict[str, Any]:
    status, body = server.get("/monitor/cache")
    assert status == 200, body
    return dict(json.loads(body))


def test_viewers_see_requests_a_new_engine_and_the_end_of_a_drain() -> None:
    """Each has the engine's state; the drain waits for none of them, and each response ends as it
    should.
    """
    # Often enough that a view is taken while the requests run, however fast they are.
    often = {"server.generation.monitor.LOOK_SECONDS": 0.02}
    with ServerProcess(None, *SMALL, constants=often, stderr=None) as server:
        watching = [Watching(server.port) for _ in range(4)]
        for viewer in watching:
            viewer.wait(lambda viewer=viewer: viewer.num_stats and viewer.cache.cells)
        streams = [
            server.stream(f"def f{number}", max_new_tokens=450, ignore_eos=True)
            for number in range(4)
        ]
        for viewer in watching:
            viewer.wait(lambda viewer=viewer: viewer.cache.sequences)
        assert any(
            viewer.agrees(dump)
            for dump in (dump_of(server), dump_of(server))
            for viewer in watching
        )
        kill(server.engine_pid)
        for viewer in watching:
            viewer.wait(lambda viewer=viewer: viewer.cache.engine == 1)
        for stream in streams:
            assert [*stream.events()][-1]["index"] == 450
        last = dump_of(server)
        assert all(viewer.agrees(last) and not viewer.cache.sequences for viewer in watching)
        began = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert all(viewer.ended() for viewer in watching) and time.monotonic() - began < 20


def test_a_viewer_that_stops_reading_costs_bounded_memory() -> None:
    """It gets the last state when it reads again."""
    with ServerProcess(
        None, *SMALL, constants={"server.http.connection.WRITE_SECONDS": 600}, stderr=None
    ) as server:
        stuck = []
        for _ in range(8):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.port))
            one.sendall(http_request("GET", "/monitor"))
            stuck.append(one)
        steady = Watching(server.port)
        server.text("warm up", max_new_tokens=20)
        before = usage(server.process.pid)
        for _ in range(6):
            streams = [server.stream("a", max_new_tokens=200, ignore_eos=True) for _ in range(8)]
            assert all([*stream.events()] for stream in streams)
        after = usage(server.process.pid)
        assert before is not None and after is not None and after.rss - before.rss < MOST_BYTES
        assert steady.cache.num_events > 5
        client = CacheClient()
        stuck[0].settimeout(30)
        events = Wire(stuck[0]).response().events()
        while client.view < steady.cache.view:
            event = next(events)
            if event.kind == "cache":
                client.take(json.loads(event.data or ""))
        for one in stuck:
            one.close()
        assert server.stop(signal.SIGTERM) == 0 and steady.ended()
