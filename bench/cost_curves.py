"""How costs grow: a step's host time with running and waiting requests and with context, throughput with concurrency, latency with context.

    python -m bench.cost_curves --output DIR [--curves host,throughput,latency] [--model FOLDER | --shape 164m] [-- --engine.threads 2]

host         no model: bench/host_costs.py, medians of many steps of the real scheduler, build_batch and the backend's plan
throughput   output tokens per second of closed loops of 1 to 128 clients on an engine in this process, as `onehead bench --offline`
latency      one request alone after 128 to 8,192 - N tokens of context: time to the first token, and between tokens

Without --model the last two are measured on a gpt_bigcode checkpoint of random weights with 8,192 positions, made in a temporary folder.
Arguments after `--` are options of `onehead bench --offline`. Writes cost_curves.json and cost_curves.png into DIR, an existing folder.
Exit status 1 where waiting requests cost a step more than a tenth (and 50 us), or one more running request costs more at 512 than twice
what it costs at 64.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.against_transformers import SHAPES, make
from bench.host_costs import PARTS, RUNNING, State, measure
from commands.bench.closed_loop import ClosedLoop
from commands.bench.figures import figures
from commands.bench.offline import OfflineSettings, info_of, load_engine
from server.config import load
from tests.support.report import Check, conclude, picture, progress, show

CURVES = "host", "throughput", "latency"
HOST = {
    "running": [State(running=2**power) for power in range(10)],
    "waiting": [State(waiting=count) for count in (0, 100, 1000, 10_000)],
    "waiting for pages": [State(waiting=count, for_pages=True) for count in (1, 100, 1000, 10_000)],
    "context": [State(running=256, context=context) for context in (64, 128, 256, 512, 1000, 2000, 4000, 8000)],
}
FIELD = {"running": "running", "waiting": "waiting", "waiting for pages": "waiting", "context": "context"}
WAITING_MAY_COST = 1.1
NOISE = 50.0
"""Microseconds."""
MARGINAL_MAY_GROW = 2.0


# --- the curves


def host_curves(steps: int) -> dict[str, list[dict[str, Any]]]:
    """Medians in microseconds along each axis."""
    found: dict[str, list[dict[str, Any]]] = {}
    with progress() as bar:
        task = bar.add_task("host", total=sum(map(len, HOST.values())))
        for axis, states in HOST.items():
            found[axis] = []
            for state in states:
                found[axis].append(asdict(state) | measure(state, steps).told())
                bar.advance(task)
    return found


class Engine:
    """An engine in this process, and prompts for it that have nothing in common."""

    def __init__(self, settings: OfflineSettings) -> None:
        self._core, ready = load_engine(settings)
        self._vocab_size = ready.vocab_size
        self._rng = random.Random(settings.seed)
        self.capacity = ready.capacity
        self.info = info_of(settings, ready)

    def run(self, clients: int, requests: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Figures of one closed loop, with its steps'. Raises SystemExit where a request failed."""
        prompts = [self._rng.choices(range(self._vocab_size), k=prompt_tokens) for _ in range(requests)]
        outcomes, steps = ClosedLoop(self._core, output_tokens, lambda: None).run(clients, prompts)
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        if failures:
            raise SystemExit(f"{len(failures)} of {requests} requests failed: {failures[0]}")
        return figures(outcomes) | {"step": steps.figures()}


