"""The same request gives the same bits: token ids and log-probabilities, alone, in every condition
of support/conditions.py, and served.

    python -m tests.trials.invariance --output DIR [--model FOLDER] [--requests 200] [--dtype auto] [--quantizations none,int8,int4]
        [--passes batch7,prefix,...]

Without a model it is a tiny random checkpoint. For each quantization the model is loaded once, the
requests are computed alone on one thread, and then again in every pass. The pass `kill` is a real
server: all requests are streamed over HTTP at once, undisturbed and with the engine killed in the
middle; every number on the wire is compared between the two, and with the reference as far as the
wire has it. The pass `float32`, of checkpoints that are stored in 16 bits, is each request alone in
an engine that widens the weights when it reads them; `kernels`, each request alone by every version
of the CPU kernels that this processor runs. With --model the digest of the reference is the same on
every processor; the random checkpoint's weights are not. Writes invariance.json into DIR. Exit
status 1 where a bit differs or where what a pass is about did not take place.
"""  # noqa: E501

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from commands.bench.offline import OfflineSettings, info_of, load_engine
from model.devices.cpu import native
from server.config import EngineSettings
from tests.support.conditions import (
    Case,
    Engine,
    Outcome,
    Trace,
    alone,
    compare,
    digest,
    make_cases,
    passes,
    torch_threads,
)
from tests.support.live import Answer, Ask, Server, exchange, receive
from tests.support.masked import kernels
from tests.support.report import Check, Found, conclude, progress, show
from tests.support.wire import http_request

QUANTIZATIONS = "none", "int8", "int4"
WIDENED, KILL, KERNELS = "float32", "kill", "kernels"
"""The passes that are not of support/conditions.py."""
PATIENCE = 900.0
"""Seconds for an answer: all requests are sent at once, and a large model computes their prompts
again after every kill."""
KILL_AT = 0.15, 0.45, 0.75
"""Shares of all tokens that have come when the engine is killed."""
PAGE_SIZE = 16
"""So small that outputs of a few tokens grow past a page, and can be preempted."""
POOL_CONTEXTS = 24
"""Whole contexts that the cache holds: in a pass that is not about it, preemptions are allowed and
rare."""
RESTARTS = "onehead_engine_restarts_total"


# --- over HTTP


