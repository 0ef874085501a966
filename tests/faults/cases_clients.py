"""F15-F17, F24 and F28: clients that leave, vanish, dawdle, repeat themselves, or send what takes
for ever to tokenize.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import threading
import time

import pytest

from tests.faults.clients import Ask, Exchange
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene
from tests.support.processes import wait_until
from tests.support.wire import Wire, abort

FREED_SECONDS = 2.0
"""One, on a machine that does nothing else."""
STUCK, MARKED = "STUCK", "MARKED"
LONG = 400
CHOICES = 8
SHORT_WRITES = {"server.http.connection.WRITE_SECONDS": 1.0}
CLONE_NEWNET, SET_FLAGS, UP = 0x40000000, 0x8914, 1
MORE_BYTES = 48 * 2**20


class Client:
    """A connection that sends what it is told to and leaves as it is told to."""

    def __init__(self, scene: Scene, data: bytes, window: int | None = None) -> None:
        self.socket = scene.resources.enter_context(socket.socket())
        if window is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", scene.server.port))
        scene.history.act("send", bytes=data[:2000].decode("latin-1"))
        self.socket.sendall(data)

    def leave(self, scene: Scene, reset: bool) -> None:
        scene.history.act("leave", reset=reset)
        abort(self.socket) if reset else self.socket.close()


def outcome(scene: Scene, name: str) -> float:
    """How many requests have ended so."""
    line = f'onehead_requests_total{{outcome="{name}"}}'
    return sum(
        float(text.rsplit(" ", 1)[1])
        for text in scene.server.get("/metrics")[1].splitlines()
        if text.startswith(line)
    )


def freed(scene: Scene, what: str) -> None:
    wait_until(scene.idle, f"everything is free again after {what}", FREED_SECONDS)


def before_it_is_whole(scene: Scene, data: bytes, reset: bool, what: str) -> None:
    """Nothing has reached the engine."""
    prompts = scene.server.metric("onehead_prompt_tokens_total")
    client = Client(scene, data)
    time.sleep(0.1)
    client.leave(scene, reset)
    freed(scene, what)
    assert scene.server.metric("onehead_prompt_tokens_total") == prompts


def while_it_waits(scene: Scene, request: bytes, reset: bool, what: str) -> None:
    blocker = scene.ask(Ask("blocker", 80)).reach(1)
    client = Client(scene, request)
    wait_until(lambda: scene.server.metric("onehead_requests_waiting") == 1, what)
    client.leave(scene, reset)
    wait_until(
        lambda: scene.server.metric("onehead_requests_waiting") == 0,
        f"the queue is empty after {what}",
        FREED_SECONDS,
    )
    assert not blocker.data or blocker.join().finished


def while_it_is_computed(scene: Scene, request: bytes, reset: bool, what: str) -> None:
    tokens = scene.server.metric("onehead_generation_tokens_total")
    cancelled = outcome(scene, "cancelled")
    client = Client(scene, request)
    wait_until(lambda: scene.server.metric("onehead_kv_pages_used") > 0, what)
    client.leave(scene, reset)
    freed(scene, what)
    assert (
        scene.server.metric("onehead_generation_tokens_total") - tokens < LONG
        and outcome(scene, "cancelled") == cancelled + 1
    )


def disconnects(scene: Scene, reset: bool) -> None:
    """At every place of a request's life, streamed and whole; nothing of it counts as a failure of
    ours.
    """
    rules = (Rule("pace", seconds=0.01), Rule("nan_logits", marker=MARKED, after=4))
    scene.start(
        "--engine.max_running",
        "1",
        "--engine.step_tokens",
        "16",
        "--server.log_format",
        "json",
        rules=rules,
    )
    for stream in (True, False):
        request, long = (Ask(prompt, LONG, stream=stream).bytes for prompt in ("leaves", "x" * 80))
        before_it_is_whole(scene, request[:30], reset, "half a head")
        before_it_is_whole(scene, request[:-20], reset, "half a body")
        while_it_waits(scene, request, reset, "it waits")
        while_it_is_computed(scene, long, reset, "its prompt is computed")
    for leave_after, prompt, what in (
        (0, "leaves", "the head"),
        (5, "leaves", "five tokens"),
        (20, "leaves", "the last token"),
    ):
        scene.ask(Ask(prompt, 20), leave_after=leave_after, reset=reset).join()
        freed(scene, what)
    assert outcome(scene, "failed") == 0
    scene.ask(Ask(MARKED, 20), leave_after=5, reset=reset).join()  # The fifth is the error.
    freed(scene, "its error")
    scene.canary()
    statuses = [
        json.loads(line).get("status")
        for line in scene.server.log.splitlines()
        if line.startswith("{")
    ]
    assert any(statuses) and not [
        status for status in statuses if status is not None and status >= 500
    ], statuses


def half_close(scene: Scene) -> None:
    """A client that closes its sending half is a client that has gone: documented, and so it is."""
    scene.start(rules=(Rule("pace", seconds=0.01),))
    client = Client(scene, Ask("half", LONG).bytes)
    wait_until(lambda: scene.server.metric("onehead_kv_pages_used") > 0, "it runs")
    scene.history.act("half-close")
    client.socket.shutdown(socket.SHUT_WR)
    freed(scene, "a half-close")
    got = b"".join(iter(lambda: client.socket.recv(65536), b""))
    client.socket.close()
    assert b'"length"' not in got and outcome(scene, "cancelled") == 1


def loopback(up: bool) -> None:
    """Takes the thread's own loopback device up or down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", UP if up else 0))


