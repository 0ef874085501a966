"""A Ray cluster of this machine alone, with `serve run deploy.ray.app:app` in it, as the guide has
it.

Invariant: every process that it starts is a descendant of its own, and has ended when `stop`
returns. It needs the commands of the extra `ray` beside the running Python, and imports nothing of
Ray.
"""

import argparse
import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.live import exchange
from tests.support.paths import ROOT
from tests.support.processes import alive, children, command_line
from tests.support.wire import http_request

START_SECONDS = 120.0
ACTOR = b"ray::ServeReplica:default:onehead"
"""How Ray names the process of a replica."""


def run_parts(
    parser: argparse.ArgumentParser,
    parts: Sequence[str],
    run: Callable[[Any, Path], Coroutine[Any, Any, int]],
) -> None:
    """Runs a command with the further options --output and --parts, and a folder for logs; exits
    with its status.
    """
    parser.add_argument("--output", type=Path, help="an existing folder")
    parser.add_argument(
        "--parts", default=",".join(parts), help="which of them (default: %(default)s)"
    )
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(run(options, options.output or Path(scratch))))


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


class Cluster:
    """Ray and the application. `arguments` are those of Settings."""

    def __init__(self, log: Path, **arguments: object) -> None:
        self.log, self.port, self._arguments = log, free_port(), arguments
        # The paths of its sockets must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self._ray_port = free_port()
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_ADDRESS": f"127.0.0.1:{self._ray_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        """Ray, and then `serve run`."""

    def begin(self) -> None:
        """Starts Ray, its proxy and the application."""
        head = (
            f"ray start --head --block --node-ip-address 127.0.0.1 --port {self._ray_port} "
            f"--temp-dir {self._folder}"
        )
        sizes = "--include-dashboard=false --num-cpus 16 --object-store-memory 150000000"
        self._processes.append(self._start(*head.split(), *sizes.split()))
        self._retry(
            *f"serve start --http-host 127.0.0.1 --http-port {self.port} --proxy-location HeadOnly".split()  # noqa: E501
        )
        given = [f"{name}={value}" for name, value in self._arguments.items()]
        self._processes.append(self._start("serve", "run", "deploy.ray.app:app", *given))

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def _retry(self, *command: str) -> None:
        """Runs a command until it succeeds: Ray is not there at once."""
        end = time.monotonic() + START_SECONDS
        while self._start(*command).wait() != 0:
            self.must_live()
            if time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)} failed; see {self.log}")
            time.sleep(0.5)

    def must_live(self) -> None:
        """Raises SystemExit where Ray has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise SystemExit(
                    f"{process.args!r} ended with status "
                    f"{process.returncode}\n{self.log.read_text()[-3000:]}"
                )

    @classmethod
    async def start(cls, log: Path, **arguments: object) -> Self:
        """Starts one, and waits until it answers from as many replicas as it starts with."""
        cluster = cls(log, **arguments)
        try:
            await asyncio.to_thread(cluster.begin)
            await cluster.until(
                lambda names: len(names) >= int(str(arguments.get("min_replicas", 1)))
            )
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    async def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, str]:
        """Status and text of a request through the proxy."""
        async with (
            asyncio.timeout(60),
            exchange(self.port, http_request(method, path, headers=headers)) as reply,
        ):
            return reply.status, (await reply.body()).decode()

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Of each replica the sums of its series, from /metrics of the ingress."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        status, text = await self.get("/metrics")
        for line in text.splitlines() if status == 200 else ():
            if sample := re.fullmatch(r'(\w+)\{.*replica="(\w+)"\} (\S+)', line):
                found[sample[2]][sample[1]] += float(sample[3])
        return found

    async def until(
        self, wanted: Callable[[list[str]], bool], seconds: float = START_SECONDS
    ) -> list[str]:
        """Waits until the names of the replicas are as wanted, which is a function of them; returns
        them.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.must_live()
            try:
                if wanted(names := sorted(await self.metrics())):
                    return names
            except (OSError, EOFError, TimeoutError):
                pass
            await asyncio.sleep(0.2)
        raise SystemExit(
            f"the replicas are not as wanted within {seconds:g} s\n{self.log.read_text()[-3000:]}"
        )

    def actors(self) -> list[int]:
        """Process ids of the replicas."""
        return [
            pid
            for pid in descendants(self._processes[0].pid)
            if command_line(pid).startswith(ACTOR)
        ]

    async def stop(self) -> None:
        """Shuts the application down, and then Ray."""
        below = {pid for process in self._processes for pid in descendants(process.pid)}
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(
                    signal.SIGTERM if process is self._processes[0] else signal.SIGINT
                )
                try:
                    await asyncio.to_thread(process.wait, 60)
                except subprocess.TimeoutExpired:
                    process.kill()
        # Ray starts some of its processes in sessions of their own.
        for pid in filter(alive, below):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
