"""Attacks of one client on what all clients share, each against a real server, beside a stream,
probes and new grammars of another.

    python -m tests.trials.red_team [--only A1,A5] [--together A1,A2,A5] [--times 10] [--output
    FILE]

An attack is an entry of ATTACKS: requests of which attackers keep `--times` open at once, and what
the checkpoint's folder needs for it. `--together` runs several at the same time. The table has, for
each attack: the longest answer of /live; the 99th percentile of the stream's gaps between tokens,
before and meanwhile; the longest answer to a new grammar; the memory of API process and workers
above the quiet one, at most and 10 s after; and how the attack was answered. The exit status is 1
where a limit is passed (tests.trials.canary).
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.live import exchange
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess
from tests.support.wire import http_request
from tests.trials.attack_bodies import KNOWN
from tests.trials.canary import KEY, Canary, checks, quantile

WARM_SECONDS, QUIET_SECONDS, BACK_SECONDS = 2.0, 5.0, 10.0
ATTACK_SECONDS = 5.0
"""Each request is sent again until then, so that an attack lasts for hundreds of the other client's
tokens."""
ANSWER_SECONDS = 30.0
"""What is still unanswered then is given up."""
MOST_AFTER = 64
"""MiB above the quiet server's memory that may be left BACK_SECONDS after an attack."""
ATTACKERS = ("attacker 1", "attacker 2", "attacker 3")

Body = dict[str, Any]
Made = tuple[str, Body]
"""A path and a body."""


def completion(**fields: Any) -> Made:
    return "/v1/completions", {"prompt": "a", "max_tokens": 4} | fields


def chat(content: str) -> Made:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
    }


def chat_template(source: str) -> Callable[[Path], None]:
    """What gives the folder this chat template."""

    def prepare(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {"chat_template": source}))

    return prepare


def backtracking(folder: Path) -> None:
    """A pre-tokenizer whose regular expression gives up on some texts, with a panic of the
    library.
    """
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$|x"},
        "behavior": "Isolated",
        "invert": False,
    }
    path.write_text(json.dumps(values))


@dataclass(frozen=True)
class Attack:
    """`make`: the n-th request of the attack."""

    name: str
    about: str
    make: Callable[[int], Made]
    prepare: Callable[[Path], None] | None = None
    grammars: bool = True
    """Whether the canary's new grammars can be compiled on such a folder."""


INTERSECTION = "start: T\nT: " + " & ".join(f"/.*k{i}.*/" for i in range(30))
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
MESSAGES = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}"
DIGITS = {"type": "array", "items": {"type": "integer", "multipleOf": 997}, "minItems": 30}

ATTACKS = [
    Attack(
        "A1",
        "intersection of 30 expressions",
        lambda n: completion(structured_outputs={"grammar": f"{INTERSECTION} // {n}"}),
    ),
    Attack(
        "A1 schema",
        "allOf of 30 patterns",
        lambda n: completion(
            structured_outputs={
                "json": {"type": "string", "allOf": [{"pattern": f"k{i}x{n}"} for i in range(30)]}
            }
        ),
    ),
    Attack(
        "A2",
        "multipleOf 29999999",
        lambda n: completion(
            structured_outputs={"json": {"type": "integer", "multipleOf": 29999999 - n}}
        ),
    ),
    Attack(
        "A2 anyOf",
        "30 arrays of multiples",
        lambda n: completion(
            structured_outputs={"json": {"anyOf": [DIGITS] * 30, "title": str(n)}}
        ),
    ),
    Attack(
        "A4",
        "500 small expressions",
        lambda n: completion(structured_outputs={"regex": f"[a-z]{{{n % 50 + 1}}}{n}"}),
    ),
    Attack("A5", "2 MB to tokenize", lambda _: ("/tokenize", {"inputs": "!a" * 1_048_000})),
    Attack(
        "A5 prompt", "2 MB to generate from", lambda _: ("/generate", {"inputs": "!a" * 1_048_000})
    ),
    Attack(
        "A6",
        "190,000 special tokens in a message",
        lambda _: (
            "/tokenize",
            {"messages": [{"role": "user", "content": "<|endoftext|>" * 150_000}]},
        ),
        chat_template(MESSAGES),
    ),
    Attack(
        "A7",
        "a panic of the tokenizer",
        lambda _: ("/tokenize", {"inputs": "a" * 4200 + "!"}),
        backtracking,
    ),
    Attack(
        "A7 short",
        "a panic of the tokenizer",
        lambda _: ("/tokenize", {"inputs": "a" * 60 + "!"}),
        backtracking,
    ),
    Attack("A13", "a chat template of nested loops", lambda _: chat("hi"), chat_template(NESTED)),
]
ATTACKS += [
    Attack(name, "many items, sequences or rows", lambda _, made=(known.path, known.body): made)
    for name, known in KNOWN.items()
]
COUNTS = {"A4": 50}
"""Requests for each of `--times` of an attack, where it is not one."""


