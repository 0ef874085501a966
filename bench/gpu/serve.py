"""The workload of nano-vllm's bench, whole: on an engine in this process, and over HTTP from a real
server with real clients.

The first round includes compilation; the figure is the median of those after it, with their spread.
For steps with all sequences it measures the host's work (all but waiting for the device), its
parts, and whether the device still had work when the next step was launched; and at the very end,
because a profiler slows down what it measures, the GPU's work by kernel. Clients are processes of
their own, so that reading events is not measured. torch is imported in functions, so that client
processes do not load it, and what serves HTTP where it is served: an engine needs none of it.
"""

import asyncio
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from bench.gpu.common import ROUNDS, Part, by_kernel, engine
from bench.gpu.floor import Workload
from commands.bench.client import Endpoint, Outcome, generate
from commands.bench.closed_loop import ClosedLoop
from commands.bench.figures import figures
from tests.support.checks import Found
from tests.support.submitting import submit

if TYPE_CHECKING:
    from model.runner.pending_step import PendingStep
    from model.step import StepPlan
    from server.engine.core import EngineCore
    from server.engine.worker import Worker

MOST_CLIENTS = 8
"""Processes."""
LEAD = 5.0
"""Seconds until clients begin: they are being started, and write their requests."""
TIMEOUT = 300.0


def options(part: Part) -> dict[str, int]:
    """Room for all requests at once, by the names of EngineOptions."""
    if part.small:
        return {"pages": 64, "max_running": 6, "step_tokens": 64}
    return {"pages": 8448, "max_running": 256, "step_tokens": 4096}


def flags(part: Part) -> list[str]:
    """The same for a server, with the model and the device."""
    found = ["--model", str(part.checkpoint), "--engine.device", part.device]
    for name, value in (options(part) | ({"threads": 1} if part.device == "cpu" else {})).items():
        found += [f"--{'cache' if name == 'pages' else 'engine'}.{name}", str(value)]
    return found


def summary(rounds: list[Found]) -> Found:
    """Every round, and of those after the first the median of tokens per second and its spread."""
    rates = [each["output_tokens_per_second"] for each in rounds[1:] or rounds]
    return {
        "output_tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "rounds": rounds,
    }


def prompts_of(part: Part, round: int) -> list[list[int]]:
    """Prompts of the workload's lengths that no round before had: nothing is to be found in the
    cache.
    """
    rng = random.Random(round)
    return [[rng.randint(0, 10_000) for _ in prompt] for prompt in part.workload.prompts]


# --- the engine


class Lengths(ClosedLoop):
    """A closed loop whose requests have lengths of their own."""

    def __init__(self, core: "EngineCore", workload: Workload) -> None:
        super().__init__(core, 0, lambda: None)
        self._lengths, self._temperature = workload.outputs, workload.temperature

    def _submit(self, number: int, prompt: list[int]) -> None:
        self._output_tokens = self._lengths[number]
        super()._submit(number, prompt)


def told(outcomes: list[Outcome], workload: Workload) -> Found:
    """Figures of a round. Raises RuntimeError where a request failed or came out short."""
    for outcome, length in zip(outcomes, workload.outputs, strict=True):
        if outcome.failure or len(outcome.token_times) != length:
            raise RuntimeError(
                "a request failed: "
                f"{outcome.failure or f'{len(outcome.token_times)} of {length} tokens came'}"
            )
    return figures(outcomes) | {"output_tokens": workload.num_tokens}


def on_engine(part: Part) -> "Worker":
    """Runs the workload, then fills the engine with all sequences. Returns it in a Worker whose
    output goes to /dev/null.
    """
    from server.engine.worker import Worker

    core, ready = engine(part, part.checkpoint, **options(part))
    gc.freeze()  # As the server's engine does.
    part.note("kernels", ready.kernels)
    rounds: list[Found] = []
    for round in range(1 + ROUNDS):
        asked = prompts_of(part, round)
        outcomes, steps = Lengths(core, part.workload).run(len(asked), asked)
        if core.scheduler.num_hit_tokens:
            raise RuntimeError(
                f"{core.scheduler.num_hit_tokens} tokens of prompts were not computed, but found "
                "in the cache"
            )
        rounds.append(told(outcomes, part.workload) | {"step": steps.figures()})
        part.note("engine", summary(rounds))
    worker = Worker(
        Connection(os.open(os.devnull, os.O_WRONLY), readable=False), core, cast(Any, None)
    )
    with part.guarded("host"):
        fill(part, core)
        part.note("host", steady(part, worker))
    return worker


def watch(owner: Any, name: str, seconds: list[float]) -> None:
    """Every call of the method appends what it took."""
    method = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = method(*arguments)
        seconds.append(time.perf_counter() - began)
        return result

    setattr(owner, name, timed)


def many_and_few(part: Part) -> tuple[int, int]:
    """Steps that are timed, and those under a profiler."""
    return (8, 3) if part.small else (64, 16)


def fill(part: Part, core: "EngineCore") -> None:
    """All sequences, up to where each of the next steps gives each of them one token."""
    from model.step import Sampling

    scheduler = core.scheduler
    prompt_tokens = 16 if part.small else 512
    sampling = Sampling(temperature=part.workload.temperature)
    for number, prompt in enumerate(part.workload.prompts):
        submit(
            scheduler,
            10**6 + number,
            (prompt * 6)[:prompt_tokens],
            sum(many_and_few(part)) + 64,
            sampling,
        )
    while any(
        sequence.num_uncomputed > 1
        for sequence in (*scheduler.running.values(), *scheduler.waiting.values())
    ):
        core.step()


