"""One client against another on a real server with the embedded model.

    python -m tests.trials.fair_shares [--output DIR] [--phase newcomer|shares|bytes|all] [--seconds
    30]

    newcomer  500 requests of 1,500 tokens by one address; then, one after the other, ten of 20
    tokens by another: time to the first token shares    two named keys with more requests than
    places: tokens of each over so many seconds, with equal weights and with 3 to 1 bytes
    sequences that are preempted for another address have the same tokens as in a server of their
    own

Addresses are those of X-Forwarded-For, as the server trusts this host. Exit status 1 for any miss.
"""

import argparse
import asyncio
import hashlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from tests.support.live import Answer, Ask, Server, asks, exchange, receive
from tests.support.report import Check, Found, conclude, raise_file_limit, show

FLOOD, FLOOD_TOKENS = 500, 1500
NEWCOMERS, NEWCOMER_TOKENS = 10, 20
FIRST_TOKEN_SECONDS = 1.0
TOLERANCE = 0.10
TRUST = ("--server.trusted_proxies", "127.0.0.1", "--server.log_level", "warning")


async def follow(port: int, question: Ask, headers: dict[str, str]) -> Answer:
    """Sends a request as the client that the headers name, and takes every event."""
    answer = Answer(question, sent=time.perf_counter())
    try:
        async with exchange(port, question.request(headers)) as reply:
            await receive(reply, answer)
    except (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    return answer


async def cancel(tasks: list[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


def address(number: int) -> dict[str, str]:
    return {"x-forwarded-for": f"10.0.0.{number}"}


async def newcomer(scratch: Path, seconds: float) -> tuple[Found, list[Check]]:
    server = await Server.start(scratch / "newcomer.log", *TRUST)
    try:
        alone = [
            await follow(server.port, question, address(2))
            for question in asks(NEWCOMERS, NEWCOMER_TOKENS, 7)
        ]
        tasks = [
            asyncio.create_task(follow(server.port, question, address(1)))
            for question in asks(FLOOD, FLOOD_TOKENS, 1)
        ]
        await asyncio.sleep(10.0)
        firsts, problems = [], []
        for question, oracle in zip(asks(NEWCOMERS, NEWCOMER_TOKENS, 7), alone, strict=True):
            answer = await follow(server.port, question, address(2))
            firsts.append(answer.times[0] - answer.sent if answer.times else float("inf"))
            if problem := answer.problem(oracle):
                problems.append(problem)
        metrics = await server.metrics()
        refused = sum(task.done() for task in tasks)
        await cancel(tasks)
        idle = await server.until_idle()
    finally:
        await server.stop()
    rows = [
        [f"first token of request {number + 1}, s", first] for number, first in enumerate(firsts)
    ]
    show(
        ["newcomer", ""],
        [
            *rows,
            ["preemptions", metrics["onehead_preemptions_total"]],
            ["waiting", metrics["onehead_requests_waiting"]],
        ],
    )
    checks = [
        Check(
            f"first token within {FIRST_TOKEN_SECONDS:g} s",
            max(firsts) <= FIRST_TOKEN_SECONDS,
            f"{max(firsts):.2f} s at most",
        ),
        Check(
            "its tokens are those without the others",
            not problems,
            "; ".join(problems[:3]) or "the same",
        ),
        Check("the others were admitted", refused == 0, f"{refused} of {FLOOD} ended early"),
        Check("nothing is left when they leave", idle, "idle" if idle else "not idle"),
    ]
    return {
        "first_token_seconds": firsts,
        "alone": [answer.times[0] - answer.sent for answer in alone],
    }, checks


async def shares(scratch: Path, seconds: float) -> tuple[Found, list[Check]]:
    found: Found = {}
    checks = []
    for weight in (1, 3):
        keys = scratch / f"keys_{weight}.toml"
        tables = [
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in ("one", "other")
        ]
        keys.write_text(f"{tables[0]}weight = {weight}\n{tables[1]}")
        server = await Server.start(
            scratch / f"shares_{weight}.log",
            "--server.api_keys_file",
            str(keys),
            "--server.log_level",
            "warning",
        )
        try:
            tokens = await compete(server, seconds)
        finally:
            await server.stop()
        ratio = tokens["one"] / max(1, tokens["other"])
        show([f"weights {weight} : 1", "tokens"], [*tokens.items(), ["ratio", ratio]])
        found[f"weight {weight}"] = tokens
        within = abs(ratio / weight - 1) <= TOLERANCE
        checks.append(
            Check(
                f"tokens {weight} to 1 within {TOLERANCE:.0%}",
                within,
                f"{ratio:.3f} to 1 after {seconds:g} s",
            )
        )
    return found, checks


async def compete(server: Server, seconds: float) -> dict[str, int]:
    """Output tokens of two keys that always have requests waiting, from when both do. The first
    begins alone.
    """
    counts = {"one": 0, "other": 0}
    # Made before they are needed: this process shares the cores with the server.
    questions = {name: cycle(asks(1500, 150, number)) for number, name in enumerate(counts)}

    async def keep_asking(name: str) -> None:
        for question in questions[name]:
            async with exchange(
                server.port, question.request({"authorization": f"Bearer {name}"})
            ) as reply:
                await receive(reply, Answer(question), lambda _: count(name))

    def count(name: str) -> None:
        counts[name] += 1

    tasks = [asyncio.create_task(keep_asking("one")) for _ in range(120)]
    await asyncio.sleep(3.0)
    tasks += [asyncio.create_task(keep_asking("other")) for _ in range(120)]
    await asyncio.sleep(1.0)
    before = dict(counts)
    await asyncio.sleep(seconds)
    after = dict(counts)
    assert not any(task.done() for task in tasks), "a request failed"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {name: after[name] - before[name] for name in counts}


async def same_bytes(scratch: Path, seconds: float) -> tuple[Found, list[Check]]:
    questions, others = asks(40, 300, 3), asks(120, 100, 4)
    options = (*TRUST, "--engine.max_running", "16", "--engine.step_tokens", "128")
    server = await Server.start(scratch / "bytes.log", *options)
    try:
        alone = await asyncio.gather(
            *[follow(server.port, question, address(1)) for question in questions]
        )
        undisturbed = (await server.metrics())["onehead_preemptions_total"]
        tasks = [
            asyncio.create_task(follow(server.port, question, address(1))) for question in questions
        ]
        for number in range(2, 8):  # One client after the other comes in.
            await asyncio.sleep(1.0)
            tasks += [
                asyncio.create_task(follow(server.port, question, address(number)))
                for question in others[number::6]
            ]
        together = await asyncio.gather(*tasks)
        preemptions = (await server.metrics())["onehead_preemptions_total"]
    finally:
        await server.stop()
    problems = [
        problem
        for answer, oracle in zip(together, alone, strict=False)
        if (problem := answer.problem(oracle))
    ]
    checks = [
        Check("none is preempted without another client", undisturbed == 0, f"{undisturbed:g}"),
        Check("some are preempted for another", preemptions > 0, f"{preemptions:g} preemptions"),
        Check(
            "their tokens are those of a server of their own",
            not problems,
            "; ".join(problems[:3]) or f"{len(alone)} the same",
        ),
        Check(
            "every other request ends well",
            not any(answer.failure for answer in together),
            f"{len(together)} requests",
        ),
    ]
    return {"preemptions": preemptions}, checks


PHASES: dict[str, Callable[[Path, float], Awaitable[tuple[Found, list[Check]]]]] = {
    "newcomer": newcomer,
    "shares": shares,
    "bytes": same_bytes,
}


async def run(phases: list[str], seconds: float, output: Path | None, scratch: Path) -> int:
    raise_file_limit()
    results: Found = {}
    checks: list[Check] = []
    for phase in phases:
        results[phase], more = await PHASES[phase](scratch, seconds)
        checks += more
    return conclude("fair_shares", output, {}, results, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a folder for fair_shares.json")
    parser.add_argument("--phase", choices=(*PHASES, "all"), default="all")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the phase shares")
    options = parser.parse_args()
    phases = list(PHASES) if options.phase == "all" else [options.phase]
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(run(phases, options.seconds, options.output, Path(scratch))))


if __name__ == "__main__":
    main()