def throughput_curve(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each concurrency, with so many requests for each client."""
    found = []
    with progress() as bar:
        task = bar.add_task("throughput", total=len(options.concurrency))
        engine.run(1, 1, options.prompt_tokens, 2)
        for clients in options.concurrency:
            requests = max(clients * options.rounds, 4)
            found.append({"clients": clients} | engine.run(clients, requests, options.prompt_tokens, options.output_tokens))
            bar.advance(task)
    return found


def latency_curve(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each context that fits, alone and several times; the last is the longest there is."""
    longest = engine.capacity - options.output_tokens
    contexts = [context for context in options.contexts if context < longest] + [longest]
    found = []
    with progress() as bar:
        task = bar.add_task("latency", total=len(contexts))
        engine.run(1, 1, contexts[0], 2)
        for context in contexts:
            f = engine.run(1, options.repeats, context, options.output_tokens)
            medians = {name: f[name]["p50"] for name in ("time_to_first_token", "inter_token_latency")}
            prefill = context / medians["time_to_first_token"]
            found.append({"context": context, **medians, "prompt_tokens_per_second": prefill, "figures": f})
            bar.advance(task)
    return found


# --- what is told


def tell_host(curves: dict[str, list[dict[str, Any]]]) -> None:
    for axis, points in curves.items():
        rows = [(f"{axis} {point[FIELD[axis]]:,}", *(point[part] for part in PARTS), point["step"]) for point in points]
        show((axis, "plan us", "build_batch us", "backend plan us", "commit us", "all us"), rows, "medians of a step's parts on the host")


def tell_throughput(points: list[dict[str, Any]]) -> None:
    rows = [
        (
            str(point["clients"]),
            point["output_tokens_per_second"],
            point["inter_token_latency"]["p50"] * 1e3 if point["inter_token_latency"] else "-",
            point["time_to_first_token"]["p50"] * 1e3,
            f"{point['step']['host_share']:.2%}",
        )
        for point in points
    ]
    show(("clients", "tokens/s", "between tokens p50, ms", "first token p50, ms", "host's share"), rows)


def tell_latency(points: list[dict[str, Any]]) -> None:
    rows = [
        (str(p["context"]), p["time_to_first_token"] * 1e3, p["inter_token_latency"] * 1e3, p["prompt_tokens_per_second"]) for p in points
    ]
    show(("context", "first token p50, ms", "between tokens p50, ms", "prompt tokens/s"), rows, "one request alone")


def checks_of(curves: dict[str, list[dict[str, Any]]]) -> list[Check]:
    checks = []
    for axis in ("waiting", "waiting for pages"):
        first, last = curves[axis][0], curves[axis][-1]
        holds = last["step"] <= WAITING_MAY_COST * first["step"] + NOISE
        found = f"{first['step']:.0f} us with {first['waiting']}, {last['step']:.0f} us with {last['waiting']:,}"
        words = f"{axis}: requests in the queue cost a step at most {WAITING_MAY_COST - 1:.0%} and {NOISE:g} us"
        checks.append(Check(words, holds, found))
    steps = {point["running"]: point["step"] for point in curves["running"]}
    few, many = ((steps[n] - steps[n // 2]) / (n - n // 2) for n in (RUNNING, max(steps)))
    found = f"one more costs {few:.1f} us up to {RUNNING} and {many:.1f} us up to {max(steps)}"
    return [*checks, Check("a running request costs the same among many", many <= MARGINAL_MAY_GROW * few, found)]


def draw(curves: dict[str, Any], path: Path) -> None:
    def panels(figure: Any) -> None:
        axes = iter(figure.subplots(2, 3).ravel())
        host = curves.get("host", {})
        for axis in ("running", "waiting", "context"):
            _host_panel(next(axes), axis, host.get(axis, []))
        points = curves.get("throughput", [])
        rates = [point["output_tokens_per_second"] for point in points]
        _panel(next(axes), "output tokens/s by clients", [p["clients"] for p in points], {"": rates}, logs="x")
        points = curves.get("latency", [])
        contexts = [point["context"] for point in points]
        gaps, firsts = ([point[name] * 1e3 for point in points] for name in ("inter_token_latency", "time_to_first_token"))
        _panel(next(axes), "between tokens, ms, by context (batch 1)", contexts, {"": gaps}, logs="x")
        _panel(next(axes), "first token, ms, by context (batch 1)", contexts, {"": firsts}, logs="xy")

    picture(path, (13, 7), panels)


def _host_panel(axes: Any, axis: str, points: list[dict[str, Any]]) -> None:
    lines = {part: [point[part] for point in points] for part in (*PARTS, "step")}
    title = f"host's part of a step, us, by {axis}"
    _panel(axes, title, [max(point[FIELD[axis]], 1) for point in points], lines, logs="xy" if axis == "running" else "x")


def _panel(axes: Any, title: str, places: list[int], lines: dict[str, list[float]], logs: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    if not places:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    for name, values in lines.items():
        axes.plot(places, values, ".-", linewidth=1.0, label=name)
    if "x" in logs:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    if "y" in logs:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.35 * max(map(max, lines.values())))
    if len(lines) > 1:
        axes.legend(fontsize=8, loc="upper left", ncols=1 if "y" in logs else 3)
    axes.grid(alpha=0.25)


# --- the command


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="an existing folder")
    parser.add_argument("--curves", default=",".join(CURVES), help="which of them (default: %(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, help="checkpoint folder for throughput and latency")
    what.add_argument("--shape", choices=SHAPES, default="164m", help="of the random checkpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="timed for each point of the host's curves")
    parser.add_argument("--concurrency", type=numbers, default="1,2,4,8,16,32,64,128")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client of the throughput curve")
    parser.add_argument("--prompt_tokens", type=int, default=128, help="of the throughput curve")
    parser.add_argument("--output_tokens", type=int, default=64)
    parser.add_argument("--contexts", type=numbers, default="128,256,512,1024,2048,4096")
    parser.add_argument("--repeats", type=int, default=3, help="requests of each point of the latency curve")
    parser.add_argument("engine", nargs="*", help="options of `onehead bench --offline`, after --")
    options = parser.parse_args()
    options.curves = options.curves.split(",")
    if unknown := set(options.curves) - set(CURVES):
        parser.error(f"--curves: there are {', '.join(CURVES)}; got {', '.join(sorted(unknown))}")
    if options.output_tokens < 2:
        parser.error("--output_tokens must be at least 2: one token has no inter-token latency")
    if not options.output.is_dir():
        parser.error(f"--output: {options.output} is no folder")
    return options


def on_model(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model is, and the curves that need one."""
    most = max(options.concurrency)
    room = ["--engine.max_running", str(most), "--engine.step_tokens", str(max(512, most))]
    engine = Engine(load(OfflineSettings, ["--model", str(folder), *room, *options.engine], "bench.cost_curves"))
    curves: dict[str, Any] = {}
    if "throughput" in options.curves:
        curves["throughput"] = throughput_curve(engine, options)
        tell_throughput(curves["throughput"])
    if "latency" in options.curves:
        curves["latency"] = latency_curve(engine, options)
        tell_latency(curves["latency"])
    return engine.info, curves


def main() -> int:
    options = arguments()
    curves: dict[str, Any] = {}
    info: dict[str, Any] = {}
    checks: list[Check] = []
    if "host" in options.curves:
        curves["host"] = host_curves(options.steps)
        tell_host(curves["host"])
        checks = checks_of(curves["host"])
    if options.curves != ["host"]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.model
            if folder is None:
                folder = Path(scratch) / options.shape
                make(options.shape, folder)
            info, measured = on_model(options, folder)
            curves |= measured
    draw(curves, options.output / "cost_curves.png")
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return conclude("cost_curves", options.output, info, {"settings": told, "curves": curves}, checks)


if __name__ == "__main__":
    sys.exit(main())
