"""Real API processes: answers as of one process, limits over all of them, and what becomes of requests when one of them is killed."""

import contextlib
import hashlib
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import (
    DEADLINE,
    ServerProcess,
    Stream,
    alive,
    api_processes,
    engines,
    kill,
    metric_sums,
    wait_until,
)
from tests.support.wire import Response, Wire, exchange, http_request
from tests.trials.recorded_corpus import free_port

TWO = ("--server.api_processes", "2", "--cache.pages", "512")
BODY = {"prompt": "def f(", "max_tokens": 200, "temperature": 0.8, "seed": 7, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(embedded_folder: Path) -> Iterator[ServerProcess]:
    """A server with two API processes, for tests that leave it as it is, or with others in place of those they kill."""
    with ServerProcess(embedded_folder, *TWO) as running:
        yield running
        assert running.stop() == 0


connections = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """Closes what a test has opened."""
    with connections:
        yield


def connect(port: int) -> socket.socket:
    return connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))


def connection_of(server: ServerProcess, pid: int) -> socket.socket:
    """A connection that this API process has accepted: the kernel chooses one by the client's port."""
    for _ in range(200):
        connection = connect(server.port)
        wanted = f":{server.port:04X}", f":{connection.getsockname()[1]:04X}"
        if pid == wait_until(lambda ends=wanted: _owner(api_processes(server.process.pid), *ends), "the connection is accepted"):
            return connection
        connection.close()
    raise AssertionError(f"no connection to API process {pid}")


