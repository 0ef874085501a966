"""What `server.tracing_endpoint` costs: two servers of this tree, one of which sends its spans to a collector, in turns.

    python -m bench.tracing_costs [--rounds 5] [--streams 32]

Both servers run at the same time, and are asked in alternating order. The figure is the median of the rounds' ratios of output tokens per
second, with tracing over without. Beside it stands the processor time that a request's spans take, in the event loop and in all with their
export, and each as a share of the time between two requests at the measured rate: that is free of the machine's noise. The collector only
throws away what it gets: a real one runs elsewhere.
"""

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.two_trees import OUTPUT_TOKENS, Server, rate
from server.generation.clients import EVERYBODY
from server.generation.request import Choice, Request
from server.generation.reservation import Reservation
from server.http.exchange import Exchange
from server.http.tracing import Tracing
from server.protocol import Sampling
from tests.support.report import show

ROOT = Path(__file__).resolve().parent.parent
NUM_REQUESTS, EXPORT_SECONDS = 400, 6.0


async def _serve(link: Connection) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except EOFError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    link.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


def collect(link: Connection) -> None:
    """A collector that throws away what it gets; it sends its port over the link."""
    asyncio.run(_serve(link))


def seconds_of_spans(endpoint: str) -> tuple[float, float]:
    """Processor time for the spans of one request: of the thread that makes them, and of the process, which exports them too."""
    tracing = Tracing(endpoint, "pretrained")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"100"), (b"user-agent", b"bench")]
    scope = {"type": "http", "path": "/v1/completions", "server": ("127.0.0.1", 8000), "headers": headers}
    now = time.monotonic()
    choice = Choice(8, OUTPUT_TOKENS, index=0, request=Request([1] * 8, Sampling()), outcome="length")
    choice.arrival, choice.started, choice.first, choice.last, choice.num_tokens = now - 2, now - 1.9, now - 1.8, now - 0.1, OUTPUT_TOKENS
    reservation = Reservation("", "", EVERYBODY)
    reservation.choices = [choice]
    began, all_began = time.thread_time(), time.process_time()
    for _ in range(NUM_REQUESTS):
        tracing.of(scope)(Exchange(status=200, request_id="request", reservation=reservation))
    loop = time.thread_time() - began
    time.sleep(EXPORT_SECONDS)
    return loop / NUM_REQUESTS, (time.process_time() - all_began) / NUM_REQUESTS


def measure(rounds: int, streams: int, servers: dict[str, Server]) -> dict[str, list[float]]:
    """Tokens per second of both servers in each round."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=number % 2 == 0):
            tokens_per_second = asyncio.run(rate(servers[name].port, "plain", streams, 1000 * number))
            if number:  # The first round warms up.
                found[name].append(tokens_per_second)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tracing_costs", description="what traces cost")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each server")
    parser.add_argument("--streams", type=int, default=32, help="clients, each of which sends its requests one after the other")
    options = parser.parse_args()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    collector = context.Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    endpoint = f"http://127.0.0.1:{ours.recv()}"
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, extra in (("without", []), ("with", ["--server.tracing_endpoint", endpoint])):
            servers[name] = Server(ROOT, None, ["--cache.pages", "512", *extra])
            stack.callback(servers[name].stop)
        found = measure(options.rounds, options.streams, servers)
    seconds_of_spans(endpoint)  # Warms up.
    costs = seconds_of_spans(endpoint)
    ratios = [traced / plain for traced, plain in zip(found["with"], found["without"], strict=True)]
    rows: list[list[Any]] = [
        [f"{name} tracing, tokens/s", f"{statistics.median(each):.0f}", _span(each, 0)] for name, each in found.items()
    ]
    rows += [["with over without", f"{statistics.median(ratios):.4f}", _span(ratios, 4)]]
    requests_per_second = statistics.median(found["with"]) / OUTPUT_TOKENS
    for name, cost in zip(("event loop", "all threads"), costs, strict=True):
        rows += [[f"{name}, microseconds a request", f"{cost * 1e6:.0f}", ""]]
        rows += [[f"{name}, share of a processor", f"{cost * requests_per_second:.2%}", ""]]
    show(["", "median", "from, to"], rows)
    collector.kill()


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f}, {max(values):.{digits}f}"


if __name__ == "__main__":
    main()
