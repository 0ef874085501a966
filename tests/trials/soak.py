"""An hour under mixed load while the engine is killed again and again: nothing may be lost, and
nothing may grow.

    scripts/soak --minutes 60 --output DIR [--rate REQUESTS_PER_SECOND] [--kill_every MINUTES]
    [--quiet MINUTES]

Measures what the machine can do with this traffic, then sends half of that, open loop: Poisson
arrivals, heavy-tailed lengths, both dialects, and among them clients that leave, read slowly, lose
their connection and resume, or ask for nonsense. Canaries, a fixed set of questions, must get the
answers of before. Every few minutes the engine is killed. At the end come minutes without kills, in
which one engine has the time to show whether it grows.

Samples memory, descriptors and threads of both processes, pages and open requests every five
seconds, latencies in windows. After a warm-up each series gets a slope with an interval (slopes.py
says how): it must hold zero, or the drift over the run be under 1 %. Engines are compared with each
other at the same age. Exit status 1 for anything lost, wrong, grown or not given back.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tests.support.live import Answer, Server, ask, asks
from tests.support.report import Check, Found, conclude, progress, usage
from tests.trials.soak_report import Series, draw_soak, slopes_of, tell
from tests.trials.traffic import Outcome, Traffic

CALIBRATION_CLIENTS = 16
RETENTION = 20.0
ARGUMENTS = [
    "--server.lb_grace",
    "0",
    "--server.resume_retention",
    str(RETENTION),
    "--cache.pages",
    "600",
]
"""A small cache, so that a leak is not lost in it, and so that it is full at times."""
MOST_REFUSED = 0.01
"""Of all requests: what may be told 429 while an engine is replaced."""
GAUGES = {
    "pages": "onehead_kv_pages_used",
    "running": "onehead_requests_running",
    "waiting": "onehead_requests_waiting",
    "detached": "onehead_streams_detached",
    "resume_bytes": "onehead_resume_bytes",
}


@dataclass(slots=True)
class Life:
    """One engine: when it was started, and when it was killed, in seconds of the run."""

    pid: int
    began: float
    ended: float | None = None


@dataclass(slots=True)
class Soak:
    """The run, as far as it has come."""

    server: Server
    traffic: Traffic
    window: float
    every: float
    """Seconds between samples."""
    start: float = field(default_factory=time.perf_counter)
    samples: list[dict[str, float]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    first_tokens: dict[int, "array[float]"] = field(default_factory=dict)
    gaps: dict[int, "array[float]"] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    open: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    def record(self, outcome: Outcome) -> None:
        number = int(self.now // self.window)
        if outcome.first_token is not None:
            self.first_tokens.setdefault(number, array("d")).append(outcome.first_token)
        self.gaps.setdefault(number, array("d")).extend(outcome.gaps)
        self.outcomes[f"{outcome.kind}: {outcome.word}"] += 1
        self.tokens += outcome.tokens
        if outcome.problem is not None:
            self.problems.append(f"{self.now:.0f} s, {outcome.kind}: {outcome.problem}")

    # --- what goes on at once

    async def arrivals(self, rate: float, until: float) -> None:
        """Sends each request when it is due, however many are open."""
        due = 0.0
        while (due := due + self.traffic.rng.expovariate(rate)) < until:
            await asyncio.sleep(due - self.now)
            task = asyncio.create_task(self._one(self.traffic.request()(self.start + due)))
            self.open.add(task)
            task.add_done_callback(self.open.discard)

    async def _one(self, sending: Coroutine[Any, Any, Outcome]) -> None:
        self.record(await sending)

    async def sampling(self, until: float) -> None:
        while self.now < until:
            await asyncio.sleep(self.every - self.now % self.every)
            self.server.must_live()
            self.samples.append(await self.sample())

    async def sample(self) -> dict[str, float]:
        now, metrics = self.now, await self.server.metrics()
        found: dict[str, float] = {"time": now, "open": len(self.open), "life": len(self.lives) - 1}
        found |= {name: metrics[metric] for name, metric in GAUGES.items()}
        for name, pid in (("api", self.server.process.pid), ("engine", self.lives[-1].pid)):
            used = usage(pid)
            if used is not None:
                found |= {f"{name}_{key}": float(value) for key, value in asdict(used).items()}
        return found

    async def kills(self, every: float, until: float) -> None:
        """SIGKILL at fixed times, whatever is going on."""
        due = every
        while due <= until:
            await asyncio.sleep(due - self.now)
            old = self.lives[-1]
            os.kill(old.pid, signal.SIGKILL)
            old.ended = self.now
            self.lives.append(Life(await self.server.engine_other_than(old.pid), self.now))
            due += every

    async def show_progress(self, bar: Progress, until: float) -> None:
        task = bar.add_task("soak, seconds", total=round(until))
        while self.now < until:
            lost = f", {len(self.problems)} problems" if self.problems else ""
            bar.update(
                task,
                completed=round(self.now),
                description=f"soak, seconds; {self.outcomes.total()} requests{lost}",
            )
            await asyncio.sleep(1)
        bar.update(task, completed=round(until))


async def calibrate(traffic: Traffic, seconds: float) -> float:
    """Requests a second that so many clients get through back to back."""
    done, end, start = 0, time.perf_counter() + seconds, time.perf_counter()

    async def client() -> None:
        nonlocal done
        while (now := time.perf_counter()) < end:
            outcome = await traffic.plain(traffic.question(), now)
            if outcome.problem is not None:
                raise SystemExit(f"the calibration fails: {outcome.problem}")
            done += 1

    await asyncio.gather(*(client() for _ in range(CALIBRATION_CLIENTS)))
    return done / (time.perf_counter() - start)


async def run_load(soak: Soak, rate: float, options: argparse.Namespace) -> None:
    """Everything at once until time is up, then whatever is still open."""
    loaded = options.minutes * 60
    until = loaded + options.quiet * 60
    with progress() as bar:
        async with asyncio.TaskGroup() as group:
            group.create_task(soak.arrivals(rate, until))
            group.create_task(soak.sampling(until))
            group.create_task(soak.show_progress(bar, until))
            if options.kill_every:
                group.create_task(soak.kills(options.kill_every * 60, loaded))
    if soak.open:
        await asyncio.wait(soak.open, timeout=200)


async def at_rest(soak: Soak) -> dict[str, float]:
    """A sample of the server when all requests have ended and no stream is kept."""
    await soak.server.until_idle()
    end = soak.now + 2 * RETENTION
    found = await soak.sample()
    while soak.now < end and (found["resume_bytes"] or found["detached"]):
        await asyncio.sleep(1)
        found = await soak.sample()
    # The connection that asked for the last sample may not be closed yet when the descriptors are
    # counted: the least of a few counts.
    for _ in range(5):
        await asyncio.sleep(0.2)
        found["api_fds"] = min(found["api_fds"], (await soak.sample())["api_fds"])
    return found


def checks_of(
    soak: Soak, before: dict[str, float], after: dict[str, float], restarts: float, warmup: float
) -> list[Check]:
    total, problems = soak.outcomes.total(), soak.problems
    refused = sum(count for word, count in soak.outcomes.items() if word.endswith(": full"))
    kills = len(soak.lives) - 1
    most_threads = max(sample["api_threads"] for sample in soak.samples if sample["time"] <= warmup)
    threads = after["api_threads"]
    held = {
        name: after[name] for name in ("pages", "running", "waiting", "detached", "resume_bytes")
    }
    return [
        Check(
            "nothing lost, nothing wrong",
            not problems,
            f"{len(problems)} of {total}; {problems[:3]}",
        ),
        Check(
            "every kind of client was there",
            {word.split(":")[0] for word in soak.outcomes} >= set(EXPECTED),
            str(dict(soak.outcomes)),
        ),
        Check(
            f"at most {MOST_REFUSED:.0%} told 429",
            refused <= MOST_REFUSED * total,
            f"{refused} of {total}",
        ),
        Check("one restart for each kill", restarts == kills, f"{restarts:.0f} for {kills}"),
        Check("at rest: no page, request, or kept stream", not any(held.values()), str(held)),
        Check(
            "at rest: descriptors as before",
            after["api_fds"] <= before["api_fds"],
            f"{before['api_fds']:.0f}, {after['api_fds']:.0f}",
        ),
        Check(
            "at rest: threads as in the warm-up",
            threads <= most_threads,
            f"{most_threads:.0f}, {threads:.0f}",
        ),
    ]


EXPECTED = ("plain", "canary", "leaves", "slow", "cut", "wrong")


def series_of(soak: Soak, options: argparse.Namespace, warmup: float) -> Series:
    """What was sampled, in plain lists."""
    return Series(
        samples=soak.samples,
        lives=[(life.began, life.ended) for life in soak.lives],
        first_tokens={number: list(values) for number, values in soak.first_tokens.items()},
        gaps={number: list(values) for number, values in soak.gaps.items()},
        window=soak.window,
        warmup=warmup,
        loaded=options.minutes * 60,
        same_age=options.kill_every * 60 / 2,
        settled=min(60.0, options.quiet * 60 / 4),
    )


async def run(options: argparse.Namespace) -> int:
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*ARGUMENTS, *options.serve]
    server = await Server.start(folder / "soak.log", *arguments)
    status = -1
    try:
        info = await server.info()
        canaries: list[Answer] = [
            await ask(server.port, question) for question in asks(8, 32, seed=11)
        ]
        traffic = Traffic(server.port, options.seed, canaries)
        capacity = await calibrate(traffic, options.calibrate) if options.rate is None else None
        rate = options.rate if capacity is None else capacity / 2
        engine = server.engine_pid
        assert engine is not None
        seconds = options.minutes * 60
        soak = Soak(server, traffic, min(60.0, max(options.sample, seconds / 30)), options.sample)
        soak.lives.append(Life(engine, 0.0))
        before = await at_rest(soak)
        soak.start = time.perf_counter()
        warmup = min(300.0, seconds / 6)
        await run_load(soak, rate, options)
        after = await at_rest(soak)
        restarts = (await server.metrics())["onehead_engine_restarts_total"]
    finally:
        status = await server.stop()
    series = series_of(soak, options, warmup)
    slopes = slopes_of(series)
    tell(slopes, rate, capacity, soak.outcomes, soak.tokens)
    draw_soak(series, folder / "soak.png")
    checks = checks_of(soak, before, after, restarts, warmup)
    checks += [
        Check(f"does not grow: {each.name}", each.is_none, each.in_words()) for each in slopes
    ]
    checks.append(Check("exit status 0", status == 0, str(status)))
    result: Found = {
        "arguments": arguments,
        "rate": rate,
        "capacity": capacity,
        "outcomes": soak.outcomes,
        "problems": soak.problems[:200],
    }
    result |= {
        "before": before,
        "after": after,
        "slopes": [each.told() for each in slopes],
        "series": series.told(),
    }
    return conclude("soak", folder, info, result, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/soak"),
        help="folder; made where it is missing (default: runs/soak)",
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--quiet", type=float, default=10, help="minutes of the same load afterwards, without kills"
    )
    parser.add_argument(
        "--rate", type=float, help="requests a second; default: half of what a calibration finds"
    )
    parser.add_argument("--calibrate", type=float, default=30, help="seconds of calibration")
    parser.add_argument(
        "--kill_every", type=float, default=5, help="minutes between kills; 0: none"
    )
    parser.add_argument("--sample", type=float, default=5, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="options of `onehead serve`, after --")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
