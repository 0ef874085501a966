"""What viewers of /monitor cost a server: output tokens a second, and its processor time a token, with so many and with none, in turns.

    python -m bench.viewers --output FILE [--viewers 10] [--rounds 5] [--streams 8,32] [--seconds 8] [-- SERVE_OPTIONS]

One server; in each round every case is measured without viewers and with them, in alternating order. Viewers are bare sockets in a process
of its own, which reads and discards what comes: on a machine whose processors are all busy its work counts too, though not as processor
time of the server. With `--tree FOLDER` a second server, of another checkout, is measured in turns with this one, both without viewers.
"""

import argparse
import asyncio
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.two_trees import Server, body, tokens
from tests.support.paths import ROOT
from tests.support.processes import children
from tests.support.report import progress, show
from tests.support.wire import http_request


def read(port: int, count: int) -> None:
    """Reads /monitor on so many connections and prints the bytes when standard input ends."""
    selector, total = selectors.DefaultSelector(), 0
    selector.register(sys.stdin, selectors.EVENT_READ)
    for _ in range(count):
        viewer = socket.create_connection(("127.0.0.1", port))
        viewer.sendall(http_request("GET", "/monitor"))
        selector.register(viewer, selectors.EVENT_READ)
    print("reading", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(total, flush=True)
                return
            assert isinstance(key.fileobj, socket.socket)
            total += len(key.fileobj.recv(2**16))


class Readers:
    """The process of the viewers, while it is entered. `num_bytes`: what it has read."""

    def __init__(self, port: int, count: int) -> None:
        self._command = [sys.executable, "-m", "bench.viewers", "--read", str(port), str(count)]
        self._count = count
        self.num_bytes = 0

    def __enter__(self) -> "Readers":
        if self._count:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert self._process.stdout is not None and self._process.stdout.readline() == "reading\n"
        return self

    def __exit__(self, *_: object) -> None:
        if self._count:
            self.num_bytes = int(self._process.communicate()[0])


def processor_seconds(pid: int) -> float:
    """Processor time of a process and of all its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children(pid)))


async def rate(server: Server, streams: int, seconds: float) -> tuple[float, float]:
    """Output tokens a second of so many clients, each of which sends one request after the other until the time is over; and microseconds
    of the server's processor time for each token.
    """
    end, numbers = time.perf_counter() + seconds, iter(range(10**9))

    async def client() -> int:
        total = 0
        while time.perf_counter() < end:
            total += await tokens(server.port, *body("plain", next(numbers)))
        return total

    began, used = time.perf_counter(), processor_seconds(server.process.pid)
    total = sum(await asyncio.gather(*[client() for _ in range(streams)]))
    return total / (time.perf_counter() - began), (processor_seconds(server.process.pid) - used) / total * 1e6


def measure(options: argparse.Namespace, cases: dict[str, tuple[Server, int]]) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """For each number of streams the figures of `rate` of each case, which is a server and a number of viewers."""
    results: dict[int, dict[str, list[tuple[float, float]]]] = {streams: {name: [] for name in cases} for streams in options.streams}
    with progress() as bar:
        task = bar.add_task("rounds", total=(options.rounds + 1) * len(options.streams))
        for number in range(options.rounds + 1):
            for streams, found in results.items():
                for name in list(cases)[:: 1 if number % 2 else -1]:
                    server, count = cases[name]
                    with Readers(server.port, count) as readers:
                        measured = asyncio.run(rate(server, streams, options.seconds))
                    assert not count or readers.num_bytes > 1000 * count, f"{count} viewers have read {readers.num_bytes} bytes"
                    if number:  # The first round warms up.
                        found[name].append(measured)
                bar.advance(task)
    return results


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m bench.viewers", description="what viewers of a server cost")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[8, 32])
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one measurement")
    parser.add_argument("--tree", type=Path, help="checkout to compare with, without viewers")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the embedded model")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return parser.parse_args(own), sys.argv[len(own) + 2 :]


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        return read(int(sys.argv[2]), int(sys.argv[3]))
    options, serve_options = arguments()
    servers = {tree: Server(tree, options.model, serve_options) for tree in ([options.tree] if options.tree else []) + [ROOT]}
    try:
        cases = {f"{options.viewers} viewers": (servers[ROOT], options.viewers)} if options.tree is None else {}
        cases |= {f"none, {tree.name}" if options.tree else "none": (server, 0) for tree, server in servers.items()}
        results = measure(options, cases)
    finally:
        for server in servers.values():
            server.stop()
    report: dict[str, Any] = {"command": sys.argv, "rates": results}
    options.output.write_text(json.dumps(report))
    rows = []
    for streams, found in results.items():
        (first, one), (second, other) = found.items()
        for place, what in enumerate(("tokens/s", "processor us/token")):
            ones, others = ([pair[place] for pair in pairs] for pairs in (one, other))
            ratio = statistics.median(a / b for a, b in zip(ones, others, strict=True))
            rows.append(
                [f"{streams} streams, {what}", f"{statistics.median(ones):.0f}", f"{statistics.median(others):.0f}", f"{ratio:.3f}"]
            )
    show(["", first, second, f"{first} / {second}"], rows)


if __name__ == "__main__":
    main()
