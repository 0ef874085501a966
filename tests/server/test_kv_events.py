"""KV events of a real server: a subscriber in a process of its own has the engine's blocks under
load and after the engine is replaced.
"""

import json
import threading
from pathlib import Path
from typing import Any

from tests.support.kv_subscriber import Subscriber
from tests.support.paths import ROOT
from tests.support.processes import ServerProcess, kill, wait_until
from tests.trials.recorded_corpus import free_port

TOPIC = "kv@127.0.0.1@pretrained"
MOMENTS, MOST_MOMENTS = 40, 1000
"""Moments that are compared at least, and at most until enough has happened."""


def load(server: ServerProcess, number: int, stop: threading.Event) -> None:
    """Sends one request after the other, most of which begin with the same text."""
    while not stop.is_set():
        for length in (20, 150, 60):
            prompt = (
                "def area(width, height):\n    return width * height\n" * (1 + number % 3)
                + f"# {number}"
            )
            server.post(
                "/v1/completions",
                {"prompt": prompt, "max_tokens": length, "seed": number, "ignore_eos": True},
            )


def dump_of(server: ServerProcess) -> dict[str, Any]:
    status, body = server.get("/monitor/cache")
    assert status == 200, body
    return dict(json.loads(body))


def test_a_subscriber_has_the_blocks_of_the_engine() -> None:
    """One that loses three of ten messages."""
    address, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = (
        "--server.kv_events",
        address,
        "--server.kv_events_replay",
        replay,
        "--server.kv_events_topic",
        TOPIC,
    )
    stop = threading.Event()
    with (
        ServerProcess(None, "--cache.pages", "16", *options, stderr=None) as server,
        Subscriber(address, replay, TOPIC, 0.3) as subscriber,
    ):
        clients = [
            threading.Thread(target=load, args=(server, number, stop)) for number in range(6)
        ]
        for client in clients:
            client.start()
        try:
            for moment in range(MOST_MOMENTS):
                if moment == MOMENTS // 2:
                    kill(server.engine_pid)
                    wait_until(
                        lambda: server.get("/ready")[0] == 503, "the end of the engine is noticed"
                    )
                    wait_until(lambda: server.get("/ready")[0] == 200, "a new engine")
                assert subscriber.problems(dump_of(server)) == []
                if moment > MOMENTS and subscriber.seen["BlockRemoved"] > 20:
                    break
        finally:
            stop.set()
            for client in clients:
                client.join()
        assert subscriber.problems(dump_of(server)) == []
        assert (
            subscriber.seen["AllBlocksCleared"] >= 2
            and min(subscriber.seen[kind] for kind in ("BlockStored", "BlockRemoved")) > 20
        )
        assert subscriber.seen["gaps"] > 0


def test_without_the_library_the_server_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq')")
    server = ServerProcess(
        None,
        "--server.kv_events",
        "tcp://127.0.0.1:1",
        environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        wait=False,
    )
    _, error = server.process.communicate(timeout=120)
    assert server.process.returncode == 78 and "pip install 'onehead[events]'" in error