def _owner(pids: list[int], local: str, remote: str) -> int | None:
    """The process that has the connection between these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = [row[9] for row in rows if row[1].endswith(local) and row[2].endswith(remote)]
    for pid, inode in itertools.product(pids, inodes):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file) == f"socket:[{inode}]":
                    return pid
    return None


def ask(connection: socket.socket, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
    connection.sendall(http_request(method, path, body, headers))
    return Wire(connection).response(method)


class Reading(threading.Thread):
    """A stream that is read in a thread of its own: the raw bytes of its body, and how it ended."""

    def __init__(self, connection: socket.socket, body: dict[str, Any], path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self.data, self.failure = b"", ""
        self._connection, self._path, self._body = connection, path, body
        self.start()

    def run(self) -> None:
        try:
            response = ask(self._connection, "POST", self._path, self._body)
            self.status = response.status
            self.stream_id = response.header("x-stream-id") or ""
            for piece in response.pieces():
                self.data += piece
        except (OSError, EOFError) as error:
            self.failure = repr(error)

    @property
    def texts(self) -> list[str]:
        return re.findall(r'"text":"((?:[^"\\]|\\.)*)"', self.data.decode())

    def reach(self, count: int) -> None:
        wait_until(lambda: self.data.count(b"data:") >= count, f"{count} events")


def test_streams_through_both_have_the_answers_of_one_process(server: ServerProcess, embedded_server: ServerProcess) -> None:
    pids = api_processes(server.process.pid)
    assert len(pids) == 2 and len(engines(server.process.pid)) == 1
    for pid, seed in itertools.product(pids, (1, 2)):
        body = BODY | {"seed": seed, "max_tokens": 40}
        reading = Reading(connection_of(server, pid), body)
        reading.join(DEADLINE)
        expected = Reading(connect(embedded_server.port), body)
        expected.join(DEADLINE)
        assert reading.texts == expected.texts and len(reading.texts) > 10
        assert reading.data.endswith(b"data: [DONE]\n\n")
    for path in ("/info", "/plan", "/v1/models"):
        answers = {ask(connection_of(server, pid), "GET", path).body() for pid in pids}
        assert len(answers) == (1 if path != "/v1/models" else len(answers))


def test_a_conversation_and_a_grammar_are_made_in_both(server: ServerProcess) -> None:
    grammar = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"regex": "(ab){3}"}}
    for pid in api_processes(server.process.pid):
        response = ask(connection_of(server, pid), "POST", "/v1/completions", grammar)
        assert response.status == 200 and b'"text":"ababab"' in response.body()
        long = ask(connection_of(server, pid), "POST", "/tokenize", {"prompt": "word " * 2000})
        assert long.status == 200 and long.body().count(b",") > 1000


def test_metrics_are_sums_over_all(server: ServerProcess) -> None:
    pids = api_processes(server.process.pid)
    before = metric_sums(server.get("/metrics")[1])
    for pid in pids:
        reading = Reading(connection_of(server, pid), BODY | {"max_tokens": 10})
        reading.join(DEADLINE)
        refused = ask(connection_of(server, pid), "POST", "/v1/completions", BODY | {"prompt": [10**6]})
        assert refused.status == 400
    for pid in pids:
        after = metric_sums(ask(connection_of(server, pid), "GET", "/metrics").body().decode())
        assert after["onehead_generation_tokens_total"] - before["onehead_generation_tokens_total"] == 20
        assert after["onehead_time_to_first_token_seconds_count"] - before["onehead_time_to_first_token_seconds_count"] == 2
        assert after["onehead_api_processes"] == 2

    def refused_in_all() -> bool:
        name = 'onehead_requests_total{outcome="refused"} '
        return any(line == f"{name}2.0" for line in server.get("/metrics")[1].splitlines())

    wait_until(refused_in_all, "refused requests of both are counted")


def test_a_kill_of_one_ends_its_streams_and_no_other(server: ServerProcess) -> None:
    pids = api_processes(server.process.pid)
    restarts = server.metric("onehead_api_process_restarts_total")
    victim, other = pids
    body = BODY | {"max_tokens": 600}  # More than all have when the last one has its first.
    expected = Reading(connection_of(server, other), body)
    expected.join(DEADLINE)
    readings = [Reading(connection_of(server, pid), body) for pid in (victim, other) * 4]
    for reading in readings:
        reading.reach(10)
    kill(victim)
    for reading in readings:
        reading.join(DEADLINE)
    assert [bool(reading.failure) for reading in readings] == [True, False] * 4
    assert all(reading.texts == expected.texts for reading in readings[1::2])
    # Connections that the kernel gave to the dead process's socket are served by its replacement.
    waiting = [connect(server.port) for _ in range(12)]
    for connection in waiting:
        connection.sendall(http_request("GET", "/live"))
    assert [Wire(connection).response().status for connection in waiting] == [200] * 12
    wait_until(lambda: server.metric("onehead_api_processes") == 2, "it is replaced")
    assert server.metric("onehead_api_process_restarts_total") == restarts + 1 and victim not in api_processes(server.process.pid)
    wait_until(lambda: server.metric("onehead_kv_pages_used") == 0, "its sequences are cancelled")
    after = Reading(connection_of(server, max(api_processes(server.process.pid))), body)
    after.join(DEADLINE)
    assert after.texts == expected.texts


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_resumable_stream_goes_on_in_another_process_after_a_kill(server: ServerProcess, path: str) -> None:
    wait_until(lambda: server.metric("onehead_api_processes") == 2, "both serve")
    victim, other = api_processes(server.process.pid)
    body = BODY | {"resumable": True, "max_tokens": 300}
    if path == "/generate":
        body = {"inputs": "def f(", "stream": True, "resumable": True, "parameters": {"max_new_tokens": 300, "do_sample": True, "seed": 7}}
    reading = Reading(connection_of(server, victim), body, path)
    reading.reach(20)
    kill(victim)
    reading.join(DEADLINE)
    whole = ask(connection_of(server, other), "GET", f"/v1/streams/{reading.stream_id}").body()
    seen = reading.data[: reading.data.rindex(b"\n\n") + 2]
    assert whole.startswith(seen) and len(whole) > len(seen)
    # The model may well write the word: an event of an error has it as a key, where a text's quotes are escaped.
    assert b'"error":' not in whole
    numbers = [int(number) for number in re.findall(rb"^id: [\w-]+\.(\d+)$", whole, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    wait_until(lambda: server.metric("onehead_api_processes") == 2, "it is replaced")
    late = ask(connection_of(server, max(api_processes(server.process.pid))), "GET", f"/v1/streams/{reading.stream_id}?after=20").body()
    assert late and whole.endswith(late)


def test_an_engine_that_is_killed_loses_nothing(server: ServerProcess) -> None:
    pids = api_processes(server.process.pid)
    expected = Reading(connection_of(server, pids[0]), BODY)
    expected.join(DEADLINE)
    readings = [Reading(connection_of(server, pid), BODY) for pid in pids * 2]
    for reading in readings:
        reading.reach(10)
    kill(server.engine_pid)
    for reading in readings:
        reading.join(DEADLINE)
    assert [(reading.failure, reading.texts == expected.texts) for reading in readings] == [("", True)] * 4
    wait_until(lambda: all(ask(connection_of(server, pid), "GET", "/ready").status == 200 for pid in pids), "both are ready again")


def test_the_places_of_waiting_requests_are_counted_over_all(embedded_folder: Path) -> None:
    options = ("--engine.max_running", "1", "--server.max_waiting", "1", "--server.max_queue_wait", "86400")
    with ServerProcess(embedded_folder, *TWO, *options) as server:
        one, other = api_processes(server.process.pid)
        readings = [Reading(connection_of(server, pid), BODY | {"max_tokens": 1500}) for pid in (one, other)]
        assert len(readings) == 2
        wait_until(lambda: server.metric("onehead_requests_waiting") == 1, "one waits")
        for pid in (one, other):
            response = ask(connection_of(server, pid), "POST", "/v1/completions", BODY)
            assert response.status == 429 and response.header("retry-after")


@pytest.mark.parametrize("how", ["in time", "cut", "second signal"])
def test_a_drain_waits_for_streams_of_all(embedded_folder: Path, how: str) -> None:
    timeout = "0.5" if how == "cut" else "600"
    server = ServerProcess(embedded_folder, *TWO, "--server.drain_timeout", timeout, "--server.lb_grace", "1")
    pids = api_processes(server.process.pid)
    kept = [connection_of(server, pid) for pid in pids]
    readings = [Reading(connection_of(server, pid), BODY | {"max_tokens": 400 if how == "in time" else 3900}) for pid in pids]
    for reading in readings:
        reading.reach(5)
    server.process.send_signal(signal.SIGTERM)
    if how == "in time":
        wait_until(lambda: server.get("/ready")[0] == 503, "it drains")
        assert [ask(connection, "POST", "/v1/completions", BODY).status for connection in kept] == [503, 503]
    if how == "second signal":
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE) == (0 if how == "in time" else 75)
    for reading in readings:
        reading.join(DEADLINE)
        assert reading.data.endswith(b"data: [DONE]\n\n") and (b"server_shutting_down" in reading.data) == (how != "in time")
    assert not any(map(alive, pids))
    server.stop()


def test_api_processes_and_the_engine_end_with_the_front_process(embedded_folder: Path) -> None:
    server = ServerProcess(embedded_folder, *TWO)
    children = [*api_processes(server.process.pid), *engines(server.process.pid)]
    assert len(children) == 3
    server.process.kill()
    wait_until(lambda: not any(map(alive, children)), "all have ended", 5)
    server.stop()


def test_a_removed_key_is_refused_by_all(embedded_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{0}"\nsha256 = "{1}"\n'
    entries = {name: entry.format(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("stays", "goes")}
    file.write_text("".join(entries.values()))
    with ServerProcess(embedded_folder, *TWO, "--server.api_keys_file", str(file)) as server:
        pids = api_processes(server.process.pid)

        def statuses(key: str) -> list[int]:
            return [ask(connection_of(server, pid), "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status for pid in pids]

        assert statuses("goes") == [200, 200]
        file.write_text(entries["stays"])
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: statuses("goes") == [401, 401], "it is refused")
        assert statuses("stays") == [200, 200]


def test_a_port_in_use_is_refused(embedded_folder: Path) -> None:
    port = free_port()
    with ServerProcess(embedded_folder, *TWO, port=port):
        for processes in ("1", "2"):
            second = ServerProcess(embedded_folder, "--server.api_processes", processes, port=port, wait=False)
            _, errors = second.process.communicate(timeout=DEADLINE)
            assert second.process.returncode == 71 and f"port {port}" in errors


def test_a_server_whose_api_processes_cannot_serve_says_why(embedded_folder: Path) -> None:
    import resource

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    server = ServerProcess(embedded_folder, *TWO, wait=False, prepare=few_files)
    _, errors = server.process.communicate(timeout=DEADLINE)
    assert server.process.returncode == 71 and "ulimit -n" in errors


def test_api_processes_that_never_serve_end_the_server(embedded_folder: Path) -> None:
    launcher = ("tests.support.broken_api_processes",)
    server = ServerProcess(embedded_folder, *TWO, launcher=launcher, wait=False)
    _, errors = server.process.communicate(timeout=DEADLINE)
    assert server.process.returncode == 70 and "5 API processes in a row ended" in errors


def test_a_stream_that_nobody_else_reads_stays_where_it_is(server: ServerProcess) -> None:
    """A connection that is lost and comes back to the same process reads from its buffer."""
    pid = api_processes(server.process.pid)[0]
    stream = Stream(server.port, "/v1/completions", BODY | {"resumable": True})
    id = stream.response().header("x-stream-id")
    stream.close()
    whole = ask(connection_of(server, pid), "GET", f"/v1/streams/{id}").body()
    assert whole.endswith(b"data: [DONE]\n\n")
    assert exchange(server.port, http_request("DELETE", f"/v1/streams/{id}"), DEADLINE)[0].status == 204
