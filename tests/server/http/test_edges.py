"""Regression tests over real sockets for faults that reviews of the HTTP side found."""

import asyncio
import hashlib
import http.client
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import protocol
from server.generation.admission import MAX_NUMERICAL_ERRORS, MAX_QUEUE_SECONDS
from server.http.tgi.generate import TgiReply
from server.supervision.engine import State
from tests.server.http.test_streams import Client, request_of
from tests.support.fake_engine import FakeEngine, serve
from tests.support.processes import ServerProcess, wait_until

METRICS_KEY = "of the metrics"
HEAD = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
SHORT = {"server.http.connection.HEAD_SECONDS": 1.0, "server.http.connection.BODY_SECONDS": 1.0}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    digest = hashlib.sha256(METRICS_KEY.encode()).hexdigest()
    options = (
        "--server.metrics_key",
        digest,
        "--engine.max_running",
        "1",
        "--server.max_waiting",
        "1",
    )
    server = ServerProcess(tiny_folder, *options, constants=SHORT)
    yield server
    assert server.stop() == 0


def connected(server: ServerProcess, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


def seconds_until_closed(connection: socket.socket) -> float:
    began = time.monotonic()
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


def test_a_lone_line_end_does_not_keep_a_connection(server: ServerProcess) -> None:
    with connected(server, HEAD + b"\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert seconds_until_closed(connection) < 10


@pytest.mark.parametrize("rest", [b"a: b\r\n" * 10, b"a: " + b"b" * 10**6], ids=["many", "long"])
def test_headers_behind_a_body_are_not_kept(server: ServerProcess, rest: bytes) -> None:
    with connected(server, HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + rest) as connection:
        assert seconds_until_closed(connection) < 10


def test_a_line_end_in_a_path_finds_no_other_way_in(server: ServerProcess) -> None:
    assert server.get("/metrics")[0] == 401 and server.get("/metrics%0A")[0] == 404
    for path in ("/generate%0A", "/v1/completions%0A"):
        assert server.post(path, {})[0] == 404


def test_what_leaves_no_token_is_refused_and_no_failure_of_ours(
    embedded_server: ServerProcess,
) -> None:
    def counts() -> list[float]:
        lines = embedded_server.get("/metrics")[1].splitlines()
        starts = [
            f'onehead_requests_total{{outcome="{outcome}"}}' for outcome in ("refused", "failed")
        ]
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(start))
            for start in starts
        ]

    refused, failed = counts()
    body = {"prompt": "a", "max_tokens": 4, "bad_words": ["a"], "temperature": 0}
    ids = embedded_server.post("/tokenize", {"prompt": "a"})[1]["tokens"]
    status, answer = embedded_server.post("/v1/completions", body | {"allowed_token_ids": ids})
    assert status == 400 and "every token" in answer["error"]["message"]
    assert counts() == [refused + 1, failed]


def test_half_sent_bodies_take_nobodys_place(server: ServerProcess) -> None:
    half = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    waiting = [connected(server, half) for _ in range(8)]
    time.sleep(0.1)
    assert server.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}})[0] == 200
    for connection in waiting:
        connection.close()


def test_who_leaves_with_another_request_behind_it_is_noticed(server: ServerProcess) -> None:
    body = json.dumps(
        {"inputs": "a", "parameters": {"max_new_tokens": 500, "ignore_eos": True}, "stream": True}
    ).encode()
    post = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with connected(server, post + body + HEAD + b"\r\n") as connection:
        assert connection.recv(100)
    began = time.monotonic()
    while server.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}})[0] == 429:
        time.sleep(0.02)
    assert time.monotonic() - began < 10


