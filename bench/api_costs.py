"""What a streamed token costs the API process: `python -m bench.api_costs --output DIR [--
SERVE_OPTIONS]`.

The server is the production one; in place of an engine it starts a process that gives every open
sequence a token in each step, at a pace or as fast as the pipe takes them. Processor seconds of the
API process are counted, from its first token to its last. In TGI's dialect tokens bear the time at
which the engine sends them, so that the added latency can be told (`p99_ms`). Invariant: every
stream must bring every token. It knows nothing of models.
"""

import argparse
import json
import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from commands.bench.figures import circumstances
from model.checkpoint.families import read_spec
from server import protocol
from tests.support.processes import ServerProcess
from tests.support.report import show
from tests.support.wire import http_request

ROOT = Path(__file__).resolve().parents[1]
PACE = "BENCH_PUPPET_PACE"
"""Milliseconds from one step to the next, in the puppet's environment."""
PROMPT_TOKENS, FIRST_ID, IDS = 16, 100, 4000
BEAT_SECONDS = 1.0
EVENT, LOGPROB = b"data: {", b'"logprob":-'
OPTIONS = (
    "--server.log_level",
    "warning",
    "--engine.max_running",
    "1024",
    "--engine.step_tokens",
    "1024",
)
DIALECTS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "tgi": (
        "/generate_stream",
        lambda n: {"inputs": "def f(", "parameters": {"max_new_tokens": n, "ignore_eos": True}},
    ),
    "openai": (
        "/v1/completions",
        lambda n: {
            "prompt": [7] * PROMPT_TOKENS,
            "max_tokens": n,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        },
    ),
}


def puppet(pipe: Connection, pace: float) -> None:
    """An engine without a model. It ends with the pipe, or when it is told to."""
    start = protocol.decode_to_engine(pipe.recv_bytes())
    assert isinstance(start, protocol.Start)
    ready = protocol.Ready(
        model_type="puppet",
        dtype="float32",
        device="cpu",
        vocab_size=read_spec(Path(start.model), warn=False).vocab_size,
        max_context=8192,
        end_token_ids=[],
        num_parameters=0,
        page_size=64,
        num_pages=10**6,
        kv_dtype="float32",
        kv_bytes_per_token=1,
        capacity=8192,
        quantization="none",
        weight_bytes=0,
        page_bytes=64,
        kernels="none",
        deterministic=True,
        multi_head_bytes_per_token=1,
        sequences=[(8192, 1)],
        digest="",
    )
    pipe.send_bytes(protocol.encode(ready))
    open_: dict[int, int] = {}
    wanted: dict[int, int] = {}
    due = beat = time.monotonic()
    while True:
        while pipe.poll(0 if open_ else BEAT_SECONDS):
            message = protocol.decode_to_engine(pipe.recv_bytes())
            if isinstance(message, protocol.Shutdown):
                return
            if isinstance(message, protocol.Submit):
                open_[message.id], wanted[message.id] = 0, message.max_new_tokens
                pipe.send_bytes(protocol.encode(protocol.Started([message.id], [0])))
            elif isinstance(message, protocol.Cancel):
                open_.pop(message.id, None)
        if open_:
            tokens, now = [], -time.monotonic()
            for id, index in open_.items():
                last = index + 1 == wanted[id]
                tokens.append(
                    protocol.Token(
                        id,
                        index,
                        FIRST_ID + (index * 37 + id) % IDS,
                        now,
                        "length" if last else None,
                    )
                )
            pipe.send_bytes(
                protocol.encode(protocol.Tokens(tokens, protocol.Gauges(len(open_), 0, 1, 0, pace)))
            )
            open_ = {id: index + 1 for id, index in open_.items() if index + 1 < wanted[id]}
        now = time.monotonic()
        if now - beat > BEAT_SECONDS:
            beat = now
            pipe.send_bytes(protocol.encode(protocol.Heartbeat(int(now))))
        due = max(due + pace, now)
        time.sleep(max(0.0, due - now))


