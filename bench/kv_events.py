"""What KV events cost: output tokens a second, and processor time a token, of a server that publishes them and one that does not.

    python -m bench.kv_events --output FILE [--rounds 5] [--streams 32] [--seconds 6] [-- SERVE_OPTIONS]

Two servers of this tree run at the same time and are measured in turns, in alternating order. One publishes its events to a subscriber, a
process of its own that discards what comes, as a router on another machine would take it. Beside them stands what the events of a block
take by themselves, in the step loop with a subscriber: a sequence completes a block every `cache.page_size` tokens.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench.two_trees import Server, body, tokens
from bench.viewers import processor_seconds
from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.prefix import Chain, PrefixCache
from server.engine.kv_events import KvPublisher
from server.protocol import KvEvents
from tests.support.paths import ROOT
from tests.support.report import progress, show
from tests.trials.recorded_corpus import free_port

PAGE_SIZE = 64
OUTPUT_TOKENS = 192
"""Of a request: with its prompt, three blocks."""
STEPS = 2000
MICROSECONDS = 1e6


def discard(address: str) -> None:
    """Takes messages, and prints how many events they had when standard input ends."""
    socket, poller, count = zmq.Context().socket(zmq.SUB), zmq.Poller(), 0
    socket.connect(address)
    socket.subscribe("")
    for each in (socket, sys.stdin.fileno()):
        poller.register(each, zmq.POLLIN)
    print("subscribed", flush=True)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            count += len(msgspec.msgpack.decode(socket.recv_multipart()[-1])[1])
        elif sys.stdin.fileno() in ready:
            print(count, flush=True)
            return


class Discarding:
    """The subscriber's process, while it is entered. `num_events`: what it has taken."""

    def __init__(self, address: str) -> None:
        self._command = [sys.executable, "-m", "bench.kv_events", "--discard", address]
        self.num_events = 0

    def __enter__(self) -> "Discarding":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None and self._process.stdout.readline() == "subscribed\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.num_events = int(self._process.communicate()[0])


async def rate(server: Server, streams: int, seconds: float, numbers: Iterator[int]) -> tuple[float, float]:
    """What bench.viewers measures, with prompts that no request had before: else their blocks are there already."""
    end = time.perf_counter() + seconds

    async def client() -> int:
        total = 0
        while time.perf_counter() < end:
            path, values = body("plain", next(numbers))
            total += await tokens(server.port, path, values | {"max_tokens": OUTPUT_TOKENS})
        return total

    began, used = time.perf_counter(), processor_seconds(server.process.pid)
    total = sum(await asyncio.gather(*[client() for _ in range(streams)]))
    return total / (time.perf_counter() - began), (processor_seconds(server.process.pid) - used) / total * MICROSECONDS


def measure(options: argparse.Namespace, servers: dict[str, Server]) -> dict[str, list[tuple[float, float]]]:
    """For each server the figures of `rate` in each round; the first round warms up, and is left out."""
    numbers, results = iter(range(10**9)), {name: list[tuple[float, float]]() for name in servers}
    with progress() as bar:
        for number in bar.track(range(options.rounds + 1), description="rounds"):
            for name in list(servers)[:: 1 if number % 2 else -1]:
                measured = asyncio.run(rate(servers[name], options.streams, options.seconds, numbers))
                if number:
                    results[name].append(measured)
    return results


def block_costs(blocks_a_step: int) -> dict[str, float]:
    """Microseconds of the thread that runs steps for each block: with events, and without, which is the call that does nothing."""
    options = KvEvents(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    publisher = KvPublisher(options, -1)
    links = []
    for number in range(blocks_a_step * STEPS):
        chain = Chain(":")
        chain.extend([number % 50_000] * PAGE_SIZE)
        links.append(chain.links[0])
    nothing = PrefixCache(PageAllocator(1), CacheLayout.of(1, (), PAGE_SIZE)).on_change
    found: dict[str, list[float]] = {"with events": [], "without": []}
    with Discarding(options.address):
        for step in range(STEPS):
            now = links[step * blocks_a_step : (step + 1) * blocks_a_step]
            began = time.thread_time()
            for link in now:
                publisher.log.changes.append(link)
            publisher.publish()
            middle = time.thread_time()
            for link in now:
                nothing(link)
            found["without"].append(time.thread_time() - middle)
            found["with events"].append(middle - began)
    return {name: statistics.median(each) / blocks_a_step * MICROSECONDS for name, each in found.items()}


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_events", description="what KV events cost")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one measurement")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return parser.parse_args(own), sys.argv[len(own) + 2 :]


def main() -> None:
    if sys.argv[1:2] == ["--discard"]:
        return discard(sys.argv[2])
    options, serve_options = arguments()
    address = f"tcp://127.0.0.1:{free_port()}"
    events = ["--server.kv_events", address, "--server.kv_events_replay", f"tcp://127.0.0.1:{free_port()}"]
    servers = {"with events": Server(ROOT, None, [*serve_options, *events]), "without": Server(ROOT, None, serve_options)}
    try:
        with Discarding(address) as subscriber:
            results = measure(options, servers)
    finally:
        for server in servers.values():
            server.stop()
    costs = {str(count): block_costs(count) for count in (1, 8, 64)}
    report: dict[str, Any] = {"command": sys.argv, "rates": results, "events": subscriber.num_events, "us a block": costs}
    options.output.write_text(json.dumps(report))
    rows = []
    for place, what in enumerate(("tokens/s", "processor us/token")):
        ones, others = ([pair[place] for pair in results[name]] for name in servers)
        ratio = statistics.median(a / b for a, b in zip(ones, others, strict=True))
        rows.append(
            [f"{options.streams} streams, {what}", f"{statistics.median(ones):.0f}", f"{statistics.median(others):.0f}", f"{ratio:.3f}"]
        )
    rows.append(["events that the subscriber has taken", str(subscriber.num_events), "", ""])
    for count, cost in costs.items():
        rows.append([f"us a block, {count} in a step", f"{cost['with events']:.1f}", f"{cost['without']:.2f}", ""])
    show(["", *servers, "ratio"], rows)


if __name__ == "__main__":
    main()
