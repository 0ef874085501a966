"""Replicas behind Ray Serve: what routing by prefix is worth, and how throughput grows with replicas.

    python -m bench.fleet --output DIR [--parts conversations,throughput] [--conversations 2000] [-- --engine.threads 1]

conversations  one server, and 2 and 4 replicas with affinity and without: conversations of 2 to 6 turns, interleaved, under five system
               prompts; the share of prompt tokens that prefix caches had, and whether every token is the single server's
throughput     one server, and 1 and 2 replicas: requests of 64 tokens from 32 clients, streamed and whole

Needs the extra `ray`. Arguments after `--` are options of the servers. Writes fleet.json into DIR, an existing folder. Exit status 1 where
a token differs, or where affinity finds less in the caches than routing by load does.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from bench.conversations import Conversation, Ideal, make_conversations
from bench.prefix_cache import HITS, QUERIES, play
from server.config import EMBEDDED_MODEL
from tests.support.live import Answer, Ask, Server, ask
from tests.support.ray_cluster import Cluster, run_parts
from tests.support.report import Check, Found, conclude, show

PARTS = "conversations", "throughput"
OPTIONS = "--engine.threads", "1", "--cache.pages", "2048", "--server.log_level", "warning"
PAGE_SIZE = 64
CLIENTS, TOKENS = 32, 64


def fresh_conversations(options: argparse.Namespace) -> list[Conversation]:
    """The same each time."""
    vocab_size = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json")).get_vocab_size()
    return make_conversations(options.conversations, vocab_size, options.reply, 4096, options.seed)


async def start(replicas: int, options: argparse.Namespace, folder: Path, affinity: bool) -> Server | Cluster:
    """That many replicas, or a server alone for 0."""
    if not replicas:
        return await Server.start(folder / "single.log", *options.server)
    told = " ".join(options.server)
    return await Cluster.start(folder / "ray.log", options=told, min_replicas=replicas, max_replicas=replicas, affinity=affinity)


async def hits(server: Server | Cluster) -> tuple[list[float], float]:
    """Of each replica, the rate of hits; and that of all."""
    each = list((await server.metrics()).values()) if isinstance(server, Cluster) else [await server.metrics()]
    rates = [one[HITS] / max(1.0, one[QUERIES]) for one in each]
    return rates, sum(one[HITS] for one in each) / sum(one[QUERIES] for one in each)


async def conversations(options: argparse.Namespace, folder: Path) -> tuple[Found, list[Check]]:
    """Each number of replicas in turn, the single server first."""
    expected: list[list[int]] = []
    rows: list[Found] = []
    for replicas, affinity in ((0, True), (2, True), (2, False), (4, True), (4, False)):
        talks, ideal = fresh_conversations(options), Ideal(PAGE_SIZE)
        server = await start(replicas, options, folder, affinity)
        try:
            began = time.perf_counter()
            await play(server.port, talks, ideal, options)
            seconds = time.perf_counter() - began
            rates, rate = await hits(server)
        finally:
            await server.stop()
        said = [talk.tokens for talk in talks]
        expected = expected or said
        differing = sum(a != b for a, b in zip(said, expected, strict=True))
        told = {"replicas": replicas, "affinity": affinity, "rate": rate, "rates": rates, "differing": differing, "seconds": seconds}
        rows.append(told | ideal.told())
        print(rows[-1], flush=True)
    show_conversations(rows)
    by_affinity = {(row["replicas"], row["affinity"]): row["rate"] for row in rows}
    checks = [
        Check("tokens of every conversation are the single server's", not any(row["differing"] for row in rows), f"{len(expected)} each")
    ]
    for replicas in (2, 4):
        ours, load = by_affinity[replicas, True], by_affinity[replicas, False]
        checks.append(Check(f"{replicas} replicas: affinity finds more in the caches", ours > load, f"{ours:.2%} and {load:.2%}"))
    return {"conversations": rows}, checks


def show_conversations(rows: list[Found]) -> None:
    """The table of `conversations`."""
    headings = "replicas", "routed by", "requests", "hit rate", "of each", "at best", "differing", "requests/s"
    cells = []
    for row in rows:
        routed = ("prefix" if row["affinity"] else "load") if row["replicas"] else "-"
        each = " ".join(f"{rate:.0%}" for rate in row["rates"])
        best, speed = f"{row['ideal_rate_of_pages']:.1%}", f"{row['prompts'] / row['seconds']:.1f}"
        cells.append((row["replicas"] or "none", routed, row["prompts"], f"{row['rate']:.1%}", each, best, row["differing"], speed))
    show(headings, cells, "hit rate: prompt tokens that were in a prefix cache; at best: whole pages, one cache that forgets nothing")


async def client(port: int, questions: Iterator[Ask]) -> list[Answer]:
    """Asks one after the other until there are none left."""
    return [await ask(port, question) for question in questions]


async def loaded(port: int, stream: bool, options: argparse.Namespace) -> Found:
    """Requests of 64 tokens from 32 clients: tokens a second, the median time to the first event, and failures."""
    rng = random.Random(options.seed)
    questions = [Ask("openai", rng.choices(range(1000, 1999), k=32), TOKENS, stream=stream) for _ in range(options.requests)]
    began, left = time.perf_counter(), iter(questions)
    answers = [answer for each in await asyncio.gather(*(client(port, left) for _ in range(CLIENTS))) for answer in each]
    speed = len(answers) * TOKENS / (time.perf_counter() - began)
    firsts = [answer.times[0] - answer.sent for answer in answers if answer.times]
    failed = [answer.failure for answer in answers if answer.failure]
    return {"stream": stream, "tokens_per_second": speed, "ttft": statistics.median(firsts) if firsts else None, "failed": failed}


async def throughput(options: argparse.Namespace, folder: Path) -> tuple[Found, list[Check]]:
    """Streams, and whole answers."""
    rows: list[Found] = []
    for replicas in (0, 1, 2):
        server = await start(replicas, options, folder, True)
        try:
            await ask(server.port, Ask("openai", [5], 1))
            for stream in (True, False):
                rows.append({"replicas": replicas} | await loaded(server.port, stream, options))
        finally:
            await server.stop()
    cells = []
    for row in rows:
        kind = "streamed" if row["stream"] else "whole"
        first = "-" if row["ttft"] is None else f"{row['ttft'] * 1000:.0f}"
        cells.append((row["replicas"] or "none", kind, f"{row['tokens_per_second']:.0f}", first, len(row["failed"])))
    show(("replicas", "answers", "tokens/s", "TTFT, median ms", "failed"), cells)
    return {"throughput": rows}, [Check("throughput: no request fails", not any(row["failed"] for row in rows), f"{len(rows)} runs")]


async def run(options: argparse.Namespace, folder: Path) -> int:
    """The parts that were asked for."""
    result: Found = {"options": options.server}
    checks: list[Check] = []
    for name, part in (("conversations", conversations), ("throughput", throughput)):
        if name in options.parts:
            found, more = await part(options, folder)
            result, checks = result | found, checks + more
    return conclude("fleet", options.output, {}, result, checks)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--open", type=int, default=64, help="conversations that are begun and not ended at any time")
    parser.add_argument("--clients", type=int, default=16, help="requests at once")
    parser.add_argument("--reply", type=int, default=8, help="tokens of each reply in a conversation")
    parser.add_argument("--requests", type=int, default=192, help="of each run of throughput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server", nargs="*", default=list(OPTIONS), help="options of the servers, after --")
    run_parts(parser, PARTS, run)


if __name__ == "__main__":
    main()
