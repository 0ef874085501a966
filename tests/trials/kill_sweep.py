"""Kill the engine at every index of the output under many streams: each must end with exactly the
tokens of an undisturbed run.

    python -m tests.trials.kill_sweep --output DIR [--how kill|stop|load|prefill|twice|poison|all]
    [--streams 32] [--tokens 48] [--every 1]

Half of the streams are greedy, half draw at 0.8 with seeds; half speak TGI's dialect, half
OpenAI's. A round starts them all together and strikes when one of them, another in each round, gets
its i-th token. What it strikes with:

    kill     SIGKILL                            stop     SIGSTOP, with --server.stall_after 1 load
    SIGKILL, and again in mid-load     twice    SIGKILL, and again as soon as the next is ready
    prefill  SIGKILL while long prompts are computed poison   a request that kills every engine that
    computes it, by tests/faults/faulty_server.py

Reports how long the interrupted streams were silent, and every token that differs. Exit status 1
for an answer that is not the undisturbed one, a strike that was none, pages that are not given
back, or a server that ends otherwise than with 0.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.rules import Rule, as_json
from tests.support.live import Answer, Ask, Server, ask, asks
from tests.support.report import Check, conclude, picture, progress, show

HOWS = ("kill", "stop", "load", "prefill", "twice", "poison")
STALL_AFTER = 1.0
LOAD_DELAYS = (0.0, 0.3, 0.6, 1.0, 1.5)
"""Seconds into the load at which the second strike falls, in turn."""
PREFILL_DELAYS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds after the requests are sent at which a strike falls on prompts."""
QUARANTINED = '"code":"request_quarantined"'
MOST_DEATHS = 6
"""Most crashes that one poisonous request may cause: two with all others, two alone, and two of
suspects that ran beside it."""


@dataclass(slots=True)
class Round:
    """One strike, or two, and what became of the streams."""

    how: str
    index: int
    strikes: list[float] = field(default_factory=list)
    struck_while: list[str] = field(default_factory=list)
    """What the engine was doing as far as /ready said: ready or loading."""
    ready: float = 0.0
    unready_after: float | None = None
    """Seconds from the first strike to a /ready of 503, where that was watched."""
    reached: list[int] = field(default_factory=list)
    """Tokens that each stream had when it was struck first."""
    gaps: list[float] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    deaths: int = 0
    """Engines that crashed without a kill of ours: the poisonous request crashed them."""