@dataclass
class Found:
    """The figures of one attack."""

    name: str
    about: str
    live: float = 0.0
    quiet_gap: float = 0.0
    gap: float = 0.0
    grammar: float = 0.0
    memory: float = 0.0
    after: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    """The limits that were passed."""


def encoded(attack: Attack, client: str, times: int) -> list[bytes]:
    """The requests of an attack, made before it begins, so that making them takes no processor time
    from the server.
    """
    made = [attack.make(number) for number in range(times * COUNTS.get(attack.name, 1))]
    return [
        http_request("POST", path, body, {"authorization": f"Bearer {client}"})
        for path, body in made
    ]


async def send(port: int, requests: list[bytes], answers: Counter[str]) -> None:
    """Sends the requests of an attack all at once, and each again, after Retry-After where it was
    refused for that time, until ATTACK_SECONDS have passed. Counts how they were answered.
    """
    end = time.monotonic() + ATTACK_SECONDS

    async def one(request: bytes) -> None:
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(ANSWER_SECONDS), exchange(port, request) as reply:
                    said = b""
                    async for piece in reply.pieces():
                        said = said or piece[:300]
                answers[
                    str(reply.status)
                    if reply.status == 200
                    else f"{reply.status} {said.decode(errors='replace')[:90]}"
                ] += 1
                if reply.status in (429, 503):
                    await asyncio.sleep(float(reply.headers.get("retry-after", "1")))
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                answers[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    await asyncio.gather(*map(one, requests))


async def measure(server: ServerProcess, attacks: list[Attack], times: int) -> Found:
    """Runs attacks at the same time, each by a client of its own."""
    found = Found(
        " + ".join(attack.name for attack in attacks), "; ".join(attack.about for attack in attacks)
    )
    batches = [
        encoded(attack, client, times)
        for attack, client in zip(attacks, itertools.cycle(ATTACKERS), strict=False)
    ]
    answers: Counter[str] = Counter()
    with Canary(
        server.port, server.process.pid, all(attack.grammars for attack in attacks)
    ) as canary:
        await asyncio.sleep(WARM_SECONDS)
        canary.take()
        await asyncio.sleep(QUIET_SECONDS)
        quiet = canary.take()
        await asyncio.gather(*(send(server.port, requests, answers) for requests in batches))
        attacked = canary.take()
        await asyncio.sleep(BACK_SECONDS)
        after = canary.take()
    found.live, found.quiet_gap, found.gap = (
        max(attacked.lives, default=0.0),
        quantile(quiet.gaps, 0.99),
        quantile(attacked.gaps, 0.99),
    )
    found.grammar = max(attacked.grammars, default=0.0)
    quiet_memory = statistics.median(quiet.memory)
    found.memory, found.after = (
        (most - quiet_memory) / 2**20 for most in (max(attacked.memory), after.memory[-1])
    )
    found.answers = dict(answers.most_common(4))
    found.passed = [
        f"{check.what.strip(': ')} ({check.found})"
        for check in checks("", quiet, attacked)
        if not check.holds
    ]
    if found.after > MOST_AFTER:
        found.passed.append(
            f"at most {MOST_AFTER} MiB more {BACK_SECONDS:g} s later ({found.after:.0f} MiB)"
        )
    return found


def run(attacks: list[Attack], times: int) -> Found:
    """Runs attacks against a server of their own."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(EMBEDDED, model)
        for attack in attacks:
            if attack.prepare is not None:
                attack.prepare(model)
        digests = ",".join(
            hashlib.sha256(client.encode()).hexdigest() for client in (KEY, *ATTACKERS)
        )
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            ServerProcess(model, "--server.api_keys", digests, stderr=errors) as server,
        ):
            return asyncio.run(measure(server, attacks, times))


def show(found: Found) -> None:
    figures = (
        f"{found.name:12} live {found.live * 1e3:6.0f} ms  gap p99 {found.quiet_gap * 1e3:5.1f} "
        f"-> {found.gap * 1e3:6.1f} ms  "
        f"grammar {found.grammar * 1e3:6.0f} ms  memory +{found.memory:5.0f} MiB, after "
        f"+{found.after:4.0f}"
    )
    print(
        figures,
        "  PASSED: " + ", ".join(found.passed) if found.passed else "  holds",
        sep="",
        flush=True,
    )
    for answer, count in found.answers.items():
        print(f"    {count:4} x {answer}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="names of attacks; default: all, one after the other"
    )
    parser.add_argument("--together", default="", help="names of attacks to run at the same time")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    named = {attack.name: attack for attack in ATTACKS}
    if options.together:
        chosen = [[named[name] for name in options.together.split(",")]]
    else:
        chosen = [[named[name]] for name in (options.only.split(",") if options.only else named)]
    all_found = []
    for attacks in chosen:
        all_found.append(run(attacks, options.times))
        show(all_found[-1])
    if options.output is not None:
        options.output.write_text(
            json.dumps([asdict(found) for found in all_found], indent=1) + "\n"
        )
    return int(any(found.passed for found in all_found))


if __name__ == "__main__":
    sys.exit(main())
