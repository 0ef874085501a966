"""`onehead bench`: puts load on a running server over HTTP and reports rates and latencies.

Closed loop: N clients, each sending its next request when its last has ended. Open loop: arrival
times drawn from the seed before the run. Invariant: a latency counts from when its request was
meant to be sent, so it includes stalls of the server and of the client (no coordinated omission);
and a request that failed or came out short is counted, never averaged in. It knows TGI's dialect on
the wire and nothing of how the server works: no tokenizer, no model, no metrics of the server's
own.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from rich.console import Console

from commands.bench.client import (
    Endpoint,
    Outcome,
    ReplyError,
    fetch_info,
    generate,
    reachable,
    reason,
)
from commands.bench.figures import circumstances, figures
from commands.bench.tables import tables
from commands.progress import progress
from server.config import PREFIX

PLAIN_WIDTH = 120
"""Columns of the table where standard output is no terminal."""
EXIT_INTERRUPTED = 130
VOCABULARY = """
    def class return self import from for in if else not None True yield await with try except raise
    assert lambda while break index length buffer cache token tokens layer batch value values result
    request response stream reader writer path config count total state table page pages offset
    start end size key query head block weight output prompt number name text line
"""


def _split(value: object) -> object:
    """'1,8,32' to a list, as the command line and the environment spell it; an empty text is an
    empty list.
    """
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder")
    return path


class Cases(BaseSettings):
    """What is run and where the result goes, whatever it is run on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    concurrency: Annotated[
        list[Annotated[int, Field(ge=1, le=65536)]],
        NoDecode,
        BeforeValidator(_split),
    ] = Field(
        [1, 8, 32],
        description="closed loop: one run for each of these numbers of clients, of the default "
        "for those with enough requests",
    )
    requests: int = Field(64, ge=1, le=10**6, description="requests of a run")
    warmup: int = Field(
        1,
        ge=0,
        le=10**4,
        description="requests sent one by one before the first run, not counted",
    )
    prompt_tokens: int = Field(128, ge=1, le=2**20, description="tokens of a prompt, exactly")
    output_tokens: int = Field(
        128,
        ge=1,
        le=2**20,
        description="tokens generated for a request, exactly",
    )
    seed: int = Field(
        0,
        ge=0,
        description="of prompts and arrivals; change it between runs, else the server's prefix "
        "cache has the prompts",
    )
    output: Annotated[Path | None, AfterValidator(_in_a_folder)] = Field(
        None,
        description="JSON file to write the result to",
    )
    config: Path | None = Field(None, description="TOML file of these options")

    @model_validator(mode="after")
    def _clients_have_requests(self) -> "Cases":
        if max(self.clients, default=0) > self.requests:
            raise ValueError(
                f"requests {self.requests} must be at least concurrency {max(self.clients)}",
            )
        return self

    @property
    def clients(self) -> list[int]:
        """The closed loops to run: those that were given, else the default ones for which there are
        enough requests.
        """
        given = "concurrency" in self.model_fields_set
        return [clients for clients in self.concurrency if given or clients <= self.requests]


class BenchSettings(Cases):
    """onehead bench: put load on a running server and report rates and latencies.

    With --offline: on an engine in this process, without a server; `onehead bench --offline --help`
    lists its options.
    """

    url: Annotated[str, AfterValidator(reachable)] = Field(
        "http://127.0.0.1:8000",
        description="address of the server",
    )
    rate: Annotated[
        list[Annotated[float, Field(gt=0, le=1e6)]],
        NoDecode,
        BeforeValidator(_split),
    ] = Field(
        [],
        description="open loop: one run for each of these requests per second on average, as 0.5,2",
    )
    timeout: float = Field(
        600.0,
        gt=0,
        description="seconds after which a request counts as failed",
    )

    @model_validator(mode="after")
    def _there_is_a_run(self) -> "BenchSettings":
        if not self.concurrency and not self.rate:
            raise ValueError("concurrency and rate are both empty, so there is nothing to run")
        return self


@dataclass(frozen=True, slots=True)
class Ask:
    """What every request of a run asks for."""

    prompt_tokens: int
    output_tokens: int
    timeout: float = 600.0
    temperature: float = 0.0
    """0 draws the likeliest tokens."""

    def body(self, rng: random.Random) -> bytes:
        """A request with a prompt of its own: a text that is longer than it need be, of which the
        server keeps the last tokens.
        """
        parameters = {
            "max_new_tokens": self.output_tokens,
            "truncate": self.prompt_tokens,
            "do_sample": self.temperature > 0,
            "ignore_eos": True,
            "details": True,
        } | ({"temperature": self.temperature} if self.temperature > 0 else {})
        return msgspec.json.encode(
            {
                "inputs": prompt_text(rng, self.prompt_tokens),
                "parameters": parameters,
                "stream": True,
            }
        )

    def problem(self, outcome: Outcome) -> str | None:
        """How a reply that ended well differs from what was asked."""
        if len(outcome.token_times) != self.output_tokens:
            return f"{len(outcome.token_times)} tokens came, {self.output_tokens} were asked for"
        if outcome.input_length not in (None, self.prompt_tokens):
            return (
                f"the prompt had {outcome.input_length} tokens, {self.prompt_tokens} were asked for"
            )
        return None


