"""What `server.tracing_endpoint` costs: two servers of this tree, one of which sends its spans to a collector, in turns.

    python -m bench.tracing_costs [--rounds 5] [--streams 32]

Both servers run at the same time, and are asked in alternating order. The figures are medians of the rounds' ratios, with tracing over
without, of output tokens per second and of processor time a token, which other work on the machine disturbs less. Beside them stands the
processor time that a request's spans take, in the event loop and in all with their export, and as a share of what a request takes. The
collector only throws away what it gets: a real one runs elsewhere.
"""

import argparse
import asyncio
import os
import statistics
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.two_trees import OUTPUT_TOKENS, REQUESTS_PER_STREAM, Server, rate
from server.generation.clients import EVERYBODY
from server.generation.request import Choice, Request
from server.generation.reservation import Reservation
from server.http.exchange import Exchange
from server.http.tracing import Tracing
from server.protocol import Sampling
from tests.support.processes import children
from tests.support.report import show

ROOT = Path(__file__).resolve().parent.parent
Rounds = dict[str, list[float]]
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


def processor_seconds(pid: int) -> float:
    """Of a process and all its child processes, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children(pid)))


def measure(rounds: int, streams: int, servers: dict[str, Server]) -> tuple[Rounds, Rounds]:
    """Tokens per second, and processor seconds a token, of both servers in each round."""
    rates: Rounds = {name: [] for name in servers}
    costs: Rounds = {name: [] for name in servers}
    num_tokens = streams * REQUESTS_PER_STREAM * OUTPUT_TOKENS
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=number % 2 == 0):
            pid = servers[name].process.pid
            before = processor_seconds(pid)
            tokens_per_second = asyncio.run(rate(servers[name].port, "plain", streams, 1000 * number))
            if number:  # The first round warms up.
                rates[name].append(tokens_per_second)
                costs[name].append((processor_seconds(pid) - before) / num_tokens)
    return rates, costs


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
        rates, costs = measure(options.rounds, options.streams, servers)
    seconds_of_spans(endpoint)  # Warms up.
    loop, all_threads = seconds_of_spans(endpoint)
    a_request = statistics.median(costs["without"]) * OUTPUT_TOKENS
    rows = [
        *([f"{name} tracing, tokens/s", f"{statistics.median(each):.0f}", _span(each, 0)] for name, each in rates.items()),
        ["tokens/s, with over without", *_ratios(rates)],
        ["processor time a token, with over without", *_ratios(costs)],
        ["processor time a request without, ms", f"{a_request * 1e3:.1f}", ""],
        ["spans of a request, event loop, microseconds", f"{loop * 1e6:.0f}", ""],
        ["spans of a request, all threads, microseconds", f"{all_threads * 1e6:.0f}", f"{all_threads / a_request:.2%} of a request"],
    ]
    show(["", "median", "from, to"], rows)
    collector.kill()


def _ratios(found: Rounds) -> tuple[str, str]:
    """The median of the rounds' ratios, and the smallest and largest."""
    ratios = [traced / plain for traced, plain in zip(found["with"], found["without"], strict=True)]
    return f"{statistics.median(ratios):.4f}", _span(ratios, 4)


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f}, {max(values):.{digits}f}"


if __name__ == "__main__":
    main()
