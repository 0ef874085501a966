"""Served against served: output tokens per second over HTTP of onehead and other servers on the
same shape, in turns.

    python -m bench.served --output FILE --model FOLDER [--peer "NAME=COMMAND with {port}"]... [--streams 1,8,32] [--rounds 5]
        [--prompt_tokens 128] [-- SERVE_OPTIONS]

A peer is any server of OpenAI's /v1/completions that takes token ids and streams; bench/peers has
some. All servers run at the same time, and each case is sent to one after another in an order that
turns, so that the machine's drift reaches all. Prompts are random ids, choices greedy, ends
ignored. `engine alone` is `onehead bench --offline` with the same options, once a round. The
client's own processor time is given, and not subtracted from any figure.
"""  # noqa: E501

import argparse
import asyncio
import json
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.two_trees import Server, parsed, tokens
from model.checkpoint.families import read_spec
from tests.support.paths import ROOT
from tests.support.report import progress, show

OUTPUT_TOKENS = 128
ONEHEAD, ALONE = "onehead", "engine alone"
START_SECONDS = 120.0


class Peer:
    """Another server, as a command."""

    def __init__(self, command: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(self.port))), stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        f"no server is up after {START_SECONDS:g} s: {command}"
                    ) from None
                time.sleep(0.2)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def body(prompt: list[int]) -> dict[str, Any]:
    """A streamed completion of a prompt of ids."""
    values = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    return values | {"stream_options": {"include_usage": True}}


def rate(port: int, prompts: list[list[int]]) -> tuple[float, float]:
    """Output tokens per second of one request for each prompt, all at once; and the client's
    processor time for each token, in us.
    """

    async def run() -> int:
        return sum(
            await asyncio.gather(
                *(tokens(port, "/v1/completions", body(prompt)) for prompt in prompts)
            )
        )

    began, used = time.perf_counter(), time.process_time()
    total = asyncio.run(run())
    return total / (time.perf_counter() - began), 1e6 * (time.process_time() - used) / total


def alone(options: argparse.Namespace, serve_options: list[str]) -> dict[int, float]:
    """Streams -> output tokens per second of the engine in a process without a server."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for streams in options.streams:
            file = Path(folder) / f"{streams}.json"
            command = [
                sys.executable,
                "-m",
                "commands.cli",
                "bench",
                "--offline",
                "--model",
                str(options.model),
                "--output",
                str(file),
            ]
            command += [
                "--concurrency",
                str(streams),
                "--requests",
                str(max(4, streams)),
                "--prompt_tokens",
                str(options.prompt_tokens),
            ]
            command += ["--output_tokens", str(OUTPUT_TOKENS), *serve_options]
            subprocess.run(
                command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            (run,) = json.loads(file.read_text())["runs"]
            found[streams] = run["figures"]["output_tokens_per_second"]
    return found


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.served", description="served against served"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND, with {port}")
    parser.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    return parsed(parser)


def measure(
    options: argparse.Namespace, serve_options: list[str], servers: dict[str, Any]
) -> dict[str, Any]:
    """The rates of all rounds, and the client's costs."""
    rng, vocabulary = random.Random(0), read_spec(options.model).vocab_size
    rates: dict[str, dict[int, list[float]]] = {
        name: {n: [] for n in options.streams} for name in (*servers, ALONE)
    }
    client_us: dict[int, list[float]] = {n: [] for n in options.streams}
    with progress() as bar:
        task = bar.add_task(
            "rounds", total=(options.rounds + 1) * (len(options.streams) * len(servers) + 1)
        )
        for number in range(options.rounds + 1):  # The first warms up.
            for streams in options.streams:
                names = list(servers)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    prompts = [
                        rng.choices(range(1, vocabulary), k=options.prompt_tokens)
                        for _ in range(streams)
                    ]
                    found, cost = rate(servers[name].port, prompts)
                    if number:
                        rates[name][streams].append(found)
                        client_us[streams].append(cost)
                    bar.advance(task)
            if number:
                for streams, found in alone(options, serve_options).items():
                    rates[ALONE][streams].append(found)
            bar.advance(task)
    return {"tokens_per_second": rates, "client_us": client_us}


def main() -> None:
    options, serve_options = arguments()
    servers: dict[str, Any] = {}
    try:
        servers[ONEHEAD] = Server(ROOT, options.model, serve_options)
        for name, _, command in (peer.partition("=") for peer in options.peer):
            servers[name] = Peer(command)
        found = measure(options, serve_options, servers)
    finally:
        for server in servers.values():
            server.stop()
    options.output.write_text(json.dumps({"command": sys.argv} | found))
    rates, rows = found["tokens_per_second"], []
    for streams in options.streams:
        ours = rates[ONEHEAD][streams]
        row = [str(streams), f"{statistics.median(ours):.0f}"]
        for name in (ALONE, *(name for name in servers if name != ONEHEAD)):
            ratio = statistics.median(
                a / b for a, b in zip(ours, rates[name][streams], strict=True)
            )
            row += [f"{statistics.median(rates[name][streams]):.0f}", f"{ratio:.2f}"]
        rows.append([*row, f"{statistics.median(found['client_us'][streams]):.0f}"])
    heads = [
        part
        for name in (ALONE, *(name for name in servers if name != ONEHEAD))
        for part in (name, "onehead / it")
    ]
    show(["streams", ONEHEAD, *heads, "client, us a token"], rows)


if __name__ == "__main__":
    main()
