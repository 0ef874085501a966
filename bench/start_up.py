"""Start and memory of a server: how long until it is ready, how long a stream pauses when its
engine is killed, what its processes hold.

    python -m bench.start_up --output FILE [--tree FOLDER] [--model FOLDER] [--starts 5] [--streams
    32] [-- SERVE_OPTIONS]

The first start is not counted: it brings files into the page cache, and remembers that the
tokenizer passed its trial. Beside the time until a server is ready stands the processor time that
all its processes have taken by then, which other work on the machine changes little. Memory is the
proportional set size of the server and all its child processes: at rest, then while so many streams
run, then after the first grammar. An engine is killed while the streams run; the pause is the
longest time that any of them goes without a token.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.two_trees import Server, body, parsed, tokens
from tests.support.processes import engines
from tests.support.report import show
from tests.support.wire import http_request

TOKENS_BEFORE, TOKENS = 24, 160


def memory(server: Server) -> dict[str, float]:
    """MB of the proportional set size of each process, by what it is and its process id."""
    names = {server.process.pid: "API"} | dict.fromkeys(engines(server.process.pid), "engine")
    return {f"{names.get(pid, 'worker')} {pid}": size for pid, size in server.memory().items()}


def processor_seconds(server: Server) -> float:
    """Processor time of the server and all its child processes, those that have ended included."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in server.processes())
    ticks = (sum(map(int, text.rsplit(")", 1)[1].split()[11:15])) for text in stats)
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


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


async def under_load(server: Server, streams: int) -> tuple[float, dict[str, float]]:
    """The longest pause of any stream, and the memory when each has had TOKENS_BEFORE tokens; then
    the engine is killed.
    """
    times: list[list[float]] = [[] for _ in range(streams)]
    running = [
        asyncio.create_task(stream(server.port, number, seen)) for number, seen in enumerate(times)
    ]
    while min(map(len, times)) < TOKENS_BEFORE:
        await asyncio.sleep(0.01)
    held = await asyncio.to_thread(memory, server)
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
        found: dict[str, Any] = {
            "starts": starts[1:],
            "processor time": statistics.median(processor[1:]),
            "at rest": memory(server),
        }
        if options.streams:
            found["pause of one stream"], _ = asyncio.run(under_load(server, 1))
            found["pause of all"], found["under load"] = asyncio.run(
                under_load(server, options.streams)
            )
            path, values = body("json", 1)
            began = time.perf_counter()
            asyncio.run(tokens(server.port, path, values | {"max_tokens": 1}))
            found["first grammar"] = time.perf_counter() - began
            found["with a grammar"] = memory(server)
    finally:
        server.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.start_up", description="start and memory of a server"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument(
        "--tree",
        type=Path,
        default=Path(),
        help="checkout of the server; default: the working directory",
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the embedded model")
    parser.add_argument(
        "--starts", type=int, default=5, help="starts, at least two; the first is not counted"
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=32,
        help="streams under load; 0: none, and no engine is killed",
    )
    options, serve_options = parsed(parser)
    found = measure(options, serve_options)
    options.output.write_text(json.dumps({"command": sys.argv} | found, indent=1))
    rows = [
        [
            "ready, s",
            f"{statistics.median(found['starts']):.2f}",
            " ".join(f"{value:.2f}" for value in sorted(found["starts"])),
        ]
    ]
    for key, value in found.items():
        if isinstance(value, float):
            rows.append([f"{key}, s", f"{value:.2f}", ""])
        elif isinstance(value, dict):
            rows.append(
                [
                    f"{key}, MB",
                    f"{sum(value.values()):.0f}",
                    ", ".join(f"{name} {size:.0f}" for name, size in value.items()),
                ]
            )
    show(["figure", "", ""], rows)


if __name__ == "__main__":
    main()