class Target:
    """The server of one sweep, and the engine that it runs at present."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.engine: int | None = server.engine_pid
        self.strikes = 0

    def strike(self, round: Round, number: int = signal.SIGKILL, doing: str = "ready") -> None:
        if self.engine is None:
            raise SystemExit("there is no engine to strike")
        os.kill(self.engine, number)
        self.strikes += 1
        round.strikes.append(time.perf_counter())
        round.struck_while.append(doing)

    async def replaced(self) -> None:
        self.engine = await self.server.engine_other_than(self.engine)


# --- ways to strike: each is called when the moment has come, and returns when an engine is ready
# again


async def by_kill(target: Target, round: Round) -> None:
    target.strike(round)
    await target.replaced()


async def by_stop(target: Target, round: Round) -> None:
    target.strike(round, signal.SIGSTOP)
    round.unready_after = await target.server.until_ready(503) - round.strikes[0]
    await target.replaced()


async def by_load(target: Target, round: Round) -> None:
    target.strike(round)
    await target.replaced()
    await asyncio.sleep(LOAD_DELAYS[round.index % len(LOAD_DELAYS)])
    status, _ = await target.server.get("/ready")
    target.strike(round, doing="loading" if status == 503 else "ready")
    await target.replaced()


async def by_twice(target: Target, round: Round) -> None:
    target.strike(round)
    await target.replaced()
    await target.server.until_ready()
    target.strike(round)
    await target.replaced()


Way = Callable[[Target, Round], Awaitable[None]]
WAYS: dict[str, Way] = {
    "kill": by_kill,
    "stop": by_stop,
    "load": by_load,
    "twice": by_twice,
    "prefill": by_kill,
}


async def run_round(
    target: Target, questions: list[Ask], oracles: list[Answer], how: str, index: int
) -> Round:
    """Starts all streams, strikes at the index, and judges every answer."""
    round, moment = Round(how, index), asyncio.Event()
    designated = index % len(questions)
    counts = [0] * len(questions)

    def on_token(number: int, answer: Answer) -> None:
        counts[number] = len(answer.ids)
        # A stream of two dialects hands out its end as an event of its own: the count may be met
        # twice.
        if number == designated and counts[number] == index and how != "prefill":
            moment.set()

    def listener(number: int) -> Callable[[Answer], None]:
        return lambda answer: on_token(number, answer)

    tasks = [
        asyncio.create_task(ask(target.server.port, question, listener(i)))
        for i, question in enumerate(questions)
    ]
    if how == "prefill" or index == 0:
        await asyncio.sleep(PREFILL_DELAYS[index % len(PREFILL_DELAYS)])
        moment.set()
    answering: asyncio.Future[Any] = asyncio.gather(*tasks)
    # Where the stream fails before its index, the strike falls after the last answer and the judge
    # says why.
    ends: list[asyncio.Future[Any]] = [asyncio.create_task(moment.wait()), answering]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    round.reached = list(counts)
    await WAYS[how](target, round)
    round.ready = await target.server.until_ready()
    judge(round, questions, await answering, oracles)
    return round


def poison(index: int) -> str:
    """A prompt that kills engines when it has `index` tokens of output. None of them is within
    another.
    """
    return f"zq{index:04d}qz"


async def run_poisoned(
    target: Target, questions: list[Ask], oracles: list[Answer], index: int
) -> Round:
    """Starts all streams and the poisonous request among them: it must fail by name, and the others
    see no more than a pause.
    """
    round, server = Round("poison", index, reached=[index] * len(questions)), target.server
    restarts = await restarts_of(server)
    tasks = [asyncio.create_task(ask(server.port, question)) for question in questions]
    round.strikes.append(time.perf_counter())
    # Not of TGI's dialect, whose errors have no code.
    answer = await ask(server.port, Ask("openai", poison(index), questions[0].tokens))
    answers = await asyncio.gather(*tasks)
    round.ready = answer.end
    round.deaths = await restarts_of(server) - restarts
    judge(round, questions, answers, oracles)
    failure = (answer.failure or "it was answered").replace(" ", "")
    if QUARANTINED not in failure or len(answer.ids) != index:
        round.problems.append(
            {"stream": "poison", "problem": answer.failure, "tokens": len(answer.ids)}
        )
    return round


async def restarts_of(server: Server) -> int:
    return int((await server.metrics())["onehead_engine_restarts_total"])


def judge(round: Round, questions: list[Ask], answers: list[Answer], oracles: list[Answer]) -> None:
    """Every difference from the oracle, and the longest silence, from the strike on, of every
    stream that waited for the next engine.
    """
    # What the dead engine had sent arrives within milliseconds, what the next one sends after it is
    # ready.
    between = (round.strikes[-1] + round.ready) / 2
    for number, (question, answer, oracle) in enumerate(
        zip(questions, answers, oracles, strict=True)
    ):
        if (problem := answer.problem(oracle)) is not None:
            place = {
                "stream": number,
                "dialect": question.dialect,
                "seed": question.seed,
                "had": round.reached[number],
            }
            round.problems.append(place | difference(answer, oracle) | {"problem": problem})
        if answer.times and answer.times[-1] > between:
            times = [answer.sent, *answer.times]
            struck = round.strikes[0]
            round.gaps.append(
                max(later - earlier for earlier, later in pairwise(times) if later > struck)
            )


def difference(answer: Answer, oracle: Answer) -> dict[str, Any]:
    """The first token that differs, with what the model thought of both."""
    for at, (got, expected) in enumerate(zip(answer.ids, oracle.ids, strict=False)):
        if got != expected:
            return {
                "at": at,
                "got": got,
                "expected": expected,
                "logprobs": [answer.logprobs[at], oracle.logprobs[at]],
            }
    return {}


async def undisturbed(server: Server, questions: list[Ask]) -> list[Answer]:
    answers = await asyncio.gather(*(ask(server.port, question) for question in questions))
    for question, answer in zip(questions, answers, strict=True):
        if answer.failure is not None or len(answer.ids) != question.tokens:
            raise SystemExit(f"the undisturbed run fails: {answer.failure or len(answer.ids)}")
    return list(answers)


@dataclass(slots=True)
class Sweep:
    """One way to strike, at all its indexes."""

    how: str
    rounds: list[Round] = field(default_factory=list)
    restarts: int = 0
    strikes: int = 0
    idle: bool = False
    status: int = -1
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        return [gap for round in self.rounds for gap in round.gaps]

    @property
    def problems(self) -> list[dict[str, Any]]:
        return [
            {"how": r.how, "index": r.index, **problem}
            for r in self.rounds
            for problem in r.problems
        ]

    @property
    def recoveries(self) -> list[float]:
        """Seconds from the last strike of each round to /ready."""
        return [round.ready - round.strikes[-1] for round in self.rounds]


def indexes(options: argparse.Namespace, how: str) -> list[int]:
    """Every one for `kill`; a sample of the same spread for the others, which take longer."""
    if how == "prefill":
        return list(range(len(PREFILL_DELAYS)))
    every = list(range(0, options.tokens, options.every))
    return every if how == "kill" else every[:: max(1, len(every) // options.sample)]


def questions_of(options: argparse.Namespace, how: str) -> list[Ask]:
    if how == "prefill":
        return asks(options.streams, 8, seed=2, prompt_tokens=(300, options.long))
    return asks(options.streams, options.tokens, seed=1)


async def sweep(options: argparse.Namespace, how: str, folder: Path, scratch: Path) -> Sweep:
    """A server, the undisturbed run, then round after round."""
    extra = ["--server.stall_after", str(STALL_AFTER)] if how == "stop" else []
    rules = as_json(
        tuple(Rule("die", marker=poison(index), after=index) for index in indexes(options, how))
    )
    launcher = (
        ("tests.faults.faulty_server", rules, str(scratch))
        if how == "poison"
        else ("commands.cli",)
    )
    arguments = "--server.lb_grace", "0", *extra, *options.serve
    server = await Server.start(folder / f"kill_sweep-{how}.log", *arguments, launcher=launcher)
    found, questions = Sweep(how, info=await server.info()), questions_of(options, how)
    try:
        oracles = await undisturbed(server, questions)
        target = Target(server)
        with progress() as bar:
            for index in bar.track(indexes(options, how), description=how):
                if how == "poison":
                    found.rounds.append(await run_poisoned(target, questions, oracles, index))
                else:
                    found.rounds.append(await run_round(target, questions, oracles, how, index))
        found.idle = await server.until_idle()
        found.restarts, found.strikes = await restarts_of(server), target.strikes
    finally:
        found.status = await server.stop()
    return found


def checks_of(found: Sweep) -> list[Check]:
    how, problems = found.how, found.problems
    answers = sum(len(round.reached) for round in found.rounds)
    checks = [
        Check(
            f"{how}: answers are those of the undisturbed run",
            not problems,
            f"{len(problems)} of {answers} are not",
        ),
        Check(
            f"{how}: streams were interrupted", bool(found.gaps), f"{len(found.gaps)} of {answers}"
        ),
        Check(
            f"{how}: idle afterwards, exit status 0",
            found.idle and found.status == 0,
            f"idle {found.idle}, status {found.status}",
        ),
    ]
    if how == "poison":
        most = max(round.deaths for round in found.rounds)
        checks.append(
            Check(
                f"poison: at most {MOST_DEATHS} engines die of one request",
                2 <= most <= MOST_DEATHS,
                f"{most}",
            )
        )
    else:
        checks.append(
            Check(
                f"{how}: one restart for each strike",
                found.restarts == found.strikes,
                f"{found.restarts} for {found.strikes}",
            )
        )
    if how == "load":
        loading = sum(round.struck_while[-1] == "loading" for round in found.rounds)
        checks.append(
            Check("load: struck in mid-load", loading > 0, f"{loading} of {len(found.rounds)}")
        )
    if how == "stop":
        slowest = max(round.unready_after or 0.0 for round in found.rounds)
        checks.append(
            Check(
                "stop: /ready is 503 within stall_after + 1 s",
                slowest <= STALL_AFTER + 1,
                f"{slowest:.2f} s at most",
            )
        )
    return checks


def draw(sweeps: list[Sweep]) -> Callable[[Any], None]:
    """Silence by index: every interrupted stream, and the median of each round."""

    def onto(figure: Any) -> None:
        panels = figure.subplots(len(sweeps), 1, squeeze=False)[:, 0]
        for axes, found in zip(panels, sweeps, strict=True):
            rounds = [round for round in found.rounds if round.gaps]
            for each in rounds:
                axes.plot([each.index] * len(each.gaps), each.gaps, ".", color="0.6", markersize=3)
            axes.plot(
                [r.index for r in rounds],
                [statistics.median(r.gaps) for r in rounds],
                "-",
                color="C0",
                label="median",
            )
            axes.set(title=found.how, ylabel="silence, s", ylim=(0, None))
            axes.grid(alpha=0.3)
        panels[-1].set_xlabel(
            "index at which the engine was struck"
            + (" (prefill: round)" if len(sweeps) > 1 else "")
        )
        panels[0].legend(loc="lower right")

    return onto


def report(options: argparse.Namespace, sweeps: list[Sweep]) -> int:
    rows = []
    for found in sweeps:
        gaps, recoveries = found.gaps or [0.0], found.recoveries or [0.0]
        row = found.how, len(found.rounds), found.strikes, len(found.gaps), len(found.problems)
        rows.append(
            (
                *row,
                statistics.median(gaps),
                max(gaps),
                statistics.median(recoveries),
                max(recoveries),
            )
        )
    headings = (
        "how",
        "rounds",
        "strikes",
        "interrupted",
        "differ",
        "silence p50",
        "max s",
        "ready p50",
        "max s",
    )
    show(
        headings,
        rows,
        "silence: the longest of each interrupted stream; ready: last strike to /ready 200",
    )
    for found in sweeps:
        for problem in found.problems[:20]:
            print(problem)
    result = {
        "options": {"streams": options.streams, "tokens": options.tokens, "serve": options.serve},
        "sweeps": [
            asdict(found) | {"silence": spread_of(found.gaps), "flips": found.problems}
            for found in sweeps
        ],
    }
    if options.output is not None:
        picture(options.output / "kill_sweep.png", (8, 2.4 * len(sweeps) + 0.4), draw(sweeps))
    return conclude(
        "kill_sweep",
        options.output,
        sweeps[0].info,
        result,
        [c for found in sweeps for c in checks_of(found)],
    )


def spread_of(values: list[float]) -> dict[str, float] | None:
    return {"median": statistics.median(values), "max": max(values)} if values else None


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        hows = HOWS if options.how == "all" else (options.how,)
        return report(options, [await sweep(options, how, folder, Path(scratch)) for how in hows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder of the result")
    parser.add_argument("--how", choices=(*HOWS, "all"), default="all")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--every", type=int, default=1, help="strike at every n-th index only")
    parser.add_argument("--sample", type=int, default=8, help="rounds of the ways other than kill")
    parser.add_argument(
        "--long", type=int, default=1200, help="most words of a prompt in the prefill sweep"
    )
    parser.add_argument("serve", nargs="*", help="options of `onehead serve`, after --")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
