"""The server as processes and sockets: streams, disconnects, crashes of the engine, shutdown,
refusals to start.
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ServerProcess, alive, children, kill, wait_until


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tiny_folder, "--engine.max_running", "32")
    yield process
    assert process.stop() == 0


def idle(server: ServerProcess) -> bool:
    return (
        server.metric("onehead_kv_pages_used") == 0
        and server.metric("onehead_requests_running") == 0
    )


def test_stream_events_have_the_shape_that_tgi_clients_parse(server: ServerProcess) -> None:
    events = list(server.stream("def f", max_new_tokens=6, ignore_eos=True, details=True).events())
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5, 6]
    for event in events:
        assert list(event) == ["index", "token", "generated_text", "details"]
        assert list(event["token"]) == ["id", "text", "logprob", "special"]
    assert all(
        event["generated_text"] is None and event["details"] is None for event in events[:-1]
    )
    last = events[-1]
    assert last["generated_text"] == "".join(
        event["token"]["text"] for event in events if not event["token"]["special"]
    )
    assert last["details"] == {
        "finish_reason": "length",
        "generated_tokens": 6,
        "seed": None,
        "input_length": 5,
    }


def test_all_routes_give_the_same_text(server: ServerProcess) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 12}
    status, whole = server.post("/generate", {"inputs": "def f", "parameters": parameters})
    assert status == 200 and set(whole) == {"generated_text"}
    (root,) = server.post(
        "/", {"inputs": "def f", "parameters": {**parameters, "return_full_text": False}}
    )[1]
    (echoed,) = server.post("/", {"inputs": "def f", "parameters": parameters})[1]
    streamed = (
        server.stream("def f", "/generate_stream", **parameters),
        server.stream("def f", **parameters),
    )
    streams = [list(stream.events())[-1] for stream in streamed]
    assert root == whole and echoed == {"generated_text": "def f" + whole["generated_text"]}
    assert {stream["generated_text"] for stream in streams} == {whole["generated_text"]}
    assert all(stream["details"] is None for stream in streams)


def test_details_stop_strings_and_seeds(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "max_new_tokens": 40,
        "do_sample": True,
        "seed": 7,
        "details": True,
        "ignore_eos": True,
    }
    _, first = server.post("/generate", {"inputs": "x", "parameters": body})
    _, again = server.post("/generate", {"inputs": "x", "parameters": body})
    assert first == again and first["details"]["seed"] == 7 and first["details"]["prefill"] == []
    text = first["generated_text"]
    stop = text[10:12]
    finished = server.metric("onehead_e2e_latency_seconds_count")
    _, stopped = server.post("/generate", {"inputs": "x", "parameters": {**body, "stop": [stop]}})
    assert stopped["generated_text"] == text[: text.index(stop) + 2]
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert server.metric("onehead_e2e_latency_seconds_count") == finished + 1
    tokens = first["details"]["tokens"]
    _, by_id = server.post(
        "/generate", {"inputs": "x", "parameters": {**body, "stop_token_ids": [tokens[4]["id"]]}}
    )
    ids = [token["id"] for token in tokens]
    assert by_id["details"]["generated_tokens"] == ids.index(tokens[4]["id"]) + 1
    assert by_id["details"]["finish_reason"] == "eos_token"
    _, unseeded = server.post("/generate", {"inputs": "x", "parameters": {**body, "seed": None}})
    assert unseeded["details"]["seed"] != 7


def test_the_hugging_face_client(server: ServerProcess) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=f"http://127.0.0.1:{server.port}")
    expected = server.text("def f", max_new_tokens=8)
    assert client.text_generation("def f", max_new_tokens=8, return_full_text=False) == expected
    assert "".join(client.text_generation("def f", max_new_tokens=8, stream=True)) == expected
    detailed = client.text_generation(
        "def f", max_new_tokens=8, details=True, return_full_text=False
    )
    assert (
        detailed.generated_text == expected
        and len(detailed.details.tokens) == detailed.details.generated_tokens
    )


def test_info_and_probes(server: ServerProcess) -> None:
    info = json.loads(server.get("/info")[1])
    assert (
        info["kv_bytes_per_token"] == 2 * 3 * 16 * 4
        and info["max_total_tokens"] == 512
        and info["model_dtype"] == info["kv_dtype"] == "float32"
    )
    for path in ("/live", "/ready", "/health", "/ping", "/docs", "/openapi.json"):
        assert server.get(path)[0] == 200
    assert json.loads(server.get("/version")[1]) == {"version": info["version"]}
    for path in ("/live", "/ready", "/health", "/ping"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        with contextlib.closing(connection):
            for method in (
                "HEAD",
                "GET",
                # On one connection: an answer to HEAD has no body that would be taken for the next
                # answer.
            ):
                connection.request(method, path)
                response = connection.getresponse()
                assert (response.status, response.read() == b"") == (200, method == "HEAD")
    page = server.get("/docs")[1]
    assert "https://" not in page and "swagger-ui" in page
    assert server.get("/nowhere")[0] == 404 and server.get("/generate")[0] == 405


def requests(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = "".join(rng.choice("abcdef (:)\n") for _ in range(rng.randint(1, 100)))
        parameters: dict[str, Any] = {"max_new_tokens": rng.randint(1, 60), "ignore_eos": True}
        made.append(
            (prompt, parameters | ({"do_sample": True, "seed": i, "top_p": 0.9} if i % 2 else {}))
        )
    return made


def test_64_streams_with_random_disconnects(server: ServerProcess) -> None:
    rng = random.Random(1)
    cut_after = [rng.choice([None, None, 0, rng.randint(1, 30)]) for _ in range(64)]
    asked = requests(64, seed=2)

    def run(i: int) -> str | None:
        stream = server.stream(asked[i][0], **asked[i][1])
        try:
            for event in stream.events() if cut_after[i] != 0 else ():
                if event["generated_text"] is not None:
                    return str(event["generated_text"])
                if cut_after[i] is not None and event["index"] >= cut_after[i]:
                    return None
            return None
        finally:
            stream.close()

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(run, range(64)))
    survivors = [i for i in range(64) if together[i] is not None]
    assert len(survivors) > 20 and all(i in survivors for i in range(64) if cut_after[i] is None)
    wait_until(lambda: idle(server), "all pages free again")
    for i in survivors:
        assert server.text(asked[i][0], **asked[i][1]) == together[i], asked[i]


def test_a_client_that_leaves_frees_its_pages_whether_it_streams_or_not(
    server: ServerProcess,
) -> None:
    for stream in (True, False):
        began = server.metric("onehead_generation_tokens_total")
        connection = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(
            {
                "inputs": "a",
                "parameters": {"max_new_tokens": 500, "ignore_eos": True},
                "stream": stream,
            }
        ).encode()
        head = (
            "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.metric("onehead_kv_pages_used") > 0, "the request runs")
        connection.close()
        wait_until(lambda: idle(server), "its pages are free")
        assert server.metric("onehead_generation_tokens_total") - began < 500
    assert 'onehead_requests_total{outcome="cancelled"}' in server.get("/metrics")[1]


def test_a_slow_reader_holds_nobody_up_and_gets_everything(server: ServerProcess) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}
    before = server.metric("onehead_generation_tokens_total")
    slow = server.stream("slow", **parameters)
    wait_until(
        lambda: server.metric("onehead_generation_tokens_total") >= before + 400,
        "the engine finishes although nobody reads",
    )
    assert server.text("quick", max_new_tokens=5, ignore_eos=True) is not None
    assert [event["index"] for event in slow.events()] == list(range(1, 401))


def test_streams_outlive_the_engine(server: ServerProcess) -> None:
    restarts = server.metric("onehead_engine_restarts_total")
    asked = requests(12, seed=3)
    expected = [
        server.text(prompt, **(parameters | {"max_new_tokens": 200}))
        for prompt, parameters in asked
    ]
    first_events = threading.Semaphore(0)

    def run(i: int) -> tuple[str, list[int]]:
        indexes = []
        for event in server.stream(asked[i][0], **(asked[i][1] | {"max_new_tokens": 200})).events():
            indexes.append(event["index"])
            first_events.release()
        return event["generated_text"], indexes

    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(run, i) for i in range(12)]
        for _ in range(60):
            first_events.acquire()
        engine = server.engine_pid
        kill(engine)
        for i, answer in enumerate(answers):
            text, indexes = answer.result()
            assert indexes == list(range(1, 201)) and text == expected[i]
    assert (
        server.metric("onehead_engine_restarts_total") == restarts + 1
        and server.engine_pid != engine
    )


def test_streams_outlive_the_holder_of_the_weights(server: ServerProcess) -> None:
    (holder,) = [child for child in children(server.process.pid) if children(child)]
    expected = server.text("held", max_new_tokens=200, ignore_eos=True)
    stream = server.stream("held", max_new_tokens=200, ignore_eos=True).events()
    next(stream)
    kill(holder)
    *_, last = stream
    assert last["generated_text"] == expected
    assert server.get("/ready")[0] == 200 and server.engine_pid


def kill_engines(server: ServerProcess) -> None:
    """Kills three ready engines in a row before they generate a token."""
    for number in range(3):
        wait_until(
            lambda restarts=number: server.metric("onehead_engine_restarts_total") == restarts,
            "the next one",
        )
        wait_until(lambda: server.get("/ready")[0] == 200, "ready")
        engine = server.engine_pid
        kill(engine)
        wait_until(lambda dead=engine: not alive(dead), "the engine is dead")


def test_sigterm_lets_streams_finish_and_refuses_newcomers(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder)
    stream = server.stream("a", max_new_tokens=400, ignore_eos=True).events()
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/ready")[0] == 503, "not ready while draining", timeout=5)
    assert server.post("/generate", {"inputs": "b"})[0] == 503
    assert [event["index"] for event in stream] == list(range(2, 401))
    assert server.stop() == 0


def test_a_second_signal_ends_streams_with_an_error(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder, "--engine.max_running", "1")
    started = server.stream("a", max_new_tokens=500, ignore_eos=True)
    events = started.events()
    next(events)
    queued = server.stream("b", max_new_tokens=500, ignore_eos=True)
    time.sleep(0.05)  # Long enough to be in the queue, not to be begun.
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/ready")[0] == 503, "not ready while draining", timeout=5)
    server.process.send_signal(signal.SIGINT)
    last = list(events)[-1]
    refused = queued.response()
    answer = json.loads(refused.body())
    queued.close()
    # One had begun and gets an event; the other can still have a status of its own.
    assert refused.status == 503 and last == answer
    assert last == {"error": "the server is shutting down", "error_type": "healthcheck"}
    assert server.stop() == 75


HALF = (
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: 100\r\n\r\n{"
)


@pytest.mark.parametrize("ending", ["drain deadline", "second signal", "engine keeps dying"])
def test_a_client_that_never_finishes_its_request_does_not_hold_up_the_end(
    tiny_folder: Path, ending: str
) -> None:
    server = ServerProcess(
        tiny_folder, "--server.drain_timeout", "1" if ending == "drain deadline" else "600"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(HALF)
        wait_until(lambda: server.get("/live")[0] == 200, "serving")
        if ending == "engine keeps dying":
            kill_engines(server)
        else:
            server.process.send_signal(signal.SIGTERM)
        if ending == "second signal":
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == (70 if ending == "engine keeps dying" else 0)
    said = server.process.communicate()[1]
    assert ("crashed 3 times in a row" in said) is (ending == "engine keeps dying"), said


def test_a_stop_string_is_found_however_its_tokens_fall(server: ServerProcess) -> None:
    whole = server.text("stop", max_new_tokens=60, ignore_eos=True)
    for start, length in itertools.product((0, 7, 20), (4, 7, 12)):
        stop = whole[start : start + length]
        assert (
            server.text("stop", max_new_tokens=60, ignore_eos=True, stop=[stop])
            == whole[: whole.index(stop) + len(stop)]
        )


def test_the_engine_ends_with_the_front(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder)
    engine = server.engine_pid
    kill(server.process.pid)
    server.process.communicate()
    wait_until(lambda: not alive(engine), "the engine is gone", timeout=5)


def serve(*arguments: str) -> tuple[int, str, float]:
    """Exit status, standard error and seconds of a server that should not start."""
    began = time.monotonic()
    command = [sys.executable, "-m", "commands.cli", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr, time.monotonic() - began


def test_the_plan_of_a_running_server_is_that_of_the_command(
    tiny_folder: Path, server: ServerProcess
) -> None:
    status, body = server.get("/plan")
    running = json.loads(body)
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "plan",
        str(tiny_folder),
        "--device",
        "cpu",
        "--memory",
        "2GB",
        "--format",
        "json",
    ]
    planned = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )
    assert status == 200 and running["parameters"] == planned["parameters"]
    assert running["weight_bytes"] == planned["weight_bytes"]["float32"]
    assert running["kv_bytes_per_token"] == planned["kv_bytes_per_token"]["float32"]
    assert [row["context"] for row in running["sequences"]] == [
        row["context"] for row in planned["sequences"]
    ]
    pages, page_size = running["cache"]["pages"], running["cache"]["page_size"]
    assert running["sequences"][-1]["fit"] == pages // -(
        -running["sequences"][-1]["context"] // page_size
    )
    assert (
        running["cache"]["bytes"]
        == pages * page_size * running["kv_bytes_per_token"]["multi_query"]
    )


def test_a_port_in_use_is_71_and_a_bad_checkpoint_78(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, error, _ = serve("--model", str(tiny_folder), "--port", port)
    assert status == 71 and port in error and "--port" in error
    status, error, _ = serve("--model", str(tmp_path), "--port", "0")
    assert status == 78 and "config.json: no such file" in error
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"multi_query": False}))
    status, error, _ = serve("--model", str(broken), "--port", "0")
    assert status == 78 and "multi_query" in error and "Traceback" not in error
    os.truncate(shutil.copytree(tiny_folder, tmp_path / "cut") / "model.safetensors", 5000)
    status, error, _ = serve("--model", str(tmp_path / "cut"), "--port", "0")
    assert (status == 78 or "its tensors at" in error) and "truncated" in error
    status, error, _ = serve(
        "--model", str(tiny_folder), "--port", "0", "--engine.max_context", "9999"
    )
    assert status == 78 and "engine.max_context 9999" in error


def test_generate_streams_to_the_terminal_without_a_server(
    tiny_folder: Path, server: ServerProcess
) -> None:
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "generate",
        "def f",
        "--model",
        str(tiny_folder),
        "--max_new_tokens",
        "12",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "def f" + server.text("def f", max_new_tokens=12) + "\n"


def test_late_arrivals_get_an_answer_for_a_while(tiny_folder: Path) -> None:
    """A load balancer notices a draining server with a delay: until then its requests are refused,
    not disconnected.
    """
    server = ServerProcess(tiny_folder, "--server.lb_grace", "1")
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/ready")[0] == 503, "not ready while draining", timeout=5)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": "a"}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 503 and answer["error"]["code"] == "server_shutting_down"
    assert response.headers["retry-after"] and response.headers["connection"] == "close"
    assert server.get("/live")[0] == 200
    server.process.communicate(timeout=20)
    assert server.process.returncode == 0 and time.monotonic() - began >= 1