def test_a_drain_lets_a_slow_reader_finish(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder)
    body = json.dumps(
        {"prompt": ["a"] * 40, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 5}
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    connection.sendall(head + body)
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.readline()
    wait_until(
        lambda: server.metric("onehead_generation_tokens_total") == 40 * 500,
        "all is generated, and little of it read",
    )
    server.process.send_signal(signal.SIGTERM)
    time.sleep(2.5)  # Longer than what is given to connections that nobody waits for.
    text = response.read()
    connection.close()
    server.process.communicate(timeout=20)
    assert text.endswith(b"data: [DONE]\n\n") and server.process.returncode == 0


async def ready(folder: Path) -> Any:
    import asyncio

    served = serve(folder)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    return served


@pytest.mark.parametrize("resumable", [False, True])
async def test_an_error_that_nobody_foresaw_is_an_event(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, resumable: bool
) -> None:
    def fail(*_: Any) -> bytes:
        raise ZeroDivisionError

    served = await ready(tokenizer_folder)
    path, body = request_of("tgi")
    monkeypatch.setattr(TgiReply, "chunks", fail)
    response = await Client(served).request("POST", path, body | {"resumable": resumable})
    assert (
        response.status_code == 200
        and "internal error" in response.text
        and "Zero" not in response.text
    )
    assert served.supervisor.open == {}


async def test_a_key_of_a_detached_stream_is_still_in_use(tokenizer_folder: Path) -> None:
    served = await ready(tokenizer_folder)
    client = Client(served)
    path, body = request_of("openai")
    served.engine.defer = lambda call: None  # The engine says nothing more: the stream goes on.
    cut = await client.cut(
        "POST", path, body | {"resumable": True}, 0, **{"idempotency-key": "once"}
    )
    again = await client.request("POST", path, body, **{"idempotency-key": "once"})
    assert cut.headers["x-stream-id"] and again.status_code == 409
    assert (
        await client.request("DELETE", f"/v1/streams/{cut.headers['x-stream-id']}")
    ).status_code == 204


async def test_many_numerical_errors_make_it_not_ready(tokenizer_folder: Path) -> None:
    served = await ready(tokenizer_folder)
    for _ in range(MAX_NUMERICAL_ERRORS):
        assert (await Client(served).request("GET", "/ready")).status_code == 200
        served.client.admission.record_numerical_error()
    response = await Client(served).request("GET", "/ready")
    assert response.status_code == 503 and response.json()["status"] == "numerical errors"


async def test_probes_of_a_server_that_loads_write_no_line(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The client's own lines; this also sets the level of what is captured.
    caplog.set_level(logging.WARNING, "httpx")
    caplog.set_level(logging.INFO)
    client = Client(serve(tokenizer_folder, FakeEngine(defer=lambda callback: None)))
    for path, status in (
        ("/ready", 503),
        ("/health", 503),
        ("/ping", 503),
        ("/metrics", 200),
        ("/live", 200),
    ):
        assert (await client.request("GET", path)).status_code == status
    assert (await client.request("GET", "/nowhere")).status_code == 404
    while not caplog.records:  # The line of a request is written once its answer is.
        await asyncio.sleep(0)
    assert [record.getMessage().split()[1] for record in caplog.records] == ["/nowhere"]


async def test_health_stays_while_an_engine_is_replaced(tokenizer_folder: Path) -> None:
    served = await ready(tokenizer_folder)

    async def health(status: int) -> str:
        response = await Client(served).request("GET", "/health")
        assert response.status_code == status
        return str(response.json()["status"])

    assert await health(200) == "ok"
    served.engine.runs[-1].kill()
    served.engine.defer = lambda callback: None  # The next engine does not become ready.
    while served.supervisor.state is State.READY:
        await asyncio.sleep(0)
    assert (await Client(served).request("GET", "/ready")).status_code == 503
    assert (await health(200)).startswith("restarting after the engine")
    served.client.admission.draining = True
    assert await health(503) == "draining"
    served.client.admission.draining = False
    for _ in range(10_000):
        served.supervisor.tick(1.0)
        if served.supervisor.recovery_overdue:
            break
    assert await health(503)


async def test_not_ready_says_what_the_server_is_doing(tokenizer_folder: Path) -> None:
    served = serve(tokenizer_folder, FakeEngine(defer=lambda callback: None))

    async def status() -> str:
        response = await Client(served).request("GET", "/ready")
        assert response.status_code == 503 and response.json()["error_type"] == "healthcheck"
        return str(response.json()["status"])

    assert await status() == "starting"
    served.supervisor._on_message(1, protocol.Loading("loading weights 40 %"))
    assert await status() == "loading weights 40 %"
    served.client.admission.draining = True
    assert await status() == "draining"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["tgi", "openai"])
async def test_who_waits_longer_than_its_own_time_limit_is_told_so(
    tokenizer_folder: Path, dialect: str, stream: bool
) -> None:
    served = await ready(tokenizer_folder)
    served.engine.defer = lambda call: None  # Nobody's turn comes.
    path, body = request_of(dialect)
    response = await Client(served).request(
        "POST", path, body | {"stream": stream, "timeout_s": 0.05}
    )
    assert (
        response.status_code == 504
        and "time limit" in response.text
        and response.headers["retry-after"]
    )
    assert served.supervisor.open == {} and served.client.admission.waiting_tokens == 0


async def test_a_queue_that_would_take_too_long_takes_nobody(tokenizer_folder: Path) -> None:
    served = await ready(tokenizer_folder)
    client, (path, body) = Client(served), request_of("openai")
    served.client.admission.max_running = 2
    served.engine.defer = lambda call: None
    for _ in range(3):  # Two for whom there are places, and one who waits.
        for usage in served.client.admission.clients.values():
            usage.run_seconds.append(2 * MAX_QUEUE_SECONDS + 1)
        assert (await client.cut("POST", path, body | {"resumable": True}, 0)).headers[
            "x-stream-id"
        ]
    refused = await client.request("POST", path, body)
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_too_long"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
