"""What the server asks of its process: places for connections, and standard output that it never waits for."""

import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.errors import ResourceError
from server.http.connection import PROBE_CONNECTIONS
from server.web_server import MIN_CONNECTIONS, OTHER_FILES, raise_file_limit
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, ServerProcess, wait_until
from tests.support.wire import Wire, exchange, http_request
from tests.trials.recorded_corpus import free_port, status_of

OTHERS = OTHER_FILES + PROBE_CONNECTIONS


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of open files, which the process seems to have."""
    now = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: now.__setitem__(slice(None), wanted))
    return now


def test_the_limit_of_files_is_raised_as_far_as_it_goes(limits: list[int], caplog: pytest.LogCaptureFixture) -> None:
    assert raise_file_limit(100) == 100 and limits == [256, 1024]
    assert raise_file_limit(500) == 500 and limits == [500 + OTHERS, 1024] and not caplog.records
    assert raise_file_limit(4096) == 1024 - OTHERS
    assert f"server.max_connections to {1024 - OTHERS}" in caplog.text


def test_a_limit_that_leaves_no_connections_is_refused_with_what_is_needed(limits: list[int]) -> None:
    limits[:] = [64, OTHERS + MIN_CONNECTIONS - 1]
    with pytest.raises(ResourceError, match=f"{OTHERS + MIN_CONNECTIONS - 1} files open, and needs {OTHERS + MIN_CONNECTIONS}"):
        raise_file_limit(4096)
    assert raise_file_limit(2) == 2
    limits[:] = [64, OTHERS + MIN_CONNECTIONS]
    assert raise_file_limit(4096) == MIN_CONNECTIONS


def test_a_full_standard_output_is_not_waited_for(tiny_folder: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    port = free_port()
    command = [sys.executable, "-m", "commands.cli", "serve", "--model", str(tiny_folder), "--port", str(port), "--server.lb_grace", "0"]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        wait_until(lambda: status_of(port, "/ready") == 200, "ready")
        assert exchange(port, http_request("GET", "/info"), DEADLINE)[0].status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


def test_probes_have_places_when_all_connections_are_taken(tiny_folder: Path) -> None:
    with ServerProcess(tiny_folder, "--server.max_connections", "2") as server:
        taken = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert wait_until(lambda: server.get("/live")[0] == 200 and server.get("/info")[0] == 503, "a third connection is one too many")
        assert (server.get("/ready")[0], server.get("/metrics")[0]) == (200, 200)
        status, body = server.get("/v1/models")
        assert status == 503 and "2 connections are open" in json.loads(body)["error"]["message"]
        for connection in taken:
            connection.close()
        assert wait_until(lambda: server.get("/info")[0] == 200, "the places are free again")


def test_an_answer_does_not_wait_for_an_acknowledgement(tiny_folder: Path) -> None:
    """A head and a body that are written apart: without TCP_NODELAY each answer takes 40 ms."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    seconds = []
    with (
        ServerProcess(tiny_folder) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection,
    ):
        wire = Wire(connection)
        for _ in range(60):
            began = time.perf_counter()
            connection.sendall(http_request("POST", "/generate", body, close=False))
            assert wire.response().body()
            seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds[20:]) < 0.03


def test_a_stream_ends_with_its_connection_on_http_1_0(tiny_folder: Path) -> None:
    text = json.dumps({"prompt": "a", "max_tokens": 8, "stream": True, "ignore_eos": True})
    with ServerProcess(tiny_folder) as server, socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection:
        lines = [
            "POST /v1/completions HTTP/1.0",
            "connection: keep-alive",
            "content-type: application/json",
            f"content-length: {len(text)}",
        ]
        connection.sendall("\r\n".join([*lines, "", text]).encode())
        data = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, answer = data.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head and "content-length" not in head and "connection: close" in head
    events = answer.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]" and all(json.loads(event.removeprefix("data: ")) for event in events[:-1])
