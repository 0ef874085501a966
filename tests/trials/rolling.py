"""Servers replaced under load behind a proxy, and a server told to end under 64 streams: nothing
may be lost.

    python -m tests.trials.rolling --output DIR [--requests 5000] [--clients 16] [--streams 64] [--
    SERVE_OPTIONS]

Starts two servers and Debian's nginx (`apt-get install nginx-light`) in front of them. While
clients send short requests through the proxy, half of them streaming, the servers are replaced in
turn: SIGTERM, exit status 0, a new one on the same port, ready, the other. Every request must get
the answer that an undisturbed server gives, and every replaced server must end with 0.

Then one server gets SIGTERM while it streams to 64 clients, directly: all must get their whole
answer, and it must end with 0. Arguments after `--` are options of the servers.
"""

import argparse
import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from commands.bench.figures import spread
from tests.support.live import Answer, Ask, Server, ask, asks
from tests.support.report import Check, Found, conclude, progress, show

LB_GRACE = 1.0
"""How long a server that ends still answers newcomers with 503. The proxy tries the other one on
each, so it need not be long."""
NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log warn; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream onehead {{
        # Not written off after a failure: each request finds out for itself, so that two restarts in a row leave none without a server.
        server 127.0.0.1:{ports[0]} max_fails=0;
        server 127.0.0.1:{ports[1]} max_fails=0;
        keepalive 32;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://onehead;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_buffering off;
            proxy_read_timeout 120s;
            proxy_next_upstream error timeout http_503 non_idempotent;
        }}
    }}
}}
"""  # noqa: E501


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Proxy:
    """nginx in front of two ports, from a configuration in a folder of its own."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if program is None:
            raise SystemExit("this needs nginx: apt-get install nginx-light")
        self.port = free_port()
        self.log = folder / "nginx-error.log"
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, ports=ports, port=self.port))
        self.process = subprocess.Popen(
            [program, "-c", str(config), "-p", str(folder), "-e", str(self.log)]
        )

    async def until_up(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@dataclass(slots=True)
class Replacement:
    """One server replaced by the next on its port."""

    port: int
    drain_s: float
    start_s: float
    status: int


@dataclass(slots=True)
class Roll:
    """What came of the requests, and of the servers."""

    replacements: list[Replacement] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)


async def client(
    port: int, questions: Iterator[Ask], oracles: dict[Ask, Answer], roll: Roll
) -> None:
    """Sends one request after the other until there are none left."""
    for question in questions:
        answer = await ask(port, question)
        # A whole answer is that of the stream, and has no events to be counted.
        oracle = oracles[replace(question, stream=True)]
        problem = answer.problem(oracle)
        roll.latencies.append(answer.end - answer.sent)
        roll.answered[f"{question.dialect}, {'stream' if question.stream else 'whole'}"] += (
            problem is None
        )
        if problem is not None:
            roll.lost.append(f"{question.dialect}, seed {question.seed}: {problem}")


async def replace_in_turn(
    servers: list[Server], options: list[str], roll: Roll, over: asyncio.Event
) -> None:
    """The servers one after the other, again and again, as a deployment would: the next only when
    the last is ready.
    """
    number = 0
    while not over.is_set():
        old = servers[number]
        began = time.perf_counter()
        status = await old.stop()
        drained = time.perf_counter()
        servers[number] = await Server.start(old.log, *options, port=old.port)
        roll.replacements.append(
            Replacement(old.port, drained - began, time.perf_counter() - drained, status)
        )
        number = 1 - number


