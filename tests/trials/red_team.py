"""Attacks of one client on what all clients share, each against a real server, beside a stream, probes and new grammars of another.

    python -m tests.trials.red_team [--only A1,A5] [--together A1,A2,A5] [--times 10] [--output FILE]

An attack is an entry of ATTACKS: requests that attackers send `--times` times, all at once, and what the checkpoint's folder needs for
it. `--together` runs several at the same time. The table has, for each attack: the longest answer of /live; the 99th percentile of the
stream's gaps between tokens, before and meanwhile; the longest answer to a new grammar; the memory of API process and workers above the
quiet one, at most and 10 s after; replaced engines; and how the attack was answered. The exit status is 1 where a limit is passed.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.live import exchange
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess, children, engines
from tests.support.wire import http_request
from tests.trials.attack_bodies import KNOWN

QUIET_SECONDS = 5.0
ATTACK_SECONDS = 30.0
"""What is still unanswered then is given up."""
BACK_SECONDS = 10.0
PROBE_SECONDS = 0.05
CANARY, ATTACKERS = "canary", ("attacker 1", "attacker 2", "attacker 3")
LIMIT_LIVE, LIMIT_GAP, LIMIT_GRAMMAR, LIMIT_MEMORY, LIMIT_AFTER = 0.1, 0.06, 1.0, 512.0, 64.0
MEBIBYTE = 2**20

Body = dict[str, Any]
Made = tuple[str, Body]
"""A path and a body."""


def completion(**fields: Any) -> Made:
    return "/v1/completions", {"prompt": "a", "max_tokens": 4} | fields


def chat(content: str) -> Made:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def chat_template(source: str) -> Callable[[Path], None]:
    """What gives the folder this chat template."""

    def prepare(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {"chat_template": source}))

    return prepare


def backtracking(folder: Path) -> None:
    """A pre-tokenizer whose regular expression gives up on some texts, with a panic of the library."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$|x"}, "behavior": "Isolated", "invert": False}
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
    Attack("A1", "intersection of 30 expressions", lambda n: completion(structured_outputs={"grammar": f"{INTERSECTION} // {n}"})),
    Attack(
        "A1 schema",
        "allOf of 30 patterns",
        lambda n: completion(structured_outputs={"json": {"type": "string", "allOf": [{"pattern": f"k{i}x{n}"} for i in range(30)]}}),
    ),
    Attack("A2", "multipleOf 29999999", lambda n: completion(structured_outputs={"json": {"type": "integer", "multipleOf": 29999999 - n}})),
    Attack(
        "A2 anyOf", "30 arrays of multiples", lambda n: completion(structured_outputs={"json": {"anyOf": [DIGITS] * 30, "title": str(n)}})
    ),
    Attack("A4", "500 small expressions", lambda n: completion(structured_outputs={"regex": f"[a-z]{{{n % 50 + 1}}}{n}"})),
    Attack("A5", "2 MB to tokenize", lambda _: ("/tokenize", {"inputs": "!a" * 1_048_000})),
    Attack("A5 prompt", "2 MB to generate from", lambda _: ("/generate", {"inputs": "!a" * 1_048_000})),
    Attack(
        "A6",
        "190,000 special tokens in a message",
        lambda _: ("/tokenize", {"messages": [{"role": "user", "content": "<|endoftext|>" * 150_000}]}),
        chat_template(MESSAGES),
    ),
    Attack("A7", "a panic of the tokenizer", lambda _: ("/tokenize", {"inputs": "a" * 4200 + "!"}), backtracking),
    Attack("A7 short", "a panic of the tokenizer", lambda _: ("/tokenize", {"inputs": "a" * 60 + "!"}), backtracking),
    Attack("A13", "a chat template of nested loops", lambda _: chat("hi"), chat_template(NESTED)),
]
ATTACKS += [Attack(name, "many items, sequences or rows", lambda _, made=(known.path, known.body): made) for name, known in KNOWN.items()]
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
    replaced: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    """The limits that were passed."""

    def judge(self) -> None:
        limits = {
            "live": LIMIT_LIVE,
            "gap": max(LIMIT_GAP, 3 * self.quiet_gap),
            "grammar": LIMIT_GRAMMAR,
            "memory": LIMIT_MEMORY,
            "after": LIMIT_AFTER,
            "replaced": 0.0,
        }
        self.passed = [f"{name} {getattr(self, name):.3g} > {most:.3g}" for name, most in limits.items() if getattr(self, name) > most]


def key(client: str) -> dict[str, str]:
    return {"authorization": f"Bearer {client}"}


def memory_of(pid: int) -> float:
    """MiB of the API process and its workers, with shared pages counted once."""
    total = 0
    remaining = [pid, *(child for child in children(pid) if child not in engines(pid))]
    while remaining:
        process = remaining.pop()
        remaining += children(process) if process != pid else []
        with suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1024


