"""What a viewer of /monitor knows, against the engine's own lists, at random moments under load.

    python -m tests.trials.page_map --output DIR [--moments 1000] [--kills 3] [-- SERVE_OPTIONS]

A server with a small cache gets requests with shared prefixes, a third of which are cut off; now
and then its engine is killed. A viewer takes the events of /monitor. At each moment /monitor/cache
is asked for the state between two steps, and the viewer's state of the same view must equal it:
every page, every sequence. The server makes one such state a second, so that 1,000 moments take 17
minutes. The options go to the server.
"""

import argparse
import asyncio
import copy
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from commands.bench.bench import prompt_text
from server.protocol import CACHED, OWNED, SHARED
from tests.support.cache_client import CacheClient
from tests.support.live import Ask, Server, exchange
from tests.support.report import Check, conclude, progress
from tests.support.wire import http_request

PAGES, MAX_RUNNING, CLIENTS = 24, 6, 12
MOST_TOKENS = 300
REMEMBERED = 100
"""Views that are remembered until the dump of one of them has come."""
Key = tuple[int, int]


class Viewer:
    """Takes the events of /monitor, and compares its state with dumps."""

    def __init__(self) -> None:
        self.client = CacheClient()
        self.known: dict[Key, CacheClient] = {}
        self.dumps: dict[Key, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()

    async def follow(self, port: int) -> None:
        async with exchange(port, http_request("GET", "/monitor")) as reply:
            async for event in reply.events():
                if event.kind == "cache":
                    self.client.take(json.loads(event.data or ""))
                    self._note()

    def _note(self) -> None:
        key = self.client.engine, self.client.view
        self.known[key] = copy.deepcopy(self.client)
        if len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]
        kinds = Counter(cell[0] for cell in self.client.cells)
        for name, kind in (("cached", CACHED), ("owned", OWNED), ("shared", SHARED)):
            self.seen[f"views with {name} pages"] += kinds[kind] > 0
        self.seen["views with preempted sequences"] += any(
            s["state"] == "preempted" for s in self.client.sequences.values()
        )
        self._compare()

    def add(self, dump: dict[str, Any]) -> None:
        """A dump, whose view may have been seen or may come."""
        self.dumps[dump["engine"], dump["view"]] = dump
        self._compare()

    def _compare(self) -> None:
        for key in self.dumps.keys() & self.known.keys():
            self.problems += [
                f"view {key}: {problem}"
                for problem in self.known[key].problems(self.dumps.pop(key))
            ]
            self.seen["compared"] += 1


async def client(port: int, rng: random.Random, seen: Counter[str]) -> None:
    """Sends requests for ever, and cuts some of them off."""
    prefixes = [prompt_text(random.Random(number), 150) for number in range(3)]
    while True:
        prompt = (
            rng.choice(prefixes) + prompt_text(rng, rng.randint(1, 60))
            if rng.random() < 0.7
            else prompt_text(rng, rng.randint(1, 200))
        )
        question = Ask("tgi", prompt, rng.randint(1, MOST_TOKENS), seed=rng.randint(1, 10**6))
        cut_after = rng.randint(1, 150) if rng.random() < 0.33 else None
        try:
            async with exchange(port, question.request()) as reply:
                seen[f"status {reply.status}"] += 1
                number = 0
                async for _ in reply.events():
                    number += 1
                    if number == cut_after:
                        seen["cut"] += 1
                        reply.cut()
                        break
        except (OSError, EOFError):
            seen["failed"] += 1


async def watch(server: Server, moments: int, kills: int) -> tuple[Viewer, Counter[str]]:
    viewer, seen, rng = Viewer(), Counter[str](), random.Random(1)
    tasks = [
        asyncio.create_task(client(server.port, random.Random(number), seen))
        for number in range(CLIENTS)
    ]
    tasks.append(asyncio.create_task(viewer.follow(server.port)))
    deaths = {(number + 1) * moments // (kills + 1) for number in range(kills)}
    try:
        with progress() as bar:
            task = bar.add_task("moments", total=moments)
            moment = 0
            while viewer.seen["compared"] < moments:
                await asyncio.sleep(rng.random() * 0.1)
                if moment in deaths and (pid := server.engine_pid) is not None:
                    os.kill(pid, signal.SIGKILL)
                    seen["killed"] += 1
                moment += 1
                status, body = await server.get("/monitor/cache")
                seen[f"dump {status}"] += 1
                if status == 200:
                    viewer.add(json.loads(body))
                if tasks[-1].done() or moment > 3 * moments:
                    break
                bar.update(task, completed=viewer.seen["compared"])
    finally:
        for each in tasks:
            each.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    viewer.problems += [repr(error) for error in ended if isinstance(error, Exception)]
    return viewer, seen


async def run(options: argparse.Namespace, serve_options: list[str]) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    small = ("--cache.pages", str(PAGES), "--engine.max_running", str(MAX_RUNNING))
    server = await Server.start(options.output / "server.log", *small, *serve_options)
    try:
        viewer, seen = await watch(server, options.moments, options.kills)
        preemptions = (await server.metrics())["onehead_preemptions_total"]
    finally:
        status = await server.stop()
    compared, missing = viewer.seen["compared"], len(viewer.dumps)
    rare = (
        "views with cached pages",
        "views with owned pages",
        "views with shared pages",
        "views with preempted sequences",
    )
    few = options.moments // 50
    checks = [
        Check(
            "the viewer's state equals the engine's at every moment",
            not viewer.problems,
            f"{compared} compared; {viewer.problems[:3]}",
        ),
        Check(
            "as many moments as asked for",
            compared >= options.moments,
            f"{compared}, and {missing} views that were not seen",
        ),
        Check(
            "preemptions, and requests cut off",
            min(preemptions, seen["cut"]) > few,
            f"{preemptions:.0f} and {seen['cut']}",
        ),
        Check(
            "engines replaced",
            viewer.client.engine == options.kills == seen["killed"],
            f"{viewer.client.engine}",
        ),
        Check(
            "all kinds of pages and states",
            min(viewer.seen[name] for name in rare) > few,
            str(dict(viewer.seen)),
        ),
        Check("the server ends with 0", status == 0, str(status)),
    ]
    found = {"seen": dict(seen), "viewer": dict(viewer.seen), "events": viewer.client.num_events}
    return conclude("page_map", options.output, {}, found | {"preemptions": preemptions}, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.page_map",
        description="a viewer's state against the engine's lists",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the report and the server's log"
    )
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3, help="engines that are killed")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    sys.exit(asyncio.run(run(parser.parse_args(own), sys.argv[len(own) + 2 :])))


if __name__ == "__main__":
    main()