def step(worker: "Worker") -> None:
    """One step as Worker.serve runs it."""
    worker._send_events(worker.core.step(worker._send_started), 0.0)


@contextmanager
def waiting(seconds: list[float]) -> Iterator[None]:
    """Within, every wait for the device appends what it took."""
    import torch

    wait = torch.cuda.Event.synchronize
    watch(torch.cuda.Event, "synchronize", seconds)
    try:
        yield
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]


def overlapping(
    launch: "Callable[[StepPlan], PendingStep]", pending: list[bool]
) -> "Callable[[StepPlan], PendingStep]":
    """The same, which appends whether the device was still at the step before when a step had been
    launched.
    """
    before: Any = None

    def watched(plan: "StepPlan") -> "PendingStep":
        nonlocal before
        flight = launch(plan)
        if before is not None:
            pending.append(not before.query())
        before = flight.event
        return flight

    return watched


def steady(part: Part, worker: "Worker") -> Found:
    """Medians of steps that give every sequence one token: of the host's work, of its parts and of
    the whole step. The host's work is the step less the waits for the device; where the runner is
    not asynchronous, less `launch`, which computes the step.
    """
    core, runner, pending = worker.core, cast(Any, worker.core.runner), list[bool]()
    is_asynchronous = runner._stream is not None
    parts: dict[str, list[float]] = {
        name: [] for name in ("plan", "launch", "commit", "send", "wait")
    }
    if is_asynchronous:
        runner.launch = overlapping(runner.launch, pending)
    for owner, name, part_name in (
        (core.scheduler, "plan", "plan"),
        (runner, "launch", "launch"),
        (core.scheduler, "commit", "commit"),
        (worker, "_send_events", "send"),
    ):
        watch(owner, name, parts[part_name])
    host, whole, sums = list[float](), list[float](), {name: list[float]() for name in parts}
    with waiting(parts["wait"]):
        for _ in range(many_and_few(part)[0]):
            began = time.perf_counter()
            step(worker)
            whole.append(time.perf_counter() - began)
            for name, seconds in parts.items():
                sums[name].append(sum(seconds))
                seconds.clear()
            host.append(whole[-1] - sums["wait" if is_asynchronous else "launch"][-1])
    medians = {name: statistics.median(each) for name, each in sums.items()}
    found = {
        "sequences": len(core.scheduler.running),
        "host": statistics.median(host),
        "step": statistics.median(whole),
        "parts": medians,
    }
    return found | ({"overlapped": sum(pending) / len(pending)} if pending else {})


# --- over HTTP


def send(
    port: int, lengths: list[tuple[int, int]], temperature: float, seed: str, start: float
) -> list[Outcome]:
    """A client process: all its requests, by tokens of prompt and output, at the time `start` of
    the machine's clock.
    """
    from commands.bench.bench import Ask

    endpoint, rng = Endpoint.parse(f"http://127.0.0.1:{port}"), random.Random(seed)
    asks = [Ask(*each, temperature=temperature) for each in lengths]
    outcomes = [Outcome(0.0) for _ in lengths]
    requests = [endpoint.request("POST", "/generate", ask.body(rng)) for ask in asks]

    def clock() -> float:
        return time.perf_counter() - start

    async def all_at_once() -> None:
        await asyncio.sleep(-clock())
        await asyncio.gather(
            *(
                generate(endpoint, r, TIMEOUT, o, clock)
                for r, o in zip(requests, outcomes, strict=True)
            )
        )

    asyncio.run(all_at_once())
    for ask, outcome in zip(asks, outcomes, strict=True):
        outcome.failure = outcome.failure or ask.problem(outcome)
    return outcomes


def over_http(part: Part) -> None:
    """Prompts are texts of as many tokens as the workload's, cut by the server."""
    from tests.support.live import Server

    workload, count = part.workload, len(part.workload.prompts)
    clients = max(1, min(MOST_CLIENTS, (os.cpu_count() or 1) // 2, count))
    at_once = "--server.lb_grace", "0"  # No late requests come.
    rounds: list[Found] = []
    server = asyncio.run(Server.start(part.scratch / "server.log", *flags(part), *at_once))
    try:
        with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
            for round in range(1 + ROUNDS):
                start, sent, outcomes = time.perf_counter() + LEAD, [], [Outcome(0.0)] * count
                for client in range(clients):
                    share = range(client, count, clients)
                    lengths = [(len(workload.prompts[i]), workload.outputs[i]) for i in share]
                    sent.append(
                        (
                            share,
                            pool.submit(
                                send,
                                server.port,
                                lengths,
                                workload.temperature,
                                f"{round} {client}",
                                start,
                            ),
                        )
                    )
                for share, future in sent:
                    for number, outcome in zip(share, future.result(), strict=True):
                        outcomes[number] = outcome
                rounds.append(told(outcomes, workload) | {"client_processes": clients})
                part.note("http", summary(rounds))
    finally:
        asyncio.run(server.stop())


def measure(part: Part) -> None:
    worker = None
    with part.guarded("engine/failure"):
        worker = on_engine(part)
    with part.guarded("http/failure"):
        over_http(part)
    if worker is not None:
        with part.guarded("gpu"):
            part.note("gpu", by_kernel(partial(step, worker), many_and_few(part)[1]))
