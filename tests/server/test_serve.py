"""The socket of a server, its connections, and what it writes when it is ready."""

import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from commands import cli
from server.serve import in_words
from tests.support.fake_engine import READY
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, ServerProcess, engines, wait_until
from tests.support.wire import Wire, exchange, http_request
from tests.trials.recorded_corpus import free_port, status_of

GIB = 2**30


def test_the_start_up_line_names_what_computes() -> None:
    line = in_words(READY)
    assert line.startswith(
        "hash, 0.0M parameters in float32 on cpu, by reference, not batch-invariant;"
    )
    assert line.endswith("32 pages of 8, up to 64 tokens a sequence")


def test_of_a_gpu_it_names_the_card_its_free_memory_and_the_graphs() -> None:
    hardware = "NVIDIA H100 80GB HBM3 (compute capability 9.0, driver 580.95.05, CUDA 13.0)"
    line = in_words(
        replace(
            READY,
            device="cuda",
            hardware=hardware,
            device_memory=(7 * GIB, 79 * GIB),
            num_graphs=104,
        )
    )
    assert f" in float32 on {hardware}, by reference" in line
    assert line.endswith(
        "up to 64 tokens a sequence; 7.0 of 79.0 GiB of GPU memory are free, 104 CUDA graphs"
    )


def test_it_says_how_the_weights_of_a_gguf_file_are_held() -> None:
    line = in_words(replace(READY, quantization="int4+int8", block_forms={"int8": 57, "int4": 126}))
    assert (
        "parameters as in the file (126 matrices in int4 blocks and 57 matrices in int8 blocks) "
        "on cpu, by reference" in line
    )


def test_a_hangup_at_any_moment_of_the_start_ends_nothing_and_is_not_missed(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """Keys that are removed while the engine is loaded are not valid once the server is ready."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"old").hexdigest()
    keys.write_text(f'[[key]]\nname = "old"\nsha256 = "{digest}"\n')
    server = ServerProcess(tiny_folder, "--server.api_keys_file", str(keys), wait=False)
    try:
        wait_until(
            lambda: engines(server.process.pid), "an engine is started, so the keys have been read"
        )
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        server.wait_started()
        wire = http_request("GET", "/v1/models", None, {"authorization": "Bearer old"})
        assert exchange(server.port, wire, DEADLINE)[0].status == 401
    finally:
        server.stop()


def test_a_hangup_is_ignored_from_the_first_line_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the options are imported, which takes most of a second."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setitem(sys.modules, "server.config", None)
    try:
        with pytest.raises(ImportError):
            cli.main(["serve"])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


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
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "serve",
        "--model",
        str(tiny_folder),
        "--port",
        str(port),
        "--server.lb_grace",
        "0",
    ]
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
        assert wait_until(
            lambda: server.get("/live")[0] == 200 and server.get("/info")[0] == 503,
            "a third connection is one too many",
        )
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
    with (
        ServerProcess(tiny_folder) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection,
    ):
        lines = [
            "POST /v1/completions HTTP/1.0",
            "connection: keep-alive",
            "content-type: application/json",
            f"content-length: {len(text)}",
        ]
        connection.sendall("\r\n".join([*lines, "", text]).encode())
        data = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, answer = data.decode().partition("\r\n\r\n")
    assert (
        "transfer-encoding" not in head
        and "content-length" not in head
        and "connection: close" in head
    )
    events = answer.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]" and all(
        json.loads(event.removeprefix("data: ")) for event in events[:-1]
    )