def measure(
    port: int, pid: int, dialect: str, num_streams: int, num_tokens: int
) -> dict[str, float]:
    """All streams at once. Microseconds of the processor in process `pid` and in this one, wall
    microseconds, the pieces in which the client received them, and their bytes, all per token; the
    99th percentile of the time from the engine to the client, of the first token of each piece, in
    milliseconds. Raises ValueError if a stream lacks events.
    """
    path, body = DIALECTS[dialect]
    request = http_request("POST", path, body(num_tokens))
    waiting = selectors.DefaultSelector()
    tails, events, pieces, num_bytes = [b""] * num_streams, [0] * num_streams, 0, 0
    for number in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        waiting.register(connection, selectors.EVENT_READ, number)
    began: tuple[float, float, float] | None = None
    num_silent, delays = num_streams, []
    while waiting.get_map():
        for key, _ in waiting.select():
            data = key.fileobj.recv(2**18)  # type: ignore[union-attr]
            if began is None and b"data: " in data:
                began = processor_seconds(pid), time.process_time(), time.monotonic()
            if b'data: {"error"' in data:
                raise ValueError(f"a stream failed: {data!r}")
            if not num_silent and (at := data.find(LOGPROB)) >= 0:
                delays.append(
                    time.monotonic() - float(data[at + len(LOGPROB) : data.index(b",", at)])
                )
            num_silent -= not events[key.data] and EVENT in data
            tails[key.data] = tails[key.data][1 - len(EVENT) :] + data
            events[key.data] += tails[key.data].count(EVENT)
            pieces += 1
            num_bytes += len(data)
            if not data:
                waiting.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    assert began is not None
    cpu = processor_seconds(pid) - began[0]
    own = time.process_time() - began[1]
    wall = time.monotonic() - began[2]
    count = num_streams * num_tokens
    if any(number != num_tokens for number in events):
        raise ValueError(f"{min(events)} events came of {num_tokens}")
    each = {
        "cpu_us": cpu / count * 1e6,
        "client_us": own / count * 1e6,
        "wall_us": wall / count * 1e6,
    }
    late = statistics.quantiles(delays, n=100)[98] * 1e3 if len(delays) > 1 else 0.0
    return each | {"writes": pieces / count, "bytes": num_bytes / count, "p99_ms": late}


def processor_seconds(pid: int) -> float:
    """Of a server's process, by the scheduler's own count: the usual one is in hundredths of a
    second.
    """
    return (
        sum(
            int(each.read_text().split()[0])
            for each in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        / 1e9
    )


def main() -> int:
    if PACE in os.environ:
        return as_server()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for api_costs.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--streams", default="1,8,32,256")
    parser.add_argument("--dialects", default=",".join(DIALECTS))
    parser.add_argument("serve", nargs="*", help="options of `onehead serve`, after --")
    parser.add_argument(
        "--pace",
        type=float,
        default=10.0,
        help="milliseconds from step to step; 0: as fast as it goes",
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dialect in options.dialects.split(","):
        for num_streams in map(int, options.streams.split(",")):
            pace = {PACE: str(options.pace)}
            with ServerProcess(
                None,
                *OPTIONS,
                *options.serve,
                launcher=("bench.api_costs",),
                stderr=None,
                environment=pace,
            ) as server:
                asked = server.port, server.process.pid, dialect, num_streams
                measure(*asked, 32)
                found = [measure(*asked, options.tokens) for _ in range(options.rounds)]
            row = {
                name: round(statistics.median(each[name] for each in found), 2) for name in found[0]
            }
            rows.append({"dialect": dialect, "streams": num_streams, **row})
    show(rows[0], (row.values() for row in rows), "microseconds, writes and bytes a token")
    value = circumstances({"pace_ms": options.pace}) | {"rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "api_costs.json").write_text(json.dumps(value, indent=1) + "\n")
    return 0


def as_server() -> int:
    """The server, or the puppet where a server starts it by a pipe's number."""
    if sys.argv[1].isdigit():
        puppet(Connection(int(sys.argv[1])), float(os.environ[PACE]) / 1e3)
        return 0
    from commands import cli
    from server.supervision import transport

    # Engines are started with -P, which keeps them from finding this package by themselves.
    os.environ["PYTHONPATH"] = str(ROOT)
    transport.ENGINE_MODULE = "bench.api_costs"
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
