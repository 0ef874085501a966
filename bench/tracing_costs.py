"""What `server.tracing_endpoint` costs: two servers of this tree, one of which sends its spans to a collector, in turns.

    python -m bench.tracing_costs [--rounds 5] [--streams 32]

Both servers run at the same time, and are asked in alternating order. The figures are medians of the rounds' ratios, with tracing over
without, of output tokens per second, and the processor time of a request in the process that serves HTTP, whose part of what a request
takes in all processes is what traces can add to: other work on the machine disturbs that less. Beside them stands the processor time
that the spans of a request take by themselves, in the event loop and with their export. The collector only throws away what it gets: a
real one runs elsewhere.
"""

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from bench.two_trees import OUTPUT_TOKENS, REQUESTS_PER_STREAM, Server, rate
from server.config import ServerSection
from server.generation.admission import Admission, Reservation
from server.generation.clients import EVERYBODY, Usage
from server.generation.request import Choice, Request
from server.http.exchange import Exchange
from server.http.tracing import Tracing
from server.metrics import Metrics
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
    admission = Admission(cast(Any, None), Metrics(), ServerSection(), 1)
    reservation = Reservation(admission, "", "", Usage(EVERYBODY), None)
    reservation.choices = [choice]
    began, all_began = time.thread_time(), time.process_time()
    for _ in range(NUM_REQUESTS):
        tracing.of(scope)(Exchange(status=200, request_id="request", reservation=reservation))
    loop = time.thread_time() - began
    time.sleep(EXPORT_SECONDS)
    return loop / NUM_REQUESTS, (time.process_time() - all_began) / NUM_REQUESTS


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, so far."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(rounds: int, streams: int, servers: dict[str, Server]) -> tuple[Rounds, Rounds, Rounds]:
    """Of both servers in each round: tokens per second, and processor seconds a request in the process that serves HTTP, and in all."""
    rates, costs, in_all = (dict[str, list[float]]() for _ in range(3))
    num_requests = streams * REQUESTS_PER_STREAM
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=number % 2 == 0):
            pid = servers[name].process.pid
            pids = [pid, *children(pid)]
            before = [processor_seconds(each) for each in pids]
            tokens_per_second = asyncio.run(rate(servers[name].port, "plain", streams, 1000 * number))
            if number:  # The first round warms up.
                spent = [processor_seconds(each) - earlier for each, earlier in zip(pids, before, strict=True)]
                rates.setdefault(name, []).append(tokens_per_second)
                costs.setdefault(name, []).append(spent[0] / num_requests)
                in_all.setdefault(name, []).append(sum(spent) / num_requests)
    return rates, costs, in_all


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
        rates, costs, in_all = measure(options.rounds, options.streams, servers)
    seconds_of_spans(endpoint)  # Warms up.
    loop, all_threads = seconds_of_spans(endpoint)
    a_request = statistics.median(in_all["without"])
    added = statistics.median(traced - plain for traced, plain in zip(costs["with"], costs["without"], strict=True))
    rows = [
        *([f"{name} tracing, tokens/s", f"{statistics.median(each):.0f}", _span(each, 0)] for name, each in rates.items()),
        ["tokens/s, with over without", *_ratios(rates)],
        [
            "processor time a request, all processes, without, ms",
            f"{a_request * 1e3:.1f}",
            _span([1e3 * each for each in in_all["without"]], 1),
        ],
        *(
            [f"the same, API process, {name}, ms", f"{statistics.median(each) * 1e3:.2f}", _span([1e3 * one for one in each], 2)]
            for name, each in costs.items()
        ),
        ["added a request, API process, microseconds", f"{added * 1e6:.0f}", f"{added / a_request:.2%} of a request"],
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