class Bystander:
    """Another client's stream, probes and new grammars; `since` starts a phase."""

    def __init__(self, server: ServerProcess, grammars: bool) -> None:
        self._server, self._grammars = server, grammars
        self.since()

    def since(self) -> None:
        self.gaps: list[float] = []
        self.lives: list[float] = [0.0]
        self.compiled: list[float] = [0.0]
        self.memory: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stream())
            group.create_task(self._probe())
            group.create_task(self._watch())
            if self._grammars:
                group.create_task(self._compile())

    async def _stream(self) -> None:
        body = {"prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        while True:
            async with exchange(self._server.port, http_request("POST", "/v1/completions", body, key(CANARY))) as reply:
                assert reply.status == 200, await reply.body()
                last: float | None = None
                async for _ in reply.events():
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now

    async def _probe(self) -> None:
        while True:
            began = time.perf_counter()
            async with exchange(self._server.port, http_request("GET", "/live")) as reply:
                await reply.body()
            self.lives.append(time.perf_counter() - began)
            await asyncio.sleep(PROBE_SECONDS)

    async def _compile(self) -> None:
        for number in itertools.count():
            body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": f"[a-z]{{3}}-{number}"}}
            began = time.perf_counter()
            async with exchange(self._server.port, http_request("POST", "/v1/completions", body, key(CANARY))) as reply:
                said = await reply.body()
                assert reply.status == 200, said
            self.compiled.append(time.perf_counter() - began)
            await asyncio.sleep(0.3)

    async def _watch(self) -> None:
        while True:
            self.memory.append(await asyncio.to_thread(memory_of, self._server.process.pid))
            await asyncio.sleep(0.1)


async def send(server: ServerProcess, made: Made, client: str, answers: Counter[str]) -> None:
    """Sends a request of an attack and counts how it was answered."""
    path, body = made
    try:
        async with asyncio.timeout(ATTACK_SECONDS), exchange(server.port, http_request("POST", path, body, key(client))) as reply:
            said = (await reply.body())[:300]
            answers[str(reply.status) if reply.status == 200 else f"{reply.status} {said.decode(errors='replace')[:90]}"] += 1
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        answers[type(error).__name__] += 1


async def measure(server: ServerProcess, attacks: list[Attack], times: int) -> Found:
    """Runs attacks at the same time, each by a client of its own."""
    found = Found(" + ".join(attack.name for attack in attacks), "; ".join(attack.about for attack in attacks))
    bystander = Bystander(server, all(attack.grammars for attack in attacks))
    watching = asyncio.create_task(bystander.run())
    await asyncio.sleep(2.0)  # Warm.
    bystander.since()
    await asyncio.sleep(QUIET_SECONDS)
    found.quiet_gap, quiet_memory = p99(bystander.gaps), statistics.median(bystander.memory)
    bystander.since()
    restarts = await asyncio.to_thread(server.metric, "onehead_engine_restarts_total")
    answers: Counter[str] = Counter()
    await asyncio.gather(
        *(
            send(server, attack.make(number), client, answers)
            for attack, client in zip(attacks, itertools.cycle(ATTACKERS), strict=False)
            for number in range(times * COUNTS.get(attack.name, 1))
        )
    )
    found.live, found.gap, found.grammar = max(bystander.lives), p99(bystander.gaps), max(bystander.compiled)
    found.memory = max(bystander.memory) - quiet_memory
    await asyncio.sleep(BACK_SECONDS)
    found.after = bystander.memory[-1] - quiet_memory
    found.replaced = await asyncio.to_thread(server.metric, "onehead_engine_restarts_total") - restarts
    found.answers = dict(answers.most_common(4))
    watching.cancel()
    with suppress(asyncio.CancelledError, BaseExceptionGroup):
        await watching
    found.judge()
    return found


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("inf")


def run(attacks: list[Attack], times: int) -> Found:
    """Runs attacks against a server of their own."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(EMBEDDED, model)
        for attack in attacks:
            if attack.prepare is not None:
                attack.prepare(model)
        digests = ",".join(hashlib.sha256(client.encode()).hexdigest() for client in (CANARY, *ATTACKERS))
        log = Path(folder) / "log"
        with log.open("w") as errors, ServerProcess(model, "--server.api_keys", digests, stderr=errors) as server:
            return asyncio.run(measure(server, attacks, times))


def show(found: Found) -> None:
    figures = (
        f"{found.name:12} live {found.live * 1e3:6.0f} ms  gap p99 {found.quiet_gap * 1e3:5.1f} -> {found.gap * 1e3:6.1f} ms  "
        f"grammar {found.grammar * 1e3:6.0f} ms  memory +{found.memory:5.0f} MiB, after +{found.after:4.0f}  engines {found.replaced:.0f}"
    )
    print(figures, "  PASSED: " + ", ".join(found.passed) if found.passed else "  holds", sep="", flush=True)
    for answer, count in found.answers.items():
        print(f"    {count:4} x {answer}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of attacks; default: all, one after the other")
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
        options.output.write_text(json.dumps([asdict(found) for found in all_found], indent=1) + "\n")
    return int(any(found.passed for found in all_found))


if __name__ == "__main__":
    sys.exit(main())
