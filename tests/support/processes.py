"""Real `onehead serve` processes for tests, and a plain HTTP client that can misbehave on
purpose.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from tests.support import constants as other_constants
from tests.support.paths import ROOT
from tests.support.wire import Event, Response, Wire, exchange, http_request

DEADLINE = 60.0
START_SECONDS = 120.0
LB_GRACE = "5"
"""The default of server.lb_grace."""


def wait_until(condition: Any, what: str, timeout: float = DEADLINE) -> Any:
    """The first true value of `condition()`. Fails with `what` if there is none in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout} s: {what}")


def children(pid: int) -> list[int]:
    """Child processes of a process, from /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # A thread that has ended meanwhile.
            found += [int(child) for child in task.read_text().split()]
    return found


def engines(pid: int) -> list[int]:
    """Engine processes of a server: what was forked from those among its children that hold the
    weights, or these themselves. Its other children are copies of it, or load its checkpoint.
    """
    others = command_line(pid), b""
    holders = [
        child
        for child in children(pid)
        if (line := command_line(child)) not in others and b"server.text." not in line
    ]
    return forked(holders)


def forked(holders: list[int]) -> list[int]:
    """The engines that these processes have forked. One that has never forked any loads an engine,
    or is one.
    """
    engines = [engine for holder in holders for engine in children(holder) or [holder]]
    return [engine for engine in engines if alive(engine)]


def command_line(pid: int) -> bytes:
    """The arguments of a process, empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def served_port(line: str) -> int | None:
    """The port in the line that a server prints when it is ready, as text or as JSON."""
    found = re.search(r"onehead serves .*:(\d+)\b", line)
    return int(found[1]) if found else None


class ServerProcess:
    """`onehead serve` as a process of its own, ready unless `wait` is False.

    `model` None serves the default checkpoint. `launcher` is the command's module and the arguments
    before `serve`; `environment` is added to this process's. `constants`: other values of named
    constants (tests.support.constants). Standard error goes to a pipe, or to what `stderr` names as
    subprocess.Popen takes it.
    """

    def __init__(
        self,
        model: Path | None,
        *arguments: str,
        launcher: tuple[str, ...] = ("commands.cli",),
        constants: dict[str, float] | None = None,
        port: int = 0,
        stderr: Any = subprocess.PIPE,
        environment: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> None:
        named = () if model is None else ("--model", str(model))
        # No load balancer knows these servers: a shutdown need not wait for one to notice.
        grace = () if "--server.lb_grace" in arguments else ("--server.lb_grace", "0")
        if constants:
            launcher = other_constants.launcher(constants, *launcher)
        self.command = [
            sys.executable,
            "-m",
            *launcher,
            "serve",
            *named,
            "--port",
            str(port),
            *grace,
            *arguments,
        ]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # `prepare` may change the working directory; the modules of this tree are still found.
            env=os.environ | {"PYTHONPATH": paths} | (environment or {}),
            cwd=ROOT,
            preexec_fn=prepare,
        )
        self.port, self.first_line = port, ""
        if wait:
            self.wait_started()

    def wait_started(self) -> None:
        """Waits for the line that names the port. Raises AssertionError where none comes within
        START_SECONDS.
        """
        assert self.process.stdout is not None
        guard = threading.Timer(START_SECONDS, self.process.kill)
        guard.start()
        self.first_line = self.process.stdout.readline()
        guard.cancel()
        port = served_port(self.first_line)
        if port is None:
            self.process.kill()
            raise AssertionError(
                f"did not start: {' '.join(self.command)}: {self.process.communicate()}"
            )
        self.port = port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def engine_pid(self) -> int:
        (pid,) = wait_until(lambda: engines(self.process.pid), "an engine process")
        return int(pid)

    def get(self, path: str) -> tuple[int, str]:
        response, body = exchange(self.port, http_request("GET", path), DEADLINE)
        return response.status, body.decode()

    def post(self, path: str, body: Any, timeout: float = DEADLINE) -> tuple[int, Any]:
        response, answer = exchange(self.port, http_request("POST", path, body), timeout)
        return response.status, json.loads(answer)

    def text(self, prompt: str, **parameters: Any) -> str:
        status, body = self.post("/generate", {"inputs": prompt, "parameters": parameters})
        assert status == 200, body
        return str(body["generated_text"])

    def stream(self, prompt: str, path: str = "/generate", **parameters: Any) -> "Stream":
        return Stream(self.port, path, {"inputs": prompt, "parameters": parameters, "stream": True})

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return metric_sums(self.get("/metrics")[1]).get(name, 0.0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        with contextlib.suppress(ValueError):
            self.process.communicate(timeout=DEADLINE)
        return self.process.wait(timeout=DEADLINE)


def metric_sums(exposition: str) -> dict[str, float]:
    """Of Prometheus' text format, the sum of each name's samples."""
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


class Stream:
    """One SSE request on a connection of its own, whose answer is read as slowly as the test
    likes.
    """

    def __init__(
        self, port: int, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self.socket.sendall(http_request("POST", path, body, headers))

    def response(self) -> Response:
        """To be read once."""
        return Wire(self.socket).response()

    def events(self) -> Iterator[Any]:
        """The JSON of every event; an event that has more than data fails."""
        with contextlib.closing(self):
            response = self.response()
            assert response.status == 200, response.body()
            assert (response.header("content-type") or "").startswith("text/event-stream")
            for event in response.events():
                assert event == Event(event.data), event
                yield json.loads(event.data or "")

    def close(self) -> None:
        self.socket.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
