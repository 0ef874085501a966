"""Real `onehead serve` processes for tests, and a plain HTTP client that can misbehave on purpose."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE = 60.0


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
    """`onehead serve` on a free port, ready."""

    def __init__(self, folder: Path, *arguments: str, launcher: tuple[str, ...] = ("commands.cli",)) -> None:
        # Nobody balances between the servers of a test: one that is told to go has nobody to wait for.
        grace = [] if "--server.lb_grace" in arguments else ["--server.lb_grace", "0"]
        command = [sys.executable, "-m", *launcher, "serve", "--model", str(folder), "--port", "0", *grace, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        port = served_port(line)
        if port is None:
            self.process.kill()
            raise AssertionError(f"did not start: {self.process.communicate()}")
        self.first_line, self.port = line, port

    @property
    def engine_pid(self) -> int:
        (pid,) = wait_until(lambda: children(self.process.pid), "an engine process")
        return int(pid)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def text(self, prompt: str, **parameters: Any) -> str:
        status, body = self.post("/generate", {"inputs": prompt, "parameters": parameters})
        assert status == 200, body
        return str(body["generated_text"])

    def stream(self, prompt: str, path: str = "/generate", **parameters: Any) -> "Stream":
        return Stream(self.port, path, {"inputs": prompt, "parameters": parameters, "stream": True})

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        with contextlib.suppress(ValueError):
            self.process.communicate(timeout=DEADLINE)
        return self.process.wait(timeout=DEADLINE)


class Stream:
    """One SSE request over a raw socket, read as slowly as the test likes."""

    def __init__(self, port: int, path: str, body: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)
        self.response = http.client.HTTPResponse(self.socket)

    def events(self) -> Iterator[Any]:
        """Parses strictly: `data: ` lines, each closed by an empty line, nothing else."""
        with contextlib.closing(self):
            self.response.begin()
            assert self.response.status == 200, self.response.read()
            assert self.response.headers["content-type"].startswith("text/event-stream")
            while line := self.response.readline():
                assert line.startswith(b"data: ") and line.endswith(b"\n"), line
                assert self.response.readline() == b"\n"
                yield json.loads(line[len(b"data: ") :])

    def close(self) -> None:
        self.response.close()
        self.socket.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
