"""The measurements of the suite: each takes the published weights and gives Checks, requirements
with what was found.

Speed is measured in turns with llama.cpp's, so that the machine's drift reaches both. The campaigns
of tests/trials are run as the commands that they are, their results read from the files that they
write. Not known here: how the weights come about.
"""

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.real.published import Published
from bench.real.texts import scored_windows
from bench.two_trees import Server
from commands import perplexity
from commands.bench.bench import Ask, Load, run
from commands.bench.client import Endpoint
from commands.bench.figures import figures
from model.checkpoint.families import read_spec
from server.text.codec import TextCodec
from tests.support.paths import ROOT
from tests.support.report import Check, progress, show

FORMS = {
    "file": ("auto", "auto"),
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("float32", "int8"),
    "int4": ("float32", "int4"),
}
"""(engine.dtype, engine.quantization) of each form of the weights."""
BOUNDED = "file", "int8", "int4"
"""The forms whose speed has bounds."""
MOST_LOSS = {"file": 0.005, "int8": 0.002, "bfloat16": 0.002}
"""By how much the perplexity of a form may be above float32's."""
LOSS_OF_Q4_0 = "int4"
"""The form that may lose as much as llama.cpp does in Q4_0."""
CLIENTS = {1: (8, 1.5), 8: (16, 3.0), 32: (64, 4.0)}
"""Clients -> requests of a round, and the least ratio to llama.cpp's speed."""
PROMPT_TOKENS = OUTPUT_TOKENS = 128
BACK_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: the published weights and the forms to hold them in."""

    published: Published
    served: Path
    """What `--model` names."""
    folder: Path
    """What `onehead serve` makes of it."""
    forms: Sequence[str]
    output: Path
    rounds: int

    def options(self, form: str) -> list[str]:
        """Of `onehead serve`, for one form."""
        dtype, quantization = FORMS[form]
        return ["--engine.dtype", dtype, "--engine.quantization", quantization]


def same_tokens(subject: Subject) -> list[Check]:
    """Greedy tokens over HTTP, alone and among others, against `transformers`."""
    checks: list[Check] = []
    command = ["tests.trials.published_gguf", "--model", str(subject.served)]
    _trial(subject, "same", "published_gguf", command, checks)
    return checks


def perplexities(subject: Subject) -> list[Check]:
    """Every form here, and in llama.cpp the published file, its exact float32 weights and those in
    Q4_0, on the same windows.
    """
    published, spec = subject.published, read_spec(subject.folder)
    windows, found = scored_windows(TextCodec(subject.folder)), dict[str, float]()
    files = {
        "llama.cpp F32": published.in_type("F32"),
        "llama.cpp Q4_0": published.in_type("Q4_0"),
        "llama.cpp Q4_K_M": published.file,
    }
    with progress() as bar:
        task = bar.add_task(
            "perplexity", total=len(subject.forms) * sum(map(len, windows)) + len(files)
        )
        for form in subject.forms:
            runner = perplexity.load(subject.folder, spec, "cpu", *FORMS[form], perplexity.WINDOW)
            found[form] = perplexity.perplexity(runner, windows, partial(bar.advance, task))
            del runner
        for name, file in files.items():
            found[name] = published.llama_cpp(file, "perplexity", windows=windows)["perplexity"]
            bar.advance(task)
    tokens = sum(map(perplexity.num_scored, windows))
    rows = [
        (name, f"{value:.4f}", f"{value / found['float32'] - 1:+.3%}")
        for name, value in found.items()
    ]
    show(
        ("weights", "perplexity", "over float32"),
        rows,
        f"{tokens} tokens in windows of {perplexity.WINDOW}",
    )
    checks = [
        Check(
            "float32 as llama.cpp's F32, within 0.1 %",
            *_within(found["float32"], found["llama.cpp F32"], 0.001),
        )
    ]
    for form in subject.forms:
        if form in MOST_LOSS:
            checks.append(
                Check(
                    f"{form}: at most {MOST_LOSS[form]:+.1%}",
                    *_at_most(found[form], found["float32"], 1 + MOST_LOSS[form]),
                )
            )
        if form == LOSS_OF_Q4_0:
            theirs = found["llama.cpp Q4_0"] / found["llama.cpp F32"]
            checks.append(
                Check(
                    f"{form}: at most llama.cpp's Q4_0, {theirs - 1:+.3%}",
                    *_at_most(found[form], found["float32"], theirs),
                )
            )
    return checks


def _within(value: float, expected: float, share: float) -> tuple[bool, str]:
    return abs(
        value / expected - 1
    ) <= share, f"{value:.4f} against {expected:.4f} ({value / expected - 1:+.3%})"


def _at_most(value: float, base: float, most: float) -> tuple[bool, str]:
    return value <= most * base, f"{value:.4f} against {base:.4f} ({value / base - 1:+.3%})"


def speeds(subject: Subject) -> list[Check]:
    """Output tokens per second over HTTP, in turns with llama.cpp on the published file in its own
    process.
    """
    checks, rng = [], random.Random(0)
    vocabulary = read_spec(subject.folder).vocab_size
    servers = {form: Server(ROOT, subject.served, subject.options(form)) for form in subject.forms}
    try:
        for clients, (requests, least) in CLIENTS.items():
            sides: dict[str, Callable[[], float]] = {
                form: partial(_rate, server, clients, requests, rng)
                for form, server in servers.items()
            }
            prompts = [rng.choices(range(10, vocabulary), k=PROMPT_TOKENS) for _ in range(requests)]
            request = {"prompts": prompts, "clients": clients, "tokens": OUTPUT_TOKENS}
            sides["llama.cpp"] = partial(_rate_of_llama_cpp, subject.published, request)
            rates = _in_turns(sides, subject.rounds)
            medians = {name: statistics.median(each) for name, each in rates.items()}
            for form in subject.forms:
                ratio = statistics.median(
                    ours / theirs
                    for ours, theirs in zip(rates[form], rates["llama.cpp"], strict=True)
                )
                words = (
                    f"{ratio:.2f} times: {medians[form]:.0f} and {medians['llama.cpp']:.0f} "
                    "tokens/s"
                )
                bound = (
                    f", at least {least} times llama.cpp's"
                    if form in BOUNDED
                    else " beside llama.cpp's"
                )
                checks.append(
                    Check(
                        f"{form}, {clients} clients{bound}",
                        ratio >= least or form not in BOUNDED,
                        words,
                    )
                )
    finally:
        for server in servers.values():
            server.stop()
    return checks


def _in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each side's figures after one that is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, measure in sides.items():
            value = measure()
            if number:
                found[name].append(value)
    return found


def _rate(server: Server, clients: int, requests: int, rng: random.Random) -> float:
    ask = Ask(PROMPT_TOKENS, OUTPUT_TOKENS)
    bodies = [ask.body(rng) for _ in range(requests)]
    endpoint = Endpoint.parse(f"http://127.0.0.1:{server.port}")
    outcomes = asyncio.run(run(endpoint, ask, Load.closed(clients), bodies, lambda: None))
    found = figures(outcomes)
    if found["failed"]:
        raise RuntimeError(
            f"{found['failed']} of {requests} requests failed: "
            f"{next(o.failure for o in outcomes if o.failure)}"
        )
    return float(found["output_tokens_per_second"])


def _rate_of_llama_cpp(published: Published, request: dict[str, Any]) -> float:
    return float(published.llama_cpp(published.file, "speed", **request)["tokens_per_second"])


def kills(subject: Subject) -> list[Check]:
    """The kill sweep under 32 streams, in every form."""
    checks: list[Check] = []
    for form in subject.forms:
        options = ["--model", str(subject.served), *subject.options(form)]
        command = ["tests.trials.kill_sweep", "--how", "kill", "--every", "12", "--", *options]
        (sweep,) = _trial(subject, f"kill-{form}", "kill_sweep", command, checks)["sweeps"]
        slowest = (sweep["silence"] or {"max": math.inf})["max"]
        what = f"{form}, streaming again in {BACK_SECONDS} s"
        checks.append(Check(what, slowest <= BACK_SECONDS, f"{slowest:.2f} s at most"))
    return checks


def invariances(subject: Subject) -> list[Check]:
    """Batch invariance, in every form."""
    checks: list[Check] = []
    for form in subject.forms:
        dtype, quantization = FORMS[form]
        command = ["tests.trials.invariance", "--model", str(subject.folder), "--context", "640"]
        command += ["--requests", "40", "--dtype", dtype, "--quantizations", quantization]
        _trial(subject, f"invariance-{form}", "invariance", command, checks)
    return checks


def _trial(
    subject: Subject,
    name: str,
    result: str,
    command: list[str],
    checks: list[Check],
) -> dict[str, Any]:
    """Runs a campaign with --output, its text in NAME.txt, and reads RESULT.json, whose checks are
    appended to `checks`. Raises RuntimeError where it wrote none.
    """
    folder = subject.output / name
    folder.mkdir(parents=True, exist_ok=True)
    with (subject.output / f"{name}.txt").open("w") as text:
        module, *arguments = command
        subprocess.run(
            [sys.executable, "-m", module, "--output", folder, *arguments],
            cwd=ROOT,
            stdout=text,
            stderr=text,
            check=False,
        )
    file = folder / f"{result}.json"
    if not file.exists():
        raise RuntimeError(f"{command[0]} wrote no result; {subject.output / name}.txt says why")
    found: dict[str, Any] = json.loads(file.read_text())
    for each in found["checks"]:
        checks.append(Check(f"{name}: {each['what']}", each["holds"], each["found"]))
    return found


PARTS: dict[str, Callable[[Subject], list[Check]]] = {
    "same": same_tokens,
    "perplexity": perplexities,
    "speed": speeds,
    "kill": kills,
    "invariance": invariances,
}
