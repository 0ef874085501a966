"""The workload of nano-vllm's bench, whole: on an engine in this process, and over HTTP from a real server with real clients.

Each run is done twice and both are reported: the first includes compilation. For steps with all sequences it measures the host's work (all
but waiting for the device) and whether the device still had work when the next step was launched; and at the very end, because a profiler
slows down what it measures, the GPU's work. Clients are processes of their own, so that reading events is not measured. torch is imported
in functions, so that client processes do not load it.
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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from bench.gpu.common import Part, engine, where
from bench.gpu.floor import Workload
from commands.bench.bench import Ask, figures
from commands.bench.client import Endpoint, Outcome, generate
from commands.bench.offline import ClosedLoop
from tests.support.report import Found

if TYPE_CHECKING:
    from model.runner.pending_step import PendingStep
    from model.step import StepPlan
    from server.engine.core import EngineCore
    from server.engine.worker import Worker

ROUNDS = 2
MOST_CLIENTS = 8
"""Processes."""
LEAD = 5.0
"""Seconds until clients begin: they are being started, and write their requests."""
TIMEOUT = 300.0


def options(part: Part) -> list[str]:
    """Room for all requests at once."""
    if part.small:
        return ["--cache.pages", "64", "--engine.max_running", "6", "--engine.step_tokens", "64"]
    return ["--cache.pages", "8448", "--engine.max_running", "256", "--engine.step_tokens", "4096"]


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
            raise RuntimeError(f"a request failed: {outcome.failure or f'{len(outcome.token_times)} of {length} tokens came'}")
    return figures(outcomes) | {"output_tokens": workload.num_tokens}


def on_engine(part: Part) -> "Worker":
    """Runs the workload twice, then fills the engine with all sequences. Returns it in a Worker whose output goes to /dev/null."""
    from server.engine.worker import Worker

    core, ready = engine(part, part.checkpoint, *options(part))
    gc.freeze()  # As the server's engine does.
    part.note("kernels", ready.kernels)
    prompts = part.workload.prompts
    for round, asked in enumerate(([prompt[::-1] for prompt in prompts], prompts)):  # Nothing is to be found in the cache.
        outcomes, steps = Lengths(core, part.workload).run(len(asked), asked)
        if core.scheduler.num_hit_tokens:
            raise RuntimeError(f"{core.scheduler.num_hit_tokens} tokens of prompts were not computed, but found in the cache")
        part.note(f"engine/{round}", told(outcomes, part.workload) | {"step": steps.figures()})
    worker = Worker(Connection(os.open(os.devnull, os.O_WRONLY), readable=False), core, cast(Any, None))
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

    scheduler, prompt_tokens, sampling = core.scheduler, 16 if part.small else 512, Sampling(temperature=part.workload.temperature)
    for number, prompt in enumerate(part.workload.prompts):
        scheduler.submit(10**6 + number, (prompt * 6)[:prompt_tokens], sum(many_and_few(part)) + 64, sampling)
    while any(sequence.num_uncomputed > 1 for sequence in (*scheduler.running.values(), *scheduler.waiting.values())):
        core.step()


def step(worker: "Worker") -> None:
    """One step as Worker.serve runs it."""
    worker._send_events(worker.core.step(worker._send_started), 0.0)


@contextmanager
def waiting(seconds: list[float]) -> Iterator[None]:
    """Within, every wait for the device appends what it took."""
    from model.devices.gpu.device import CudaEvent

    wait = CudaEvent.wait
    watch(CudaEvent, "wait", seconds)
    try:
        yield
    finally:
        CudaEvent.wait = wait  # type: ignore[method-assign]


def overlapping(launch: "Callable[[StepPlan], PendingStep]", pending: list[bool]) -> "Callable[[StepPlan], PendingStep]":
    """The same, which appends whether the device was still at the step before when a step had been launched."""
    before: Any = None

    def watched(plan: "StepPlan") -> "PendingStep":
        nonlocal before
        flight = launch(plan)
        if before is not None:
            pending.append(not before._event.query())
        before = flight.event
        return flight

    return watched


def steady(part: Part, worker: "Worker") -> Found:
    """Medians of steps that give every sequence one token: of the host's work and of the whole step. With an asynchronous runner the host's
    work is the step less the waits for the device; else the sum of the scheduler's plan and commit, the backend's plan, and sending events.
    """
    core, runner, seconds, pending = worker.core, cast(Any, worker.core.runner), list[float](), list[bool]()
    launches, host, whole = runner._stream is not None, [], []
    if launches:
        runner.launch = overlapping(runner.launch, pending)
    else:
        for owner, name in ((core.scheduler, "plan"), (core.scheduler, "commit"), (runner.backend, "plan"), (worker, "_send_events")):
            watch(owner, name, seconds)
    with waiting(seconds):
        for _ in range(many_and_few(part)[0]):
            seconds.clear()
            began = time.perf_counter()
            step(worker)
            whole.append(time.perf_counter() - began)
            host.append(whole[-1] - sum(seconds) if launches else sum(seconds))
    found = {"sequences": len(core.scheduler.running), "host": statistics.median(host), "step": statistics.median(whole)}
    return found | ({"overlapped": sum(pending) / len(pending)} if pending else {})


def profiled(part: Part, worker: "Worker") -> Found:
    """Seconds of kernels and copies in a step: 0 without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    steps = many_and_few(part)[1]
    with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(worker)
    events = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    return {"seconds": sum(float(event.self_device_time_total) for event in events) / 1e6 / steps}


# --- over HTTP


def send(port: int, lengths: list[tuple[int, int]], temperature: float, seed: str, start: float) -> list[Outcome]:
    """A client process: all its requests, by tokens of prompt and output, at the time `start` of the machine's clock."""
    endpoint, rng = Endpoint.parse(f"http://127.0.0.1:{port}"), random.Random(seed)
    asks, outcomes = [Ask(*each, temperature=temperature) for each in lengths], [Outcome(0.0) for _ in lengths]
    requests = [endpoint.request("POST", "/generate", ask.body(rng)) for ask in asks]

    def clock() -> float:
        return time.perf_counter() - start

    async def all_at_once() -> None:
        await asyncio.sleep(-clock())
        await asyncio.gather(*(generate(endpoint, r, TIMEOUT, o, clock) for r, o in zip(requests, outcomes, strict=True)))

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
    server = asyncio.run(Server.start(part.scratch / "server.log", *where(part, part.checkpoint), *options(part), *at_once))
    try:
        with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
            for round in range(ROUNDS):
                start, sent, outcomes = time.perf_counter() + LEAD, [], [Outcome(0.0)] * count
                for client in range(clients):
                    share = range(client, count, clients)
                    lengths = [(len(workload.prompts[i]), workload.outputs[i]) for i in share]
                    sent.append((share, pool.submit(send, server.port, lengths, workload.temperature, f"{round} {client}", start)))
                for share, future in sent:
                    for number, outcome in zip(share, future.result(), strict=True):
                        outcomes[number] = outcome
                part.note(f"http/{round}", told(outcomes, workload) | {"client_processes": clients})
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
            part.note("gpu", profiled(part, worker))