def prompt_text(rng: random.Random, min_tokens: int) -> str:
    """Text like source code. A tokenizer that keeps words apart makes at least one token of each of
    its words.
    """
    known, words = VOCABULARY.split(), []
    for _ in range(min_tokens):
        word = (
            rng.choice(known)
            if rng.random() < 0.7
            else "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(2, 9)))
        )
        words.append(
            word
            + rng.choice(("", "", "", " =", "(", ")", ":", ",", ".", f"[{rng.randrange(100)}]"))
        )
    return "".join(word + rng.choice("    \n") for word in words).rstrip()


@dataclass(frozen=True, slots=True)
class Load:
    """How one run sends its requests: from `clients` back to back, or at the times `arrivals`, in
    seconds after its start.
    """

    label: str
    clients: int = 0
    arrivals: tuple[float, ...] = ()

    @classmethod
    def closed(cls, clients: int) -> "Load":
        return cls(f"closed {clients}", clients=clients)

    @classmethod
    def open(cls, rate: float, count: int, rng: random.Random) -> "Load":
        """Poisson arrivals at `rate` per second: the gaps are exponential."""
        return cls(
            f"open {rate:g}/s",
            arrivals=tuple(accumulate(rng.expovariate(rate) for _ in range(count))),
        )


async def run(
    endpoint: Endpoint,
    ask: Ask,
    load: Load,
    bodies: list[bytes],
    on_end: Callable[[], None],
) -> list[Outcome]:
    """Sends `bodies` as `load` says, and waits for every end; the outcomes are in the order of the
    bodies.
    """
    requests = [endpoint.request("POST", "/generate", body) for body in bodies]
    outcomes = [Outcome(0.0) for _ in bodies]
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async def one(number: int, intended: float) -> None:
        outcome = outcomes[number]
        outcome.intended = intended
        await generate(endpoint, requests[number], ask.timeout, outcome, clock)
        outcome.failure = outcome.failure or ask.problem(outcome)
        on_end()

    numbers = iter(range(len(bodies)))

    async def client() -> None:
        for number in numbers:  # The clients share the iterator.
            await one(number, clock())

    async def at(due: float, number: int) -> None:
        await asyncio.sleep(due - clock())
        await one(number, due)

    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(load.arrivals):
            group.create_task(at(due, number))
        for _ in range(load.clients):
            group.create_task(client())
    return outcomes


def _loads(settings: BenchSettings) -> list[Load]:
    """The runs, in their order."""
    closed = [Load.closed(clients) for clients in settings.clients]
    rng = random.Random(f"{settings.seed} arrivals")
    return closed + [Load.open(rate, settings.requests, rng) for rate in settings.rate]


async def _run_all(
    settings: BenchSettings,
    loads: list[Load],
    endpoint: Endpoint,
    runs: list[dict[str, Any]],
) -> None:
    """Appends every run after the warm-up, one after the other."""
    ask = Ask(settings.prompt_tokens, settings.output_tokens, settings.timeout)
    rng = random.Random(f"{settings.seed} prompts")
    with progress() as shown:
        warmup = [ask.body(rng) for _ in range(settings.warmup)]
        await run(endpoint, ask, Load.closed(1), warmup, lambda: None)
        for load in loads:
            task = shown.add_task(load.label, total=settings.requests)
            bodies = [ask.body(rng) for _ in range(settings.requests)]
            outcomes = await run(endpoint, ask, load, bodies, partial(shown.advance, task))
            runs.append(run_of(load.label, outcomes))


def run_of(label: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """One run in the result file."""
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure)
    return {"load": label, "figures": figures(outcomes), "failures": failures}


def report(
    settings: Cases,
    kind: str,
    info: dict[str, Any],
    runs: list[dict[str, Any]],
    planned: int,
) -> int:
    """Tables, reasons of failures, result file; the exit status. Fewer runs than `planned` are
    those before Ctrl-C; no file is written of them.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if runs:
        console.print(*tables(runs))
    reasons = sum((each["failures"] for each in runs), Counter[str]())
    for words, count in reasons.most_common():
        print(f"onehead bench: {count} failed: {words}", file=sys.stderr)
    if len(runs) < planned:
        interrupted = f"interrupted: {len(runs)} of {planned} runs are complete"
        print(f"onehead bench: {interrupted}; no result is written", file=sys.stderr)
        return EXIT_INTERRUPTED
    if settings.output:
        values = settings.model_dump(mode="json")
        result = circumstances(info) | {"kind": kind, "settings": values, "runs": runs}
        settings.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if reasons else 0


async def bench(settings: BenchSettings) -> int:
    """Runs every load that the settings name; the exit status, 1 where any request failed."""
    endpoint, loads = Endpoint.parse(settings.url), _loads(settings)
    runs: list[dict[str, Any]] = []
    try:
        info = await fetch_info(endpoint, settings.timeout)
    except (OSError, ReplyError) as error:
        problem = f"the server at {settings.url} cannot be used: {reason(error)}"
        print(f"onehead bench: {problem}", file=sys.stderr)
        return 1
    with suppress(asyncio.CancelledError):  # Ctrl-C.
        await _run_all(settings, loads, endpoint, runs)
    return report(settings, "server", info, runs, len(loads))