async def roll_under_load(
    options: argparse.Namespace, folder: Path, arguments: list[str]
) -> tuple[Found, Found, list[Check]]:
    """The rolling replacement; what is served, the figures, the checks."""
    servers = list(
        await asyncio.gather(
            *(Server.start(folder / f"rolling-{i}.log", *arguments) for i in range(2))
        )
    )
    questions = asks(8, 8, seed=5, prompt_tokens=(4, 24))
    roll, over = Roll(), asyncio.Event()
    with tempfile.TemporaryDirectory() as scratch:
        proxy = Proxy(Path(scratch), [server.port for server in servers])
        try:
            await proxy.until_up()
            info = await servers[0].info()
            oracles = {question: await ask(servers[0].port, question) for question in questions}
            with progress() as bar:
                todo = (
                    replace(questions[i % 8], stream=i % 16 < 8) for i in range(options.requests)
                )
                counted = iter(bar.track(todo, total=options.requests, description="requests"))
                replacing = asyncio.create_task(replace_in_turn(servers, arguments, roll, over))
                await asyncio.gather(
                    *(client(proxy.port, counted, oracles, roll) for _ in range(options.clients))
                )
                over.set()
                await replacing
        finally:
            proxy.stop()
            ends = [await server.stop() for server in servers]
            errors = proxy.log.read_text().splitlines() if proxy.log.exists() else []
    statuses = [each.status for each in roll.replacements] + ends
    show_roll(roll)
    answered = sum(roll.answered.values())
    complete = answered == options.requests and not roll.lost
    turns = sorted(Counter(each.port for each in roll.replacements).values())
    checks = [
        Check(
            "rolling: every request has its undisturbed answer",
            complete,
            f"{answered} of {options.requests}; {roll.lost[:3]}",
        ),
        Check(
            "rolling: each server was replaced twice or more",
            len(turns) == 2 and turns[0] >= 2,
            f"{turns}",
        ),
        Check("rolling: every server ends with 0", not any(statuses), str(Counter(statuses))),
    ]
    told = {
        "requests": options.requests,
        "clients": options.clients,
        "answered": roll.answered,
        "lost": roll.lost[:50],
        "latency_s": spread(roll.latencies),
        "replacements": len(roll.replacements),
        "drain_s": spread([each.drain_s for each in roll.replacements]),
        "start_s": spread([each.start_s for each in roll.replacements]),
        "proxy_retries_logged": len(errors),
    }
    return info, told, checks


def show_roll(roll: Roll) -> None:
    rows = []
    figures = {
        "request s": roll.latencies,
        "drain s": [each.drain_s for each in roll.replacements],
        "start s": [each.start_s for each in roll.replacements],
    }
    for name, values in figures.items():
        if found := spread(values):
            rows.append((name, len(values), found["p50"], found["p99"], found["max"]))
    show(("rolling", "count", "p50", "p99", "max"), rows)


async def drain_under_streams(
    folder: Path, count: int, *arguments: str
) -> tuple[Found, list[Check]]:
    """SIGTERM when every stream has begun."""
    server = await Server.start(
        folder / "rolling-drain.log", "--engine.max_running", str(count), *arguments
    )
    questions = asks(count, 64, seed=6, prompt_tokens=(4, 24))
    begun: set[Ask] = set()
    try:
        oracles = await asyncio.gather(*(ask(server.port, question) for question in questions))
        tasks = [
            asyncio.create_task(ask(server.port, question, lambda answer: begun.add(answer.ask)))
            for question in questions
        ]
        async with asyncio.timeout(60):
            while len(begun) < count:
                await asyncio.sleep(0.01)
        open_streams, began = sum(not task.done() for task in tasks), time.perf_counter()
        status = await server.stop()
        seconds = time.perf_counter() - began
    finally:
        await server.stop()
    problems = [
        p
        for task, oracle in zip(tasks, oracles, strict=True)
        if (p := (await task).problem(oracle))
    ]
    checks = [
        Check(
            f"SIGTERM under {count} streams: all complete",
            not problems,
            f"{len(problems)} differ; {problems[:3]}",
        ),
        Check(
            "drain: the streams were open at the signal",
            open_streams > count // 2,
            f"{open_streams} of {count}",
        ),
        Check("drain: exit status 0", status == 0, f"{status} after {seconds:.2f} s"),
    ]
    return {
        "streams": count,
        "open_at_signal": open_streams,
        "seconds": seconds,
        "problems": problems,
    }, checks


async def run(options: argparse.Namespace, folder: Path) -> int:
    arguments = ["--server.lb_grace", str(LB_GRACE), "--engine.threads", "1", *options.server]
    info, rolling, checks = await roll_under_load(options, folder, arguments)
    drain, drain_checks = await drain_under_streams(folder, options.streams, *options.server)
    result = {"arguments": arguments, "rolling": rolling, "drain": drain}
    return conclude("rolling", options.output, info, result, checks + drain_checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="an existing folder")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("server", nargs="*", help="options of the servers, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(run(options, options.output or Path(scratch))))


if __name__ == "__main__":
    main()