def vanishes(scene: Scene) -> None:
    """A peer that is there no more and says nothing of it: its packets are lost, in a network of
    their own.
    """
    failed: list[BaseException] = []

    def alone() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
                pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
            loopback(True)
            _vanish(scene)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _vanish(scene: Scene) -> None:
    scene.start(
        "--server.keep_alive", "0.3", rules=(Rule("pace", seconds=0.02),), constants=SHORT_WRITES
    )
    client = Client(scene, Ask("vanishes", LONG).bytes)
    wait_until(lambda: scene.server.metric("onehead_generation_tokens_total") > 3, "it runs")
    scene.history.act("lose packets")
    loopback(False)
    time.sleep(3.0)
    loopback(True)
    scene.history.act("lose no more")
    assert scene.idle() and outcome(scene, "cancelled") == 1
    client.socket.close()
    scene.end()


def resident_bytes(scene: Scene) -> int:
    with open(f"/proc/{scene.server.process.pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def much(prompt: str) -> Ask:
    """A request whose answer has megabytes."""
    return Ask(prompt, LONG, {"logprobs": 5}, "openai", extra={"n": CHOICES})


def reader_stops(scene: Scene) -> None:
    """It reads nothing any more, and is dropped; other requests do not wait for it."""
    scene.start(rules=(Rule("pace", seconds=0.005),), constants=SHORT_WRITES)
    bytes_before = resident_bytes(scene)
    client = Client(scene, much("stops").bytes, window=4096)
    client.socket.recv(1000)
    scene.history.act("stop reading")
    alone, beside = timed(scene, "a"), timed(scene, "b")
    wait_until(lambda: outcome(scene, "cancelled") == CHOICES, "it is dropped", 5.0)
    freed(scene, "a reader that stopped")
    client.socket.close()
    assert resident_bytes(scene) - bytes_before < MORE_BYTES and max(alone, beside) < 5.0


def timed(scene: Scene, prompt: str) -> float:
    began = time.monotonic()
    assert scene.ask(Ask(prompt, 20)).join().finished
    return time.monotonic() - began


def slow_reader(scene: Scene) -> None:
    """It takes a little all the time, far less than there is: it gets everything, and the engine
    has long been done.
    """
    scene.start("--engine.max_running", "32", constants=SHORT_WRITES)
    bytes_before = resident_bytes(scene)
    client = Client(scene, much("slow").bytes, window=4096)
    response = Wire(client.socket).response()
    assert response.status == 200
    got = []
    for number, event in enumerate(response.events()):
        if number % 64 == 0:
            time.sleep(0.005)
        if event.data is not None:
            got.append(event.data)
    client.socket.close()
    finishes = [data for data in got if '"finish_reason":"length"' in data.replace(" ", "")]
    assert got[-1] == "[DONE]" and len(finishes) == CHOICES
    assert resident_bytes(scene) - bytes_before < MORE_BYTES


def resets_by_a_proxy(scene: Scene) -> None:
    """In the middle of a body, in the middle of an answer; then the proxy tries again, as proxies
    do.
    """
    scene.start(rules=(Rule("pace", seconds=0.005),))
    request = Ask("proxied", 60)
    before_it_is_whole(scene, request.bytes[:-30], True, "a reset in the body")
    scene.ask(request, leave_after=10, reset=True).join()
    freed(scene, "a reset in the answer")
    assert scene.ask(request).join().finished


def resumed(scene: Scene) -> None:
    """Connections of resumable streams are reset every few events, and the engine is killed under
    them: nothing is lost or told twice.
    """
    scene.start("--server.detach_grace", "10", rules=(Rule("pace", seconds=0.005),))
    resumable = scene.asks(8, 60, stream=True, extra={"resumable": True})
    exchanges = [
        scene.ask(ask, leave_after=scene.rng.randint(3, 12), reset=True, resumes=True)
        for ask in resumable
    ]
    exchanges[0].reach(10)
    scene.kill_engine()
    scene.all_finished()
    assert scene.server.restarts == 1 and len(scene.history.of("resume")) > len(exchanges)


def same_key_twice(scene: Scene) -> None:
    """A POST that a proxy repeats while the first still runs is computed once."""
    scene.start(rules=(Rule("pace", seconds=0.01),))
    key = {"idempotency-key": "a0b1c2"}
    for dialect in ("tgi", "openai"):
        first = scene.ask(Ask(f"once {dialect}", 30, dialect=dialect, headers=key)).reach(2)
        again = scene.ask(first.ask).join()
        other = scene.ask(Ask("another key", 10, headers={"idempotency-key": "d3e4f5"})).join()
        assert again.status == 409 and again.error is not None and other.finished
        assert first.join().finished
        assert scene.ask(first.ask).join().finished, "the first is over, so the key is free again"
    assert outcome(scene, "length") == 6


def tokenizer_stuck(scene: Scene) -> None:
    """More of them than there can be workers; everybody else is served meanwhile, short prompts and
    long ones. Those that have not had their turn after some seconds are refused as overload.
    """
    rules = (Rule("tokenizer_hangs", marker=STUCK, seconds=10**6),)
    scene.start(rules=rules, constants={"server.text.jobs.Job.max_seconds": 1.0})
    with scene.watched() as watch:
        stuck = [
            Ask(f"{STUCK} {i} " + "x" * 5000, 5, dialect=("tgi", "openai")[i % 2], stream=i % 4 < 2)
            for i in range(12)
        ]
        waiting = scene.ask_all(stuck)
        sound = scene.ask_all(scene.asks(8, 20))
        long = scene.ask_all(
            [Ask("y" * 5000, 20, {"truncate": 50}, dialect="tgi") for _ in range(4)]
        )
        assert all(exchange.join().finished for exchange in sound)
        for exchange in waiting:
            _timed_out(exchange.join())
        assert all(exchange.join().finished for exchange in long)
    assert watch.slowest < 1.0, f"/live took {watch.slowest:.2f} s"


def _timed_out(exchange: Exchange) -> None:
    tgi = exchange.ask.dialect == "tgi"
    if exchange.status == 429:
        return
    assert exchange.status == (422 if tgi else 400), f"{exchange.status} {exchange.error}"
    assert tgi or exchange.code == "tokenization_timeout"


CASES = [
    Case("F15", "clients leave by FIN", disconnects, (False,)),
    Case("F15", "clients leave by RST", disconnects, (True,)),
    Case("F16", "half-close", half_close),
    Case("F16", "the peer vanishes", vanishes),
    Case("F17", "a reader stops", reader_stops),
    Case("F17", "a slow reader", slow_reader),
    Case("F24", "a proxy resets", resets_by_a_proxy),
    Case("F24", "a proxy resets what can be resumed", resumed),
    Case("F24", "the same Idempotency-Key twice", same_key_twice),
    Case("F28", "the tokenizer is stuck", tokenizer_stuck),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
