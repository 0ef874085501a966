"""F14, F19, F20 and F26: the process and its surroundings: log files, the clock, signals, its own
end.
"""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.faults.clients import Exchange
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene, command_line
from tests.support.processes import alive, wait_until

SET_PIPE_SIZE, SMALLEST_PIPE = 1031, 4096
GONE_SECONDS = 0.5
PACE = Rule("pace", seconds=0.01)
SLOWLY = Rule("pace", seconds=0.04)
LINES = 150


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    """Every write fails: no space left."""
    file = os.open("/dev/full", os.O_WRONLY)
    yield file
    os.close(file)


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@contextlib.contextmanager
def stuck_pipe() -> Iterator[int]:
    """A pipe without a reader: when it is full, a write blocks for ever."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, SET_PIPE_SIZE, SMALLEST_PIPE)
    yield writing
    os.close(writing)
    os.close(reading)


def close_stderr() -> None:
    os.close(2)


def log_goes_nowhere(scene: Scene, where: object, counted: bool) -> None:
    """Requests are answered as ever, an engine is replaced as ever; what is lost of the log is
    counted.
    """
    with where() if callable(where) else contextlib.nullcontext() as stderr:
        prepare = close_stderr if stderr is None else None
        scene.start("--server.log_level", "debug", stderr=stderr, prepare=prepare, rules=(PACE,))
        with scene.watched():
            exchanges = scene.ask_all(scene.asks(16, 60))
            exchanges[0].reach(5)
            for _ in range(LINES):
                assert scene.server.get("/live")[0] == 200
            scene.kill_engine()
            scene.all_finished()
        if counted:
            wait_until(
                lambda: scene.server.metric("onehead_log_lines_dropped_total") > 0,
                "what is lost is counted",
            )
        scene.end()


def clock_jumps(scene: Scene) -> None:
    """By up to an hour, either way, at every look at it, in the engine too: no deadline comes
    sooner or later for it.
    """
    options = ("--server.keep_alive", "0.5", "--server.stall_after", "3")
    constants = {"server.http.connection.HEAD_SECONDS": 5}
    scene.start(*options, rules=(Rule("time_jumps"), PACE), constants=constants)
    exchanges = scene.ask_all(scene.asks(16, 50, extra={"timeout_s": 60.0}))
    with scene.watched():
        exchanges[0].reach(10)
        scene.kill_engine()
        scene.all_finished()
        engine = scene.server.engine_pid
        scene.strike(engine, signal.SIGSTOP, "stop engine")
        wait_until(lambda: not alive(engine), "the stopped engine is killed", 5.0)
        scene.canary()
    assert scene.server.restarts == 2
    for name in ("e2e_latency", "time_to_first_token", "queue_time", "engine_recovery"):
        seconds = scene.server.metric(f"onehead_{name}_seconds_sum")
        assert 0 <= seconds < 16 * 60, f"{name}: {seconds} s"


def running(
    scene: Scene, *options: str, max_new_tokens: int = 60, pace: Rule = PACE
) -> list[Exchange]:
    """Streams under way, and some in the queue."""
    scene.start("--engine.max_running", "8", "--server.lb_grace", "1.0", *options, rules=(pace,))
    started = scene.ask_all(scene.asks(8, max_new_tokens, stream=True))
    for exchange in started:
        exchange.reach(5)
    queued = scene.ask_all(scene.asks(4, max_new_tokens, stream=True))
    wait_until(lambda: scene.server.metric("onehead_requests_waiting") >= 4, "the queue")
    return started + queued


def send(scene: Scene, number: int) -> float:
    return scene.strike(scene.server.process.pid, number, signal.Signals(number).name)


def drains(scene: Scene, number: int) -> None:
    """Everything that was accepted is finished; new requests get 503; exit status 0."""
    running(scene)
    send(scene, number)
    wait_until(lambda: scene.server.get("/ready")[0] == 503, "not ready while it drains", 5.0)
    assert scene.server.get("/live")[0] == 200
    late = scene.ask_all(scene.asks(4, 10))
    for exchange in late:
        assert exchange.join().status == 503 and exchange.headers.get("connection") == "close"
    status = scene.server.process.wait(30)
    assert all(exchange.join().finished for exchange in scene.exchanges if exchange not in late)
    scene.ended(status, 0)


def reads_keys_again(scene: Scene) -> None:
    """SIGHUP ends and refuses nothing."""
    exchanges = running(scene)
    send(scene, signal.SIGHUP)
    wait_until(lambda: "SIGHUP" in scene.server.log, "the signal is handled")
    assert scene.server.get("/ready")[0] == 200
    scene.all_finished()
    assert all(exchange.join().finished for exchange in exchanges)
    scene.canary()


def listens_for_a_while(scene: Scene) -> None:
    """With nothing to do it still answers for lb_grace, so that a balancer that has not noticed yet
    gets an answer.
    """
    scene.start("--server.lb_grace", "1.5")
    sent = send(scene, signal.SIGTERM)
    while time.monotonic() - sent < 1.2:
        (late,) = scene.ask_all(scene.asks(1, 5))
        assert late.join().status == 503
        time.sleep(0.2)
    scene.ended(scene.server.process.wait(10), 0)
    assert time.monotonic() - sent >= 1.5


def two_signals(scene: Scene) -> None:
    """The second does not wait: every stream ends with an error, none is merely cut off."""
    exchanges = running(scene, max_new_tokens=400, pace=SLOWLY)
    send(scene, signal.SIGTERM)
    wait_until(lambda: scene.server.get("/ready")[0] == 503, "not ready while it drains", 5.0)
    sent = send(scene, signal.SIGTERM)
    scene.outcomes()
    assert all(exchange.error is not None for exchange in exchanges)
    scene.ended(scene.server.process.wait(10), 75)
    assert time.monotonic() - sent < 4.0


def engine_dies_while_draining(scene: Scene) -> None:
    """It is replaced all the same, because what was accepted is finished."""
    running(scene)
    send(scene, signal.SIGTERM)
    wait_until(lambda: scene.server.get("/ready")[0] == 503, "not ready while it drains", 5.0)
    scene.kill_engine()
    scene.all_finished()
    scene.ended(scene.server.process.wait(10), 0)


def leaves_while_loading(scene: Scene) -> None:
    """No request has been accepted yet."""
    scene.start(
        "--server.lb_grace", "0", rules=(Rule("slow_load", seconds=20.0, times=1),), wait=False
    )
    wait_until(lambda: scene.server.files.joinpath("rule-0").exists(), "it is loading")
    sent = send(scene, signal.SIGTERM)
    scene.ended(scene.server.process.wait(15), 0)
    assert time.monotonic() - sent < 8.0


def drain_deadline(scene: Scene) -> None:
    exchanges = running(scene, "--server.drain_timeout", "1.0", max_new_tokens=400, pace=SLOWLY)
    sent = send(scene, signal.SIGTERM)
    scene.outcomes()
    assert all(exchange.error is not None for exchange in exchanges)
    scene.ended(scene.server.process.wait(10), 75)
    assert 1.0 <= time.monotonic() - sent < 5.0


def kill_front(scene: Scene, moment: str) -> None:
    """The engine does not outlive it, and another server takes over the port."""
    port = free_port()
    slow_load, hang = Rule("slow_load", seconds=20.0, times=1), Rule("hang", times=1)
    rules = {"import": (), "load": (slow_load,), "prefill": (hang,)}.get(moment, (PACE,))
    scene.start(rules=rules, port=port, wait=moment not in ("import", "load"))
    if moment not in ("import", "load"):
        scene.canary() if moment == "idle" else scene.ask_all(scene.asks(4, 200, stream=True))
    if moment == "decode":
        scene.exchanges[0].reach(10)
    if moment in ("load", "prefill"):
        wait_until(lambda: scene.server.files.joinpath("rule-0").exists(), "it is at it")
    engine = scene.server.engine_pid
    scene.strike(scene.server.process.pid, signal.SIGKILL, "kill front")
    wait_until(lambda: not alive(engine), "the engine is gone", GONE_SECONDS)
    scene.ended(scene.server.stop(), -signal.SIGKILL)
    scene.outcomes()
    if moment == "decode":
        scene.start(port=port)
        scene.canary()
    assert b"faulty_worker" not in command_line(engine)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


CASES = [
    Case("F14", "full disk", log_goes_nowhere, (full_disk, True)),
    Case("F14", "broken pipe", log_goes_nowhere, (broken_pipe, True)),
    Case("F14", "a pipe that nobody reads", log_goes_nowhere, (stuck_pipe, False)),
    Case("F14", "no standard error", log_goes_nowhere, (None, True)),
    Case("F19", "the clock jumps", clock_jumps),
    Case("F20", "SIGTERM under streams", drains, (signal.SIGTERM,)),
    Case("F20", "SIGINT under streams", drains, (signal.SIGINT,)),
    Case("F20", "SIGHUP under streams", reads_keys_again),
    Case("F20", "SIGTERM when idle", listens_for_a_while),
    Case("F20", "a second signal", two_signals),
    Case("F20", "the drain deadline", drain_deadline),
    Case("F20", "the engine dies meanwhile", engine_dies_while_draining),
    Case("F20", "SIGTERM while loading", leaves_while_loading),
    *(
        Case("F26", f"kill the front at {moment}", kill_front, (moment,))
        for moment in ("import", "load", "prefill", "decode", "idle")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
