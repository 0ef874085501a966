"""What a subscriber of KV events knows, against the engine's own prefix cache, at random moments
under load.

    python -m tests.trials.kv_events --output DIR [--moments 1000] [--kills 3] [--loses 0.05] [--
    SERVE_OPTIONS]

A server with a small cache gets requests with shared prefixes, a third of which are cut off; now
and then its engine is killed. Two subscribers, processes of their own, take its KV events; one
loses a share of them. At each moment /monitor/cache is asked for the blocks that are found as
prefixes and the number of the last message before; what each subscriber knows after that message
must be the same. A moment takes a second, as /monitor/cache answers once a second.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

from tests.support.kv_subscriber import Subscriber
from tests.support.live import Server
from tests.support.report import Check, conclude, progress
from tests.trials.page_map import CLIENTS, MAX_RUNNING, PAGES, client
from tests.trials.recorded_corpus import free_port

TOPIC = "kv@127.0.0.1@pretrained"


class Moments:
    """Dumps that are compared with what the subscribers know."""

    def __init__(self, subscribers: list[Subscriber]) -> None:
        self.subscribers = subscribers
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self._blocks: set[int] = set()

    async def compare(self, body: str) -> None:
        dump = json.loads(body)
        self.seen["moments"] += 1
        self.seen["moments with other blocks than the one before"] += self._blocks != set(
            dump["blocks"]
        )
        self._blocks = set(dump["blocks"])
        for subscriber in self.subscribers:
            self.problems += await asyncio.to_thread(subscriber.problems, dump)
            self.seen["compared"] += 1


async def watch(server: Server, moments: Moments, count: int, kills: int) -> Counter[str]:
    seen, rng = Counter[str](), random.Random(1)
    tasks = [
        asyncio.create_task(client(server.port, random.Random(number), seen))
        for number in range(CLIENTS)
    ]
    deaths = {(number + 1) * count // (kills + 1) for number in range(kills)}
    try:
        with progress() as bar:
            task = bar.add_task("moments", total=count)
            while moments.seen["moments"] < count and seen["dump 503"] < count:
                await asyncio.sleep(rng.random() * 0.1)
                if moments.seen["moments"] in deaths and (pid := server.engine_pid) is not None:
                    deaths.remove(moments.seen["moments"])
                    os.kill(pid, signal.SIGKILL)
                    seen["killed"] += 1
                status, body = await server.get("/monitor/cache")
                seen[f"dump {status}"] += 1
                if status == 200:
                    await moments.compare(body)
                bar.update(task, completed=moments.seen["moments"])
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def run(options: argparse.Namespace, serve_options: list[str]) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    address, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    events = (
        "--server.kv_events",
        address,
        "--server.kv_events_replay",
        replay,
        "--server.kv_events_topic",
        TOPIC,
    )
    small = ("--cache.pages", str(PAGES), "--engine.max_running", str(MAX_RUNNING))
    server = await Server.start(options.output / "server.log", *small, *events, *serve_options)
    try:
        with (
            Subscriber(address, replay, TOPIC) as steady,
            Subscriber(address, replay, TOPIC, options.loses) as lossy,
        ):
            moments = Moments([steady, lossy])
            seen = await watch(server, moments, options.moments, options.kills)
        preemptions = (await server.metrics())["onehead_preemptions_total"]
    finally:
        status = await server.stop()
    few, kinds = options.moments // 50, ("BlockStored", "BlockRemoved")
    checks = [
        Check(
            "both subscribers know the engine's blocks at every moment",
            not moments.problems,
            f"{moments.seen}; {moments.problems[:3]}",
        ),
        Check(
            "as many moments as asked for",
            moments.seen["compared"] == 2 * options.moments,
            str(moments.seen["compared"]),
        ),
        Check(
            "preemptions, and requests cut off",
            min(preemptions, seen["cut"]) > few,
            f"{preemptions:.0f} and {seen['cut']}",
        ),
        Check(
            "engines replaced",
            seen["killed"] == options.kills and steady.seen["AllBlocksCleared"] > options.kills,
            str(seen["killed"]),
        ),
        Check(
            "blocks stored and removed",
            min(steady.seen[kind] for kind in kinds) > few,
            str(dict(steady.seen)),
        ),
        Check(
            "messages lost and sent again",
            lossy.seen["gaps"] > few and not lossy.seen["replays without an answer"],
            str(lossy.seen),
        ),
        Check("the server ends with 0", status == 0, str(status)),
    ]
    found = {
        "seen": dict(seen),
        "moments": dict(moments.seen),
        "steady": dict(steady.seen),
        "lossy": dict(lossy.seen),
    }
    return conclude("kv_events", options.output, {}, found | {"preemptions": preemptions}, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.kv_events",
        description="KV events against the engine's prefix cache",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the report and the server's log"
    )
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3, help="engines that are killed")
    parser.add_argument(
        "--loses",
        type=float,
        default=0.05,
        help="share of messages that the second subscriber loses",
    )
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    sys.exit(asyncio.run(run(parser.parse_args(own), sys.argv[len(own) + 2 :])))


if __name__ == "__main__":
    main()
