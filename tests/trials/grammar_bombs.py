"""Grammar bombs beside ordinary load: what becomes of them, in how long, and what 16 other streams
notice.

    python -m tests.trials.grammar_bombs --output grammar-bombs.json

Starts `onehead serve` on the embedded model, runs 16 streams through it without bombs and with a
new bomb every 0.2 s, in turn, and reports the gaps between tokens of the streams, the answers to
the bombs and how long each took. Every bomb differs from the last by a comment or a number, so that
none is answered from the cache of grammars.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

STREAMS, TOKENS, ROUNDS = 16, 250, 3


def bombs(number: int) -> dict[str, dict[str, Any]]:
    """Name -> what a request asks for: expressions and schemas that have brought other servers
    down.
    """
    regex = {
        "(a+)+b": f"(a+)+b{number}",
        "(?:a{1,1000}){1000}": f"(?:a{{1,1000}}){{1000}}{number}",
        "(a|b)*a(a|b){20}": f"(a|b)*a(a|b){{20}}{number}",
        "look-behind": f"(?<=a)b{number}",
        "back-reference": f"(a)\\1{number}",
    }
    deep: dict[str, Any] = {"type": "string", "const": str(number)}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    schemas: dict[str, dict[str, Any]] = {
        "nested 100 deep": deep,
        "$ref cycle": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "title": str(number),
        },
        "remote $ref": {"$ref": f"http://127.0.0.1:9/{number}.json"},
        "enum of 100,000": {"enum": [f"{number}-{i}" for i in range(100_000)]},
        "enum of 3,000": {"enum": [f"{number}-{i}" for i in range(3_000)]},
        "600 patterns": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^a{i}{number}+$"} for i in range(600)
            },
        },
        "maxItems 10,000,000": {
            "type": "array",
            "items": {"const": number},
            "minItems": 1_000_000,
            "maxItems": 10_000_000,
        },
    }
    lark = {"ambiguous Lark": f'start: (e{{1,30}}){{1,30}} "{number}"\ne: "a" | "b" e'}
    return (
        {name: {"structured_outputs": {"regex": value}} for name, value in regex.items()}
        | {name: {"structured_outputs": {"json": value}} for name, value in schemas.items()}
        | {name: {"structured_outputs": {"grammar": value}} for name, value in lark.items()}
    )


async def stream(client: httpx.AsyncClient, number: int) -> list[float]:
    """The gaps between the events of one stream, in seconds."""
    body = {
        "inputs": f"def function_{number}(",
        "parameters": {"max_new_tokens": TOKENS, "ignore_eos": True},
    }
    times: list[float] = []
    async with client.stream("POST", "/generate_stream", json=body, timeout=120) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter())
    assert len(times) == TOKENS
    return [later - earlier for earlier, later in pairwise(times)]


async def throw(
    client: httpx.AsyncClient,
    until: asyncio.Event,
    results: dict[str, list[tuple[int, float]]],
    first: int,
) -> int:
    """A bomb every 0.2 s, each answered or not, until told to stop; the next number."""
    tasks: list[asyncio.Task[None]] = []

    async def one(name: str, extra: dict[str, Any]) -> None:
        began = time.perf_counter()
        response = await client.post(
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 40, "temperature": 0, **extra},
            timeout=120,
        )
        results.setdefault(name, []).append((response.status_code, time.perf_counter() - began))

    number = first
    while not until.is_set():
        for name, extra in bombs(number).items():
            tasks.append(asyncio.create_task(one(name, extra)))
            await asyncio.sleep(0.2)
            if until.is_set():
                break
        number += 1
    await asyncio.gather(*tasks)
    return number


async def measure(url: str) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    results: dict[str, list[tuple[int, float]]] = {}
    number = 0
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, limits=httpx.Limits(max_connections=200)
    ) as client:
        await asyncio.gather(*(stream(client, i) for i in range(STREAMS)))
        for _ in range(ROUNDS):
            for kind in ("without", "with"):
                until = asyncio.Event()
                thrower = (
                    asyncio.create_task(throw(client, until, results, number))
                    if kind == "with"
                    else None
                )
                for stream_gaps in await asyncio.gather(
                    *(stream(client, i) for i in range(STREAMS))
                ):
                    gaps[kind] += stream_gaps
                until.set()
                number = await thrower if thrower is not None else number
    return {
        "gap_ms": {
            kind: {
                "p50": statistics.median(values) * 1e3,
                "p99": statistics.quantiles(values, n=100)[98] * 1e3,
                "max": max(values) * 1e3,
            }
            for kind, values in gaps.items()
        },
        "bombs": {
            name: {
                "statuses": sorted({status for status, _ in answers}),
                "count": len(answers),
                "median_ms": statistics.median(seconds for _, seconds in answers) * 1e3,
                "max_ms": max(seconds for _, seconds in answers) * 1e3,
            }
            for name, answers in sorted(results.items())
        },
    }


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "commands.cli",
        "serve",
        "--port",
        "0",
        "--cache.pages",
        "400",
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        line = (await server.stdout.readline()).decode()
        result = {"cpus": os.cpu_count(), **await measure(line.rsplit(" ", 1)[1].strip())}
    finally:
        server.terminate()
        await server.wait()
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
