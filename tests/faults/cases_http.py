"""F18: more clients than there is room for, and clients that take their time."""

import contextlib
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from server.generation.admission import HELD_PER_FREE
from tests.faults.checker import LEAK
from tests.faults.clients import PATIENCE, Ask
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene
from tests.support.processes import wait_until
from tests.support.wire import Wire

CROWD, ROOM, QUEUE = 200, 4, 12
FILES = 128
MOST_LOG = 100_000
SHORT_HEADS = {"server.http.connection.HEAD_SECONDS": 1.0}
GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def check_refusal(what: str, headers: dict[str, str], body: bytes) -> None:
    """I12 for what is refused before it is a request."""
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} <= set(error), f"{what}: {body!r}"
    assert headers.get("x-request-id") and not LEAK.search(body.decode()), (
        f"{what}: {headers} {body!r}"
    )


def crowd(scene: Scene) -> None:
    """As many as one client may hold of what room there is finish; the others are told at once when
    to come again.
    """
    options = ("--engine.max_running", str(ROOM), "--server.max_waiting", str(QUEUE))
    scene.start(*options, rules=(Rule("pace", seconds=0.005),))
    with scene.watched():
        exchanges = scene.ask_all(scene.asks(CROWD, 40))
        scene.outcomes()
    refused = [exchange for exchange in exchanges if exchange.status == 429]
    finished = [exchange for exchange in exchanges if exchange.finished]
    assert (
        len(refused) + len(finished) == CROWD
        and len(finished) >= (ROOM + QUEUE) * HELD_PER_FREE // (HELD_PER_FREE + 1)
        and refused
    )
    text = f"{len(refused)} of {CROWD} refused"
    assert scene.server.metric("onehead_requests_total") == CROWD, text
    scene.canary()


def many_tokens_wait(scene: Scene) -> None:
    """The queue has a bound in tokens too."""
    rules = (Rule("pace", seconds=0.01),)
    scene.start(
        "--engine.max_running",
        "1",
        rules=rules,
        constants={"server.generation.admission.MAX_WAITING_TOKENS": 500},
    )
    exchanges = []
    for ask in scene.asks(12, 20, stream=True):
        long = Ask(ask.prompt + "x" * 150, 20, ask.parameters, ask.dialect, canary=ask.canary)
        exchanges.append(scene.ask(long))
        time.sleep(0.03)
    scene.outcomes()
    assert {exchange.status for exchange in exchanges} == {200, 429}
    assert all(exchange.finished for exchange in exchanges if exchange.status == 200)


@contextlib.contextmanager
def silent_connections(scene: Scene, count: int) -> Iterator[None]:
    """So many that say nothing."""
    scene.history.act("connect", count=count)
    with contextlib.ExitStack() as connections:
        for _ in range(count):
            connections.enter_context(
                socket.create_connection(("127.0.0.1", scene.server.port), timeout=PATIENCE)
            )
        yield


def too_many_connections(scene: Scene) -> None:
    """Requests are served again once the silent connections have been closed."""
    scene.start("--server.max_connections", "32", constants=SHORT_HEADS)
    streaming = scene.ask_all(scene.asks(4, 100, stream=True))
    for exchange in streaming:
        exchange.reach(1)
    with silent_connections(scene, 100):
        scene.all_finished()
        time.sleep(2.0)
        scene.canary()


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def more_connections_than_files(scene: Scene) -> None:
    """What is open already goes on, and an engine that dies meanwhile is replaced: that takes files
    too. The log stays a log.
    """
    scene.traces = True
    scene.start(rules=(Rule("pace", seconds=0.01),), constants=SHORT_HEADS, prepare=few_files)
    streaming = scene.ask_all(scene.asks(4, 100, stream=True))
    for exchange in streaming:
        exchange.reach(1)
    with silent_connections(scene, FILES * 3):
        scene.kill_engine()
        scene.all_finished()
    wait_until(lambda: answers(scene), "new connections are served again", 10.0)
    scene.canary()
    assert len(scene.server.log) < MOST_LOG, f"{len(scene.server.log)} bytes of log"


def answers(scene: Scene) -> bool:
    with contextlib.suppress(OSError):
        return scene.server.is_ready
    return False


def drip(scene: Scene, data: bytes, what: str) -> None:
    """One byte after the other, never to the end: 408 when the time is up, though the last byte was
    just now.
    """
    scene.history.act("drip", what=what)
    began = time.monotonic()
    over = threading.Event()

    def feed(connection: socket.socket) -> None:
        for byte in data:
            if over.wait(0.1):
                return
            with contextlib.suppress(OSError):
                connection.sendall(bytes([byte]))

    with socket.create_connection(("127.0.0.1", scene.server.port), timeout=PATIENCE) as connection:
        feeder = threading.Thread(target=feed, args=(connection,))
        feeder.start()
        try:
            response = Wire(connection).response()
            body = response.body()
        except (EOFError, ConnectionError):
            raise AssertionError(f"{what}: closed without an answer") from None
        finally:
            over.set()
            feeder.join()
        assert response.status == 408 and 0.9 < time.monotonic() - began < 3.0, (
            f"{what}: {response.status} {body!r}"
        )
        check_refusal(what, dict(response.headers), body)


def slow_requests(scene: Scene) -> None:
    scene.start(constants=SHORT_HEADS | {"server.http.connection.BODY_SECONDS": 1.0})
    drip(scene, GET[:-2] + b"a" * 200, "a slow head")
    connection_head = POST + b"content-length: 300\r\n\r\n"
    half_sent(scene, connection_head)
    assert not re.search(r"\b5\d\d\b [\d.]+ ms", scene.server.log), scene.server.log
    scene.canary()


def half_sent(scene: Scene, head: bytes) -> None:
    """The head at once, the body in drops."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", scene.server.port), timeout=PATIENCE) as connection:
        connection.sendall(head)
        while time.monotonic() - began < 0.8:
            connection.sendall(b" ")
            time.sleep(0.1)
        response = Wire(connection).response()
        body = response.body()
    assert response.status == 408 and time.monotonic() - began < 3.0, (
        f"a slow body: {response.status} {body!r}"
    )
    check_refusal("a slow body", dict(response.headers), body)


CASES = [
    Case("F18", "a crowd at a full queue", crowd),
    Case("F18", "a queue full of tokens", many_tokens_wait),
    Case("F18", "idle connections beyond the limit", too_many_connections),
    Case("F18", "more connections than files", more_connections_than_files),
    Case("F18", "a slow head and a slow body", slow_requests),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
