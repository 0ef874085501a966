"""64 tokens on a quiet machine and beside busy processes, with the engine's OpenMP threads spinning as libgomp has them and as we set them.

    python -m bench.busy_host --output DIR [--model FOLDER] [--quantization int8] [--streams 1,8,32] [--busy 2] [--rounds 5]

One server for each way of spinning runs on the same model; their requests alternate, so the machine's drift reaches all of them. The fair
share of a busy machine is the quiet time, times (engine threads + busy processes) / processors, at least 1. Without --model the embedded
model is measured. libgomp's own busy time is taken once: it is long and decides nothing.
The exit status is 0 if the quiet speed is at least 0.90 of libgomp's default and the busy time at most 2.5 fair shares.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from server.config import EMBEDDED_MODEL
from server.supervision.processors import available_processors, engine_threads
from tests.support.processes import ServerProcess
from tests.support.report import Check, Found, conclude, progress, show
from tests.support.wire import http_request

TOKENS = 64
LIBGOMP_SPINS = "300000"
"""libgomp's default where OMP_WAIT_POLICY is not set."""
LEAST_SPEED, MOST_SHARES = 0.90, 2.5
SETTLE_SECONDS = 0.3
TIMEOUT = 900.0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that take all the processor time they get."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def generate(server: ServerProcess, number: int) -> list[float]:
    """The times of a stream's events. Raises ValueError for a stream that lacks some."""
    body = {"inputs": f"def f{number}(", "parameters": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    times = []
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        connection.sendall(http_request("POST", "/generate_stream", body))
        while data := connection.recv(2**16):
            times += [time.perf_counter()] * data.count(b"data: {")
    if len(times) != TOKENS:
        raise ValueError(f"{len(times)} events came of {TOKENS}")
    return times


def note(found: Found, when: str, server: ServerProcess, streams: int) -> None:
    """Adds a round: the seconds until each of so many requests that begin together has its 64 tokens, and the inter-token latencies."""
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        times = list(threads.map(generate, [server] * streams, range(streams)))
    found[when].append(max(each[-1] for each in times) - began)
    found[f"{when} gaps"] += [after - before for each in times for before, after in pairwise(each)]


def measure(servers: dict[str, ServerProcess], streams: int, rounds: int, num_busy: int) -> dict[str, Found]:
    """For each way of spinning: the seconds of every round, quiet and busy, and all inter-token latencies."""
    found: dict[str, Found] = {name: {"quiet": [], "busy": [], "quiet gaps": [], "busy gaps": []} for name in servers}
    for server in servers.values():
        note({"warm": [], "warm gaps": []}, "warm", server, streams)
    for _ in range(rounds):
        for name, server in servers.items():
            note(found[name], "quiet", server, streams)
    with busy(num_busy):
        for number in range(rounds):
            for name, server in servers.items():
                if number == 0 or name != "libgomp":
                    note(found[name], "busy", server, streams)
    return found


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def judged(found: dict[str, Found], share: float) -> list[tuple[str, float, float, float, float, float, float, float]]:
    """(name, quiet median, its speed beside the default's, busy median, longest, busy median in fair shares, quiet p99 of inter-token
    latency, busy p99 in fair shares) for each way of spinning.
    """
    quiet = {name: statistics.median(one["quiet"]) for name, one in found.items()}
    default = next(iter(quiet.values()))
    rows = []
    for name, one in found.items():
        median = statistics.median(one["busy"])
        latency = p99(one["quiet gaps"])
        late = p99(one["busy gaps"]) / (latency * share)
        rows.append(
            (name, quiet[name], default / quiet[name], median, max(one["busy"]), median / (quiet[name] * share), latency * 1e3, late)
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spins", default="", help="further values of GOMP_SPINCOUNT to measure, separated by commas")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ways = {"libgomp": {"GOMP_SPINCOUNT": LIBGOMP_SPINS}, "onehead": {}}
    ways |= {value: {"GOMP_SPINCOUNT": value} for value in options.spins.split(",") if value}
    processors, threads = available_processors(), engine_threads(None)
    share = max(1.0, (threads + options.busy) / processors)
    rows, result, checks = [], {}, []
    with ExitStack() as stack, progress() as bar:
        arguments = ("--engine.quantization", options.quantization, "--cache.memory", "1GiB", "--server.log_level", "warning")
        servers = {
            name: stack.enter_context(ServerProcess(options.model, *arguments, stderr=None, environment=environment))
            for name, environment in ways.items()
        }
        counts = [int(streams) for streams in options.streams.split(",")]
        for streams in bar.track(counts, description="streams"):
            result[str(streams)] = measure(servers, streams, options.rounds, options.busy)
            for name, quiet, speed, median, longest, shares, *gaps in judged(result[str(streams)], share):
                rows.append((streams, name, quiet, speed, median, longest, shares, *gaps))
                if name == "onehead":
                    holds = speed >= LEAST_SPEED and shares <= MOST_SHARES
                    what = f"{streams} streams: quiet speed at least {LEAST_SPEED}, busy at most {MOST_SHARES} fair shares"
                    checks.append(Check(what, holds, f"{speed:.2f}, {shares:.2f}"))
    caption = (
        f"{TOKENS} tokens, {threads} threads, {options.busy} busy processes, {processors:g} processors: fair share {share:g} quiet times"
    )
    show(("streams", "spinning", "quiet s", "speed", "busy s", "longest s", "shares", "p99 ms", "busy p99, shares"), rows, caption)
    info = {"model": options.model.name, "quantization": options.quantization, "threads": threads, "processors": processors}
    name = f"busy-host-{options.model.name}-{options.quantization}"
    return conclude(name, options.output, info, {"rounds": options.rounds, "seconds": result}, checks)


if __name__ == "__main__":
    sys.exit(main())
