"""More than the server takes: 2,000 connections at once, clients that send byte by byte, clients
that never read.

    python -m tests.trials.flood --output DIR [--phase flood|header|body|readers|all] [--connections
    2000]

    flood    places for 64 requests; all connections are opened, then all requests sent,
    three times. Each admitted one must get the whole
             right answer, all others 429 with Retry-After,
             and the server must hold afterwards what it held before the last time.
    header   connections that send a byte of their headers each second        body     the same with a body
    readers  clients that ask for a long stream and read nothing

Latency of a refusal is told twice: as the clients see it, whose own event loop shares the cores
with the server and has to go through all sockets as well; and as the server's access log has it,
counted from when the headers had been read. Exit status 1 for any miss.
"""  # noqa: E501

import argparse
import asyncio
import json
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from commands.bench.figures import spread
from tests.support.constants import launcher
from tests.support.live import Answer, Ask, Reply, Server, ask, asks, receive
from tests.support.report import Check, Found, Memory, conclude, raise_file_limit, show, usage
from tests.support.wire import http_request

PLACES, RUNNING = 64, 16
WAVES = 3
"""The first warms the server up: what the last leaves is compared with what the one before left."""
HEADER_TIMEOUT, BODY_TIMEOUT, WRITE_TIMEOUT = 4.0, 5.0, 3.0
SLACK = 2.0
"""Seconds beyond a timeout in which a connection must be gone: sockets are looked at once in a
while, not at every moment."""
REFUSED_WITHIN = 0.050
BAND = 0.03
"""Of resident memory: what it may differ by when nothing is held."""
BYTES_PER_CONNECTION = 64 * 1024
BYTES_PER_READER = 2 * 2**20
OPTIONS = {
    "engine.max_running": RUNNING,
    "server.max_waiting": PLACES - RUNNING,
    "server.log_format": "json",
    "server.lb_grace": 0,
}
CONSTANTS = {
    "server.http.connection.HEAD_SECONDS": HEADER_TIMEOUT,
    "server.http.connection.BODY_SECONDS": BODY_TIMEOUT,
    "server.http.connection.WRITE_SECONDS": WRITE_TIMEOUT,
}


class Caller(asyncio.Protocol):
    """One connection that does as little as it can while others are measured: it keeps what comes,
    and when.
    """

    def __init__(self, question: Ask) -> None:
        self.question = question
        self.data = bytearray()
        self.sent = self.first = 0.0
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> None:
        self.sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.first = self.first or time.perf_counter()
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(error)

    async def reply(self) -> Reply:
        """What came, to be read like any other reply. Raises EOFError where that is no head."""
        reader = asyncio.StreamReader(limit=2**20)
        reader.feed_data(bytes(self.data))
        reader.feed_eof()
        return await Reply(reader, None).read_head()


@dataclass(slots=True)
class Wave:
    """One flood and what came of it."""

    connect_s: float = 0.0
    send_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    logged_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    fds: tuple[int, int] = (0, 0)