def body_of(case: Case) -> Found:
    """The case as /v1/completions takes it: what is scored is echoed."""
    sampling = {
        name: value
        for name, value in asdict(case.sampling).items()
        if value not in (None, (), [], {}, b"") and name != "choice"
    }
    wanted = {
        "prompt": case.prompt,
        "max_tokens": case.tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    return (
        wanted | sampling | {"logprobs": case.num_top, "echo": case.scored, "timeout_s": PATIENCE}
    )


@dataclass(slots=True, eq=False)
class Numbers(Answer):
    """An answer with every number that its events bring."""

    scores: list[float | None] = field(default_factory=list)
    """Of the prompt where it is echoed, then of the output."""
    tops: list[Any] = field(default_factory=list)

    def _take_openai(self, data: dict[str, Any]) -> None:
        Answer._take_openai(self, data)
        found = data["choices"][0]["logprobs"]
        self.scores += found["token_logprobs"]
        self.tops += found["top_logprobs"]

    def trace(self) -> Trace:
        """All of it by its bits, as one list of items."""
        bits = [None if score is None else score.hex() for score in self.scores]
        tops = [
            None if top is None else tuple((text, value.hex()) for text, value in top.items())
            for top in self.tops
        ]
        return (
            [("failed", self.failure)]
            if self.failure
            else [("ids", tuple(self.ids)), *zip(bits, tops, strict=True)]
        )


def as_on_the_wire(trace: Trace) -> list[tuple[Any, ...]]:
    """The tokens of the output, and every log-probability's bits, of a trace of the engine's."""
    return [
        ("ids", tuple(item[1] for item in trace if item[0] == "drawn")),
        *((item[2],) for item in trace),
    ]


def without_tops(trace: Trace, scored: bool) -> list[tuple[Any, ...]]:
    """The same of what came over HTTP, where an echoed prompt's first token has no score."""
    return [trace[0], *((item[0],) for item in trace[1 + scored :])]


async def stream(port: int, case: Case, on_token: Any) -> Numbers:
    answer = Numbers(Ask("openai", case.prompt, case.tokens))
    try:
        async with (
            asyncio.timeout(PATIENCE),
            exchange(port, http_request("POST", "/v1/completions", body_of(case))) as reply,
        ):
            await receive(reply, answer, on_token)
    except (OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
        answer.failure = answer.failure or f"{type(error).__name__}: {error}"
    return answer


class Killer:
    """Kills the engine whenever a further share of all tokens has come."""

    def __init__(self, server: Server, total: int, shares: tuple[float, ...]) -> None:
        self._server = server
        self._at = [int(share * total) for share in shares]
        self._killed: int | None = None
        self.seen = self.kills = 0

    def __call__(self, answer: Answer) -> None:
        self.seen += 1
        pid = self._server.engine_pid
        if (
            self.kills < len(self._at)
            and self.seen >= self._at[self.kills]
            and pid is not None
            and pid != self._killed
        ):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._killed = pid
                self.kills += 1


async def serve_all(
    server: Server, cases: list[Case], shares: tuple[float, ...], name: str
) -> tuple[Outcome, int]:
    """Every case at once; and how often the engine was killed meanwhile."""
    killer = Killer(server, sum(case.tokens for case in cases), shares)
    answers = await asyncio.gather(*(stream(server.port, case, killer) for case in cases))
    outcome = Outcome(name, {number: answer.trace() for number, answer in enumerate(answers)})
    return outcome, killer.kills


async def killed(
    folder: Path, options: list[str], cases: list[Case], reference: dict[int, Trace]
) -> list[Found]:
    """A server's answers against the reference, and those of one whose engine is killed against the
    undisturbed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        server = await Server.start(Path(scratch) / "server.log", "--model", str(folder), *options)
        try:
            calm, _ = await serve_all(server, cases, (), "served")
            # Under the same salt the second run would find its prompts computed; that is a pass of
            # its own.
            await server.until_idle()
            restless, kills = await serve_all(server, cases, KILL_AT, "served, engine killed")
            restarts = (await server.metrics()).get(RESTARTS, 0.0)
        finally:
            await server.stop()
    restless.occurred = kills > 0 and restarts >= kills
    restless.evidence = f"{kills} kills, {restarts:.0f} restarts"
    found = compare(calm.traces, restless, cases)
    expected = {number: as_on_the_wire(trace) for number, trace in reference.items()}
    calm.traces = {
        number: without_tops(trace, cases[number].scored) for number, trace in calm.traces.items()
    }
    return [compare(expected, calm, cases), found]


# --- in this process


def settings_of(options: argparse.Namespace, quantization: str, dtype: str) -> OfflineSettings:
    """The engine of one quantization on one thread, its cache of the least pages that the passes
    ask for.
    """
    engine = {"quantization": quantization, "threads": 1, "dtype": dtype, "device": "cpu"}
    engine |= {"max_context": options.context}
    cache = {"page_size": PAGE_SIZE, "pages": POOL_CONTEXTS * (options.context // PAGE_SIZE + 1)}
    return OfflineSettings.model_validate(
        {"model": options.model, "concurrency": [1], "engine": engine, "cache": cache}
    )


def as_options(settings: EngineSettings) -> list[str]:
    """The same engine on the command line."""
    engine, cache = settings.engine, settings.cache
    sizes = ["--cache.page_size", str(cache.page_size), "--cache.pages", str(cache.pages)]
    sizes += ["--engine.max_context", str(engine.max_context)]
    return [
        "--engine.quantization",
        engine.quantization,
        "--engine.dtype",
        engine.dtype,
        "--engine.threads",
        str(engine.threads),
        *sizes,
    ]


def run_pass(
    name: str, engine: Engine, cases: list[Case], bar: Progress, label: str
) -> tuple[list[Outcome], float]:
    """One pass, and the seconds that it took."""
    began, task = time.perf_counter(), bar.add_task(f"{label} {name}", total=len(cases))
    compute = alone if name == "alone" else passes()[name]
    outcomes = compute(engine, cases, lambda ended: bar.advance(task, ended))
    return outcomes, time.perf_counter() - began


def measure(options: argparse.Namespace, quantization: str) -> tuple[Found, list[Found]]:
    """Every pass of one quantization: what was measured, and figures of every condition."""
    settings = settings_of(options, quantization, options.dtype)
    core, ready = load_engine(settings)
    engine = Engine(core.runner, ready.max_context)  # type: ignore[arg-type]
    cases = make_cases(options.requests, ready.vocab_size, ready.capacity, options.seed)
    found: list[Found] = []
    wanted = [name for name in options.passes if name in passes()]
    with torch_threads(1), progress() as bar:
        (reference,), seconds = run_pass("alone", engine, cases, bar, quantization)
        estimate = seconds * (len(wanted) + 2 * ("prefix" in wanted) + (KILL in options.passes))
        bar.console.print(
            f"{quantization}: alone took {seconds:.0f} s; {len(wanted)} passes more are about "
            f"{estimate:.0f} s"
        )
        for name in wanted:
            outcomes, seconds = run_pass(name, engine, cases, bar, quantization)
            found += [
                compare(reference.traces, outcome, cases) | {"seconds": seconds}
                for outcome in outcomes
            ]
        if WIDENED in options.passes:
            found.append(
                compare(
                    reference.traces,
                    widened(options, quantization, ready.weight_bytes, cases, bar),
                    cases,
                )
            )
        if KERNELS in options.passes:
            found += [
                compare(reference.traces, outcome, cases)
                for outcome in by_other_kernels(options, quantization, cases, bar)
            ]
    del core, engine
    if KILL in options.passes:
        found += asyncio.run(killed(options.model, as_options(settings), cases, reference.traces))
    same = {"quantization": quantization, "digest": digest(reference.traces)}
    return info_of(settings, ready), [same | each for each in found]


def widened(
    options: argparse.Namespace,
    quantization: str,
    stored_bytes: int,
    cases: list[Case],
    bar: Progress,
) -> Outcome:
    """Each request alone, in an engine with the weights in float32."""
    core, ready = load_engine(settings_of(options, quantization, "float32"))
    (outcome,), _ = run_pass("alone", Engine(core.runner, ready.max_context), cases, bar, WIDENED)  # type: ignore[arg-type]
    outcome.name, outcome.occurred = WIDENED, ready.weight_bytes > stored_bytes
    outcome.evidence = f"weights of {ready.weight_bytes:,} bytes, as stored {stored_bytes:,}"
    return outcome


def by_other_kernels(
    options: argparse.Namespace, quantization: str, cases: list[Case], bar: Progress
) -> list[Outcome]:
    """Each request alone, by every other version of the kernels that fuses operations."""
    outcomes, isa = [], native.library().isa()
    for version in native.FEATURES:
        other = native.library(version)
        if f"kernels_{version}." not in other._name or other.isa() in (isa, b"unfused"):
            continue
        with kernels(version):
            core, ready = load_engine(settings_of(options, quantization, options.dtype))
            engine = Engine(core.runner, ready.max_context)  # type: ignore[arg-type]
            (outcome,), _ = run_pass("alone", engine, cases, bar, version)
            outcome.name = f"{KERNELS} {version}"
            outcome.occurred = native.library().isa() != isa
        outcomes.append(outcome)
    return outcomes


def checks_of(found: list[Found]) -> list[Check]:
    checks = []
    for each in found:
        name = (
            f"{each['condition']}, "
            f"{'not quantized' if each['quantization'] == 'none' else each['quantization']}"
        )
        checks.append(
            Check(
                f"{name}: the same bits",
                not each["differ"],
                each["first_difference"] or f"{each['requests']} requests",
            )
        )
        if not each["occurred"]:
            checks.append(Check(f"{name}: takes place", False, each["evidence"] or "it did not"))
    return checks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a tiny random one)")
    parser.add_argument(
        "--context", type=int, help="most tokens of a sequence (default: the model's)"
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--dtype", default="auto", help="engine.dtype (default: %(default)s)")
    parser.add_argument("--quantizations", default=",".join(QUANTIZATIONS))
    parser.add_argument(
        "--passes",
        default=",".join((*passes(), KILL)),
        help=f"there are also {WIDENED} and {KERNELS}; default: %(default)s",
    )
    options = parser.parse_args()
    options.quantizations, options.passes = (
        options.quantizations.split(","),
        options.passes.split(","),
    )
    for name, known in (
        ("quantizations", (*QUANTIZATIONS, "auto")),
        ("passes", (*passes(), WIDENED, KERNELS, KILL)),
    ):
        unknown = set(getattr(options, name)) - set(known)
        if unknown:
            parser.error(f"--{name}: no {min(unknown)!r}; there are: {', '.join(known)}")
    return options


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is None:
            from tests.support.checkpoints import SHAPES, make_checkpoint

            options.model = make_checkpoint(SHAPES[0], Path(scratch)).folder
        from model.checkpoint.families import read_spec

        options.context = options.context or read_spec(options.model).max_positions
        infos, found = [], []
        for quantization in options.quantizations:
            info, figures = measure(options, quantization)
            infos.append(info)
            found += figures
    headings = "condition", "weights", "requests", "tokens", "differ", "took place"
    rows = [
        (
            f["condition"],
            f["quantization"],
            f["requests"],
            f["tokens"],
            f["differ"],
            f["evidence"] or "yes",
        )
        for f in found
    ]
    show(headings, rows, "tokens: of the output, and of prompts that are scored")
    for quantization, bits in dict.fromkeys((f["quantization"], f["digest"]) for f in found):
        print(f"digest of {quantization}: {bits}")
    result = {"requests": options.requests, "seed": options.seed, "conditions": found}
    return conclude("invariance", options.output, infos[0], result, checks_of(found))


if __name__ == "__main__":
    sys.exit(main())
