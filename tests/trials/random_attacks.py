"""An attacker that looks for more: random bodies within every bound, pushed towards what costs
most, against a server with another client.

    python -m tests.trials.random_attacks --output DIR [--count 20000] [--minutes 30] [--seed 0]
    [--at_once 8] python -m tests.trials.random_attacks --output DIR --again KIND:SEED:SIZE

Each body is of a kind, a seed and a size from 0 to 1; kinds whose requests kept the server longest
are sent more often, and larger. --again sends one body that a report names. The limits are those of
tests.trials.canary. Exit status 1 for any that is not kept.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import EMBEDDED_MODEL
from tests.support.live import exchange
from tests.support.processes import ServerProcess
from tests.support.report import Check, conclude, show
from tests.support.wire import http_request
from tests.trials.attack_bodies import KINDS, Attack
from tests.trials.canary import ATTACKERS_KEY, KEY, LIVE_SECONDS, Canary, Noticed, checks

QUIET_SECONDS = 5.0
ANSWER_SECONDS = 120.0
MAX_BODY_BYTES = 2 * 2**20 - 1024
SETTLE_SECONDS = 10.0
KEYS = ",".join(hashlib.sha256(key.encode()).hexdigest() for key in (KEY, ATTACKERS_KEY))


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: its name, when it was sent, the status of its answer (0: none), and how long it
    took in seconds.
    """

    name: str
    at: float
    status: int
    seconds: float


async def send(port: int, name: str, attack: Attack) -> Sent:
    """Sends a body and reads its answer to the end, without keeping it."""
    request = http_request(
        "POST", attack.path, attack.body, {"authorization": f"Bearer {ATTACKERS_KEY}"}
    )
    at, began, status = time.time(), time.perf_counter(), 0
    with suppress(OSError, EOFError, TimeoutError, ValueError):
        async with asyncio.timeout(ANSWER_SECONDS), exchange(port, request) as reply:
            status = reply.status
            async for _ in reply.pieces():
                pass
    return Sent(name, at, status, time.perf_counter() - began)


class Attacker:
    """Draws bodies, and learns which kinds keep the server longest."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.cost: dict[str, float] = dict.fromkeys(KINDS, 1.0)
        """Of each kind, the mean of seconds with the last ones counting most."""

    def draw(self) -> str:
        """KIND:SEED:SIZE of the next body."""
        kind = self._rng.choices([*self.cost], [0.05 + cost for cost in self.cost.values()])[0]
        size = 1.0 if self._rng.random() < 0.3 else self._rng.random() ** 0.5
        return f"{kind}:{self._rng.randrange(2**32)}:{size:.3f}"

    def learn(self, sent: Sent) -> None:
        kind = sent.name.split(":")[0]
        self.cost[kind] += 0.2 * (sent.seconds - self.cost[kind])


def body_of(name: str) -> Attack:
    """The body that KIND:SEED:SIZE names, or one of a lesser size where that is longer than
    server.max_body_bytes.
    """
    kind, seed, size = name.split(":")
    share = float(size)
    while (
        len(json.dumps((attack := KINDS[kind](random.Random(int(seed)), share)).body))
        > MAX_BODY_BYTES
    ):
        share *= 0.7
    return attack


async def attack_at_random(
    port: int, attacker: Attacker, count: int, seconds: float, at_once: int
) -> list[Sent]:
    """Up to `count` bodies in up to `seconds`, so many at once."""
    end, found, left = time.monotonic() + seconds, list[Sent](), count

    async def one_after_the_other() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < end:
            left -= 1
            name = attacker.draw()
            sent = await send(port, name, body_of(name))
            attacker.learn(sent)
            found.append(sent)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return found


def during(late: list[tuple[float, float]], sent: list[Sent]) -> Counter[str]:
    """How often requests of each name or kind were open while an answer of /live was late."""
    count: Counter[str] = Counter()
    for at, seconds in late:
        count.update(
            {s.name.split(":")[0] for s in sent if s.at < at + seconds and s.at + s.seconds > at}
        )
    return count


def table(sent: list[Sent], late: Counter[str]) -> None:
    by_kind: dict[str, list[Sent]] = defaultdict(list)
    for each in sent:
        by_kind[each.name.split(":")[0]].append(each)
    rows = []
    for kind, alike in sorted(by_kind.items()):
        seconds = sorted(s.seconds for s in alike)
        statuses = " ".join(
            f"{status}:{number}"
            for status, number in sorted(Counter(s.status for s in alike).items())
        )
        rows.append(
            (kind, len(alike), seconds[len(seconds) // 2], seconds[-1], late[kind], statuses)
        )
    show(
        ("kind", "sent", "median s", "most s", f"open while /live > {LIVE_SECONDS} s", "statuses"),
        rows,
    )
    for worst in sorted(sent, key=lambda s: -s.seconds)[:5]:
        print(f"{worst.seconds:7.2f} s  {worst.status}  {worst.name}")


async def attacked(
    server: ServerProcess, work: Callable[[int], Any]
) -> tuple[Noticed, Noticed, Noticed, list[Sent]]:
    """What the canary noticed before, during and after the attack, and what was sent."""
    with Canary(server.port, server.process.pid) as canary:
        await asyncio.sleep(QUIET_SECONDS)
        quiet = canary.take()
        sent = await work(server.port)
        noticed = canary.take()
        await asyncio.sleep(SETTLE_SECONDS)
        return quiet, noticed, canary.take(), sent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at_once", type=int, default=8)
    parser.add_argument("--again", metavar="KIND:SEED:SIZE")
    options = parser.parse_args()
    attacker = Attacker(options.seed)

    async def work(port: int) -> list[Sent]:
        if options.again:
            return [await send(port, options.again, body_of(options.again))]
        return await attack_at_random(
            port, attacker, options.count, options.minutes * 60, options.at_once
        )

    options.output.mkdir(parents=True, exist_ok=True)
    log = options.output / "server.log"
    with (
        log.open("wb") as stderr,
        ServerProcess(EMBEDDED_MODEL, "--server.api_keys", KEYS, stderr=stderr) as server,
    ):
        quiet, noticed, after, sent = asyncio.run(attacked(server, work))
    late = during(noticed.late, sent)
    table(sent, late)
    rows = [
        (name, *each.row())
        for name, each in (("quiet", quiet), ("attacked", noticed), ("after", after))
    ]
    show(("", "/live most s", "gap p50 s", "gap p99 s", "memory MiB"), rows)
    failed = [s for s in sent if s.status in (0, 500)]
    found = checks("attacked", quiet, noticed)
    found.append(
        Check(
            "every request is answered, none with 500",
            not failed,
            ", ".join(s.name for s in failed[:3]) or f"{len(sent)} sent",
        )
    )
    result = {
        "sent": len(sent),
        "late": late,
        "cost": attacker.cost,
        "worst": [s.name for s in sorted(sent, key=lambda s: -s.seconds)[:20]],
    }
    return conclude(
        "random-attacks",
        options.output,
        {"seed": options.seed, "at_once": options.at_once},
        result,
        found,
    )


if __name__ == "__main__":
    sys.exit(main())
