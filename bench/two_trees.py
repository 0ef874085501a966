"""Two checkouts of this repository, serving the same model in turns: what a change costs or gains
over HTTP.

    python -m bench.two_trees --old FOLDER --new FOLDER --output FILE [--model FOLDER] [--rounds 5]
    [--streams 1,8,32] [--new_options OPTIONS] [-- SERVE_OPTIONS]

Three kinds of requests are measured: plain completions, chat, and completions bound by a JSON
schema. Both servers run at the same time, and each case is sent to one after the other, in
alternating order, so the machine's drift reaches both. Figures are output tokens per second,
medians over the rounds, and the median of the rounds' ratios new / old, and memory; bench.start_up
measures starts. Each checkout needs its compiled kernels; both run in this Python environment.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.processes import alive, children, served_port
from tests.support.report import progress, show

OUTPUT_TOKENS = 64
REQUESTS_PER_STREAM = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
        },
    },
    "required": ["name", "age", "tags", "address"],
}


def body(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed request of one kind; requests differ by their number."""
    common: dict[str, Any] = {
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }
    common |= {"stream_options": {"include_usage": True}}
    if kind == "chat":
        return "/v1/chat/completions", common | {
            "messages": [{"role": "user", "content": f"Write function {number}."}],
            "ignore_eos": True,
        }
    prompt = {"prompt": f"def function_{number}(self):"}
    if kind == "json":
        wrapped = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        return "/v1/completions", common | prompt | {"response_format": wrapped}
    return "/v1/completions", common | prompt | {"ignore_eos": True}


class Server:
    """`onehead serve` of one checkout."""

    def __init__(self, tree: Path, model: Path | None, options: list[str]) -> None:
        named = ["--model", str(model)] if model else []
        command = [sys.executable, "-m", "commands.cli", "serve", "--port", "0"]
        command += ["--server.lb_grace", "0", *named, *options]
        began = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        port = served_port(self.process.stdout.readline())
        if port is None:
            raise SystemExit(f"the server of {tree} did not start")
        self.seconds_to_ready = time.perf_counter() - began
        self.port = port

    def processes(self) -> list[int]:
        """The server and all its child processes."""
        pids = [self.process.pid]
        for pid in pids:
            pids += filter(alive, children(pid))
        return pids

    def memory(self) -> dict[int, float]:
        """MB of the proportional set size of each process: pages that processes share count
        once.
        """
        sizes = {}
        for pid in self.processes():
            with suppress(OSError):  # It may have ended.
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                sizes[pid] = sum(map(int, re.findall(r"^Pss:\s+(\d+)", text, re.M))) / 1024
        return sizes

    def megabytes(self) -> float:
        """All of it."""
        return sum(self.memory().values())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


async def tokens(port: int, path: str, values: dict[str, Any]) -> int:
    """Sends one request, reads its stream to the end, and returns the number of its output
    tokens.
    """
    data = json.dumps(values).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(data)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}connection: close\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    usage = re.findall(rb'"completion_tokens":\s*(\d+)', answer)
    if not answer.startswith(b"HTTP/1.1 200") or not usage:
        raise SystemExit(f"{path}: {answer[:2000].decode(errors='replace')}")
    return int(usage[-1])


async def rate(port: int, kind: str, streams: int, first: int) -> float:
    """Output tokens per second of so many clients, each of which sends its requests one after the
    other.
    """

    async def client(index: int) -> int:
        numbers = range(
            first + index * REQUESTS_PER_STREAM, first + (index + 1) * REQUESTS_PER_STREAM
        )
        return sum([await tokens(port, *body(kind, number)) for number in numbers])

    began = time.perf_counter()
    total = sum(await asyncio.gather(*[client(index) for index in range(streams)]))
    return total / (time.perf_counter() - began)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.two_trees", description="two checkouts' servers in turns"
    )
    parser.add_argument("--old", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--new", type=Path, required=True, help="checkout that is judged")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the embedded model")
    parser.add_argument(
        "--new_options",
        type=shlex.split,
        default=[],
        help="serve options of the new server alone, in one argument: with one checkout twice, "
        "what an option gains",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each case on each server"
    )
    parser.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32]
    )
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=["plain", "chat", "json"]
    )
    return parsed(parser)


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, and those of the server after it."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return parser.parse_args(own), sys.argv[len(own) + 2 :]


def measure(options: argparse.Namespace, servers: dict[str, Server]) -> list[dict[str, Any]]:
    """The rates of every case on both servers."""
    cases = [(kind, streams) for kind in options.kinds for streams in options.streams]
    results: list[dict[str, Any]] = [
        {"kind": kind, "streams": streams, "old": [], "new": []} for kind, streams in cases
    ]
    with progress() as bar:
        task = bar.add_task("rounds", total=(options.rounds + 1) * len(cases))
        for number in range(options.rounds + 1):
            for result in results:
                for name in ("old", "new") if number % 2 else ("new", "old"):
                    found = asyncio.run(
                        rate(servers[name].port, result["kind"], result["streams"], 1000 * number)
                    )
                    if number:  # The first round warms up.
                        result[name].append(found)
                bar.advance(task)
    return results


def main() -> None:
    options, serve_options = arguments()
    trees = {"old": options.old, "new": options.new}
    more = {"old": [], "new": options.new_options}
    servers = {
        name: Server(tree, options.model, serve_options + more[name])
        for name, tree in trees.items()
    }
    try:
        results = measure(options, servers)
        memory = {name: server.megabytes() for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()
    report = {"command": sys.argv, "megabytes": memory, "cases": results}
    options.output.write_text(json.dumps(report))
    rows = [["memory, MB", *[f"{memory[name]:.0f}" for name in trees], ""]]
    for result in results:
        ratio = statistics.median(
            new / old for old, new in zip(result["old"], result["new"], strict=True)
        )
        medians = [f"{statistics.median(result[name]):.0f}" for name in trees]
        rows.append(
            [f"{result['kind']}, {result['streams']} streams, tokens/s", *medians, f"{ratio:.3f}"]
        )
    show(["case", "old", "new", "new / old"], rows)


if __name__ == "__main__":
    main()