async def judge(caller: Caller, oracle: Answer, wave: Wave) -> None:
    """One connection: a whole right answer, a refusal as it should be, or neither."""
    answer = Answer(caller.question)
    try:
        reply = await caller.reply()
        if reply.status == 429:
            after = reply.headers.get("retry-after", "")
            good = re.fullmatch(r"[1-9][0-9]*", after) and "error" in json.loads(await reply.body())
            wave.outcomes["refused" if good else "refused badly"] += 1
            wave.refused_ms.append((caller.first - caller.sent) * 1e3)
            if not good:
                wave.wrong.append(f"429 with retry-after {after!r}: {bytes(caller.data[-300:])!r}")
            return
        await receive(reply, answer)
    except (EOFError, ValueError, KeyError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    problem = answer.problem(oracle)
    wave.outcomes["answered" if problem is None else "wrong"] += 1
    if problem is not None:
        wave.wrong.append(problem)


async def flood(server: Server, connections: int, oracles: list[Answer]) -> Wave:
    """All connections, then all requests, then every end."""
    wave, loop = Wave(), asyncio.get_running_loop()
    pid = server.process.pid
    before, offset = open_fds(pid), server.log.stat().st_size
    requests = [oracle.ask.request() for oracle in oracles]
    with Memory(pid) as memory:
        began = time.perf_counter()
        questions = [oracles[i % len(oracles)].ask for i in range(connections)]
        made = await asyncio.gather(
            *(
                loop.create_connection(
                    lambda question=q: Caller(question), "127.0.0.1", server.port
                )
                for q in questions
            )
        )
        callers = [caller for _, caller in made]
        wave.connect_s = time.perf_counter() - began
        for i, caller in enumerate(callers):
            caller.send(requests[i % len(requests)])
        wave.send_s = time.perf_counter() - callers[0].sent
        await asyncio.wait([caller.gone for caller in callers], timeout=180)
        for caller in callers:
            caller.transport.abort()
        after = await until_fds(pid, before)
    for i, caller in enumerate(callers):
        await judge(caller, oracles[i % len(oracles)], wave)
    wave.memory = {"before": memory.before, "peak": memory.peak, "after": memory.now}
    wave.fds, wave.logged_ms = (before, after), logged(server.log, offset, 429)
    return wave


def open_fds(pid: int) -> int:
    found = usage(pid)
    return 0 if found is None else found.fds


async def until_fds(pid: int, wanted: int, seconds: float = 10.0) -> int:
    """Waits until the process has no more descriptors than wanted; how many it has."""
    end = time.monotonic() + seconds
    while open_fds(pid) > wanted and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return open_fds(pid)


def logged(log: Path, offset: int, status: int) -> list[float]:
    """Milliseconds of the access log's lines with a status."""
    found = []
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("status") == status:
                    found.append(float(entry["milliseconds"]))
    return found


def flood_checks(waves: list[Wave], connections: int) -> list[Check]:
    checks = []
    for number, wave in enumerate(waves, 1):
        counts = wave.outcomes
        words = ", ".join(f"{count} {name}" for name, count in sorted(wave.outcomes.items()))
        words += f"; {wave.wrong[0]}" if wave.wrong else ""
        whole = counts["answered"] + counts["refused"] == connections
        full = counts["answered"] + counts["wrong"] >= PLACES and counts["refused"] > 0
        checks += [
            Check(
                f"wave {number}: each gets its whole right answer, or 429 with Retry-After",
                whole,
                words,
            ),
            Check(
                f"wave {number}: all places are used, and some are refused",
                full,
                words,
            ),
            Check(
                f"wave {number}: descriptors as before",
                wave.fds[1] <= wave.fds[0],
                f"{wave.fds[0]} before, {wave.fds[1]} after",
            ),
        ]
        slowest = max(wave.logged_ms, default=float("inf"))
        told = f"{len(wave.logged_ms)} lines, {slowest:.1f} ms at most"
        complete = len(wave.logged_ms) == counts["refused"] and slowest <= REFUSED_WITHIN * 1e3
        checks.append(
            Check(
                f"wave {number}: refused within {REFUSED_WITHIN * 1e3:.0f} ms of being read",
                complete,
                told,
            )
        )
    first, last = waves[-2].memory, waves[-1].memory
    most = connections * BYTES_PER_CONNECTION
    grown = max(wave.memory["peak"] - wave.memory["before"] for wave in waves)
    kept = last["after"] / first["after"] - 1
    checks.append(
        Check(
            "memory at the peak is bounded",
            grown <= most,
            f"{mib(grown)} more, {mib(most)} allowed",
        )
    )
    checks.append(
        Check(
            f"the last wave leaves what the one before left, within {BAND:.0%}",
            kept <= BAND,
            f"{kept:+.1%} of {mib(first['after'])}",
        )
    )
    return checks


def mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


# --- clients that are slow on purpose


@dataclass(slots=True)
class Slow:
    """What became of connections that send a byte each second."""

    closed_after: list[float] = field(default_factory=list)
    first_lines: Counter[str] = field(default_factory=Counter)
    canary_s: list[float] = field(default_factory=list)
    canary_wrong: list[str] = field(default_factory=list)
    fds: tuple[int, int] = (0, 0)


async def drip(server: Server, head: bytes, rest: bytes, limit: float, found: Slow) -> None:
    """Sends `head`, then a byte of `rest` each second, until the server closes or `limit` seconds
    have passed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    began = time.perf_counter()
    reading = asyncio.create_task(reader.read())
    with suppress(OSError):
        writer.write(head)
        for byte in rest:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([reading], timeout=1)
            if done or time.perf_counter() - began > limit:
                break
    if reading.done():
        found.closed_after.append(time.perf_counter() - began)
        data = b"" if reading.exception() else reading.result()
        found.first_lines[data.split(b"\r\n")[0].decode("latin-1") or "closed without a word"] += 1
    else:
        found.first_lines["still open"] += 1
        reading.cancel()
    writer.transport.abort()


async def slow(server: Server, count: int, phase: str, oracle: Answer) -> Slow:
    """`count` slow connections at once, and a request each second that must not notice them."""
    found, pid = Slow(), server.process.pid
    before = open_fds(pid)
    head, rest = b"", http_request("GET", "/ready", headers={"x-long": "a" * 200})
    timeout = HEADER_TIMEOUT
    if phase == "body":
        whole = http_request("POST", "/generate", {"inputs": "a" * 200})
        head, rest = whole.split(b"\r\n\r\n")[0] + b"\r\n\r\n", whole.split(b"\r\n\r\n")[1]
        timeout = BODY_TIMEOUT
    dripping = asyncio.gather(
        *(drip(server, head, rest, timeout + 3 * SLACK, found) for _ in range(count))
    )
    while not dripping.done():
        answer = await ask(server.port, oracle.ask)
        found.canary_s.append(answer.end - answer.sent)
        found.canary_wrong += filter(None, [answer.problem(oracle)])
        await asyncio.wait([dripping], timeout=1)
    await dripping
    found.fds = (before, await until_fds(pid, before))
    return found


def slow_checks(phase: str, found: Slow, count: int) -> list[Check]:
    timeout = HEADER_TIMEOUT if phase == "header" else BODY_TIMEOUT
    latest = max(found.closed_after, default=0.0)
    gone = len(found.closed_after) == count and latest <= timeout + SLACK
    told = ", ".join(f"{number} x {line}" for line, number in found.first_lines.most_common())
    good = found.first_lines == Counter({"HTTP/1.1 408 Request Timeout": count})
    return [
        Check(
            f"slow {phase}: {count} are closed within {timeout:g} + {SLACK:g} s",
            gone,
            f"{len(found.closed_after)}, the last at {latest:.1f} s",
        ),
        Check(f"slow {phase}: each is told 408", good, told),
        Check(
            f"slow {phase}: others do not notice",
            not found.canary_wrong,
            f"{len(found.canary_s)} canaries, {max(found.canary_s):.2f} s at most",
        ),
        Check(
            f"slow {phase}: descriptors as before",
            found.fds[1] <= found.fds[0],
            f"{found.fds[0]} before, {found.fds[1]} after",
        ),
    ]


async def never_read(server: Server, count: int, oracle: Answer) -> tuple[Found, list[Check]]:
    """Long streams whose clients read nothing: each must be dropped and its work ended while its
    client still holds the connection.
    """
    pid, before = server.process.pid, open_fds(server.process.pid)
    cancelled = await outcome(server, "cancelled")
    # Token by token the likeliest five are told too: that fills buffers sooner.
    parameters = {"max_new_tokens": 3000, "ignore_eos": True, "top_n_tokens": 5}
    request = http_request(
        "POST", "/generate_stream", {"inputs": "def f(", "parameters": parameters}
    )
    sockets, began = [], time.perf_counter()
    with Memory(pid) as memory:
        for _ in range(count):
            each = socket.socket()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(("127.0.0.1", server.port))
            each.sendall(request)
            sockets.append(each)
        answer = await ask(server.port, oracle.ask)
        after = await until_fds(pid, before, seconds=120)
        seconds = time.perf_counter() - began
    idle = await server.until_idle(5)
    for each in sockets:
        each.close()
    dropped = await outcome(server, "cancelled") - cancelled
    grown, most = memory.peak - memory.before, count * BYTES_PER_READER
    problem = answer.problem(oracle)
    checks = [
        Check(
            f"{count} that never read: all are dropped",
            after <= before,
            f"{after - before} more descriptors after {seconds:.1f} s",
        ),
        Check(
            "readers: what they asked for is no longer computed",
            dropped == count and idle,
            f"{dropped:.0f} cancelled, idle {idle}",
        ),
        Check(
            "readers: memory is bounded",
            grown <= most,
            f"{mib(grown)} more at the peak, {mib(most)} allowed",
        ),
        Check(
            "readers: others are answered",
            problem is None,
            problem or f"answered in {answer.end - answer.sent:.2f} s",
        ),
    ]
    memories = {"before": memory.before, "peak": memory.peak, "after": memory.now}
    return {"seconds": seconds, "dropped": dropped, "memory": memories}, checks


async def outcome(server: Server, name: str) -> float:
    """Requests that ended so, by the server's own count."""
    found = re.search(
        rf'onehead_requests_total{{outcome="{name}"}} (\S+)', (await server.get("/metrics"))[1]
    )
    return float(found[1]) if found else 0.0


async def flood_phase(
    server: Server, connections: int, oracles: list[Answer]
) -> tuple[Found, list[Check]]:
    waves = [await flood(server, connections, oracles) for _ in range(WAVES)]
    rows = []
    for number, wave in enumerate(waves, 1):
        for seen, values in (("client", wave.refused_ms), ("server", wave.logged_ms)):
            figures = spread(values) or {"p50": 0.0, "p99": 0.0, "max": 0.0}
            rows.append(
                (f"{number}, {seen}", len(values), figures["p50"], figures["p99"], figures["max"])
            )
    show(("wave, seen by", "refused", "p50 ms", "p99 ms", "max ms"), rows)
    told = [
        {
            "connect_s": w.connect_s,
            "send_s": w.send_s,
            "outcomes": w.outcomes,
            "wrong": w.wrong[:20],
            "memory": w.memory,
            "fds": w.fds,
        }
        | {"refused_ms": {"client": spread(w.refused_ms), "server": spread(w.logged_ms)}}
        for w in waves
    ]
    return {"waves": told}, flood_checks(waves, connections)


async def slow_phase(
    server: Server, count: int, phase: str, oracle: Answer
) -> tuple[Found, list[Check]]:
    found = await slow(server, count, phase, oracle)
    told = {
        "closed_after": spread(found.closed_after),
        "first_lines": found.first_lines,
        "canary_s": spread(found.canary_s),
    }
    return told, slow_checks(phase, found, count)


async def run(options: argparse.Namespace, folder: Path) -> int:
    wanted = options.connections + 200
    if raise_file_limit() < wanted:
        raise SystemExit(f"this needs {wanted} file descriptors; raise the limit (ulimit -n)")
    arguments = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    server = await Server.start(
        folder / "flood.log", *arguments, launcher=launcher(CONSTANTS, "commands.cli")
    )
    result: Found = {"options": OPTIONS, "constants": CONSTANTS, "phases": {}}
    checks: list[Check] = []
    status = -1
    try:
        info = await server.info()
        oracles = [await ask(server.port, question) for question in asks(8, 24, seed=3)]
        for phase in (
            ("flood", "header", "body", "readers") if options.phase == "all" else (options.phase,)
        ):
            if phase == "flood":
                told, found = await flood_phase(server, options.connections, oracles)
            elif phase == "readers":
                told, found = await never_read(server, options.readers, oracles[0])
            else:
                told, found = await slow_phase(server, options.slow, phase, oracles[0])
            result["phases"][phase], checks = told, checks + found
    finally:
        status = await server.stop()
    checks.append(Check("exit status 0", status == 0, str(status)))
    return conclude("flood", options.output, info, result, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="an existing folder")
    parser.add_argument(
        "--phase", choices=("flood", "header", "body", "readers", "all"), default="all"
    )
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument(
        "--slow", type=int, default=200, help="connections of the phases header and body"
    )
    parser.add_argument("--readers", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(run(options, options.output or Path(scratch))))


if __name__ == "__main__":
    main()
