"""Start and memory of a server: how long until it is ready, how long a stream pauses when its engine is killed, what its processes hold.

    python -m bench.start_up --output FILE [--tree FOLDER] [--model FOLDER] [--starts 5] [--streams 32] [-- SERVE_OPTIONS]

The first start is not counted: it brings files into the page cache, and remembers that the tokenizer passed its trial. Beside the time
until a server is ready stands the processor time that all its processes have taken by then, which other work on the machine changes little.
Memory is the
proportional set size of the server and all its child processes: at rest, then while so many streams run, then after the first grammar. An
engine is killed while the streams run; the pause is the longest time that any of them goes without a token.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.two_trees import Server, body
from tests.support.processes import children, engines
from tests.support.report import show
from tests.support.wire import http_request

TOKENS_BEFORE, TOKENS = 24, 160


def memory(server: Server) -> dict[str, float]:
    """MB of the proportional set size of each process, by what it is and its process id."""
    pids, found = [server.process.pid], dict[str, float]()
    engine = engines(server.process.pid)
    while pids:
        pid = pids.pop()
        pids += children(pid)
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        size = int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0]) / 1024
        name = "API" if pid == server.process.pid else "engine" if pid in engine else "worker"
        found[f"{name} {pid}"] = size
    return found


def processor_seconds(server: Server) -> float:
    """Processor time of the server and all its child processes, those that have ended included."""
    pids, ticks = [server.process.pid], 0
    while pids:
        pid = pids.pop()
        pids += children(pid)
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def stream(port: int, number: int, times: list[float]) -> None:
    """One stream of TOKENS tokens; the time of each event is noted."""
    path, values = body("plain", number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http_request("POST", path, values | {"max_tokens": TOKENS}))
    try:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise SystemExit(line.decode())
                times.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                return
        raise SystemExit(f"stream {number} ended early")
    finally:
        writer.close()


async def under_load(server: Server, streams: int, kill: bool) -> tuple[float, dict[str, float]]:
    """The longest pause of any stream, and the memory when the first has had TOKENS_BEFORE tokens; then the engine is killed, if asked."""
    times: list[list[float]] = [[] for _ in range(streams)]
    running = [asyncio.create_task(stream(server.port, number, seen)) for number, seen in enumerate(times)]
    while min(map(len, times)) < TOKENS_BEFORE:
        await asyncio.sleep(0.01)
    held = await asyncio.to_thread(memory, server)
    if kill:
        os.kill(engines(server.process.pid)[-1], signal.SIGKILL)
    await asyncio.gather(*running)
    return max(after - before for seen in times for before, after in pairwise(seen)), held


def measure(options: argparse.Namespace, serve_options: list[str]) -> dict[str, Any]:
    starts, processor = list[float](), list[float]()
    for _ in range(options.starts):
        server = Server(options.tree, options.model, serve_options)
        starts.append(server.seconds_to_ready)
        processor.append(processor_seconds(server))
        server.stop()
    server = Server(options.tree, options.model, serve_options)
    try:
        time.sleep(1.0)
        found: dict[str, Any] = {"starts": starts[1:], "processor time": statistics.median(processor[1:]), "at rest": memory(server)}
        if options.streams:
            found["pause of one stream"], _ = asyncio.run(under_load(server, 1, kill=True))
            found["pause of all"], found["under load"] = asyncio.run(under_load(server, options.streams, kill=True))
            path, values = body("json", 1)
            began = time.perf_counter()
            asyncio.run(one(server.port, path, values))
            found["first grammar"] = time.perf_counter() - began
            found["with a grammar"] = memory(server)
    finally:
        server.stop()
    return found


async def one(port: int, path: str, values: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http_request("POST", path, values | {"max_tokens": 1}, {"connection": "close"}))
    await reader.read(-1)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start_up", description="start and memory of a server")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--tree", type=Path, default=Path(), help="checkout of the server; default: the working directory")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the embedded model")
    parser.add_argument("--starts", type=int, default=5, help="starts, at least two; the first is not counted")
    parser.add_argument("--streams", type=int, default=32, help="streams under load; 0: none, and no engine is killed")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    found = measure(options, sys.argv[len(own) + 2 :])
    options.output.write_text(json.dumps({"command": sys.argv} | found, indent=1))
    rows = [["ready, s", f"{statistics.median(found['starts']):.2f}", " ".join(f"{value:.2f}" for value in sorted(found["starts"]))]]
    for key, value in found.items():
        if isinstance(value, float):
            rows.append([f"{key}, s", f"{value:.2f}", ""])
        elif isinstance(value, dict):
            rows.append([f"{key}, MB", f"{sum(value.values()):.0f}", ", ".join(f"{name} {size:.0f}" for name, size in value.items())])
    show(["figure", "", ""], rows)


if __name__ == "__main__":
    main()
