"""`onehead bench --offline`: the bench's closed loops on an engine in this process, without HTTP, text or a second process.

The engine is the one that `onehead serve` starts, loaded by the same function from the same message, so the difference to a result over
HTTP is what the service costs. Prompts are random token ids, choices greedy, ends ignored. Invariant: the parts of a step add up to the
step; a latency counts from the submission of its request, so it includes the time in the engine's queue.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import model_validator

from commands.bench.bench import WARMUP, Cases, Interrupted, partial_run, progress_bar, report, run_of, spread
from commands.bench.client import Outcome
from commands.bench.comparison import Earlier
from server.config import EngineSettings, ServerSection
from server.errors import ConfigurationError, ResourceError, UsageError
from server.supervision.processors import engine_environment

if TYPE_CHECKING:
    from model.step import StepPlan, StepResult
    from server import protocol
    from server.engine.core import EngineCore, PendingStep, Runner

Result = TypeVar("Result")


class OfflineSettings(Cases, EngineSettings):
    """onehead bench --offline: put load on an engine in this process and report rates, latencies and the parts of a step."""

    @model_validator(mode="after")
    def _there_is_a_run(self) -> "OfflineSettings":
        if not self.concurrency:
            raise ValueError("concurrency is empty, so there is nothing to run")
        return self


class Stopwatch:
    """A runner that counts the seconds in which another computes, or is waited for where it computes asynchronously."""

    def __init__(self, runner: "Runner") -> None:
        self._runner = runner
        self.seconds = 0.0

    @property
    def progress(self) -> int:
        return self._runner.progress

    def run(self, plan: "StepPlan") -> "StepResult":
        return self._counted(partial(self._runner.run, plan))

    def launch(self, plan: "StepPlan") -> "PendingStep":
        counted = self.seconds
        pending = self._counted(partial(self._runner.launch, plan))
        if not pending.done:
            self.seconds = counted
        return _Timed(pending, self)

    def _counted(self, work: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds += time.perf_counter() - began


class _Timed:
    """A PendingStep whose waiting is counted."""

    def __init__(self, pending: "PendingStep", stopwatch: Stopwatch) -> None:
        self.done, self._pending, self._stopwatch = pending.done, pending, stopwatch

    def result(self) -> "StepResult":
        return self._stopwatch._counted(self._pending.result)


@dataclass(slots=True)
class Steps:
    """Seconds of every step: in the scheduler and whatever else is not the runner's (host), and in the runner (compute)."""

    host: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        total = sum(self.host) + sum(self.compute)
        parts = {"host": spread(self.host), "compute": spread(self.compute)}
        return {"count": len(self.host), **parts, "host_share": sum(self.host) / total if total else None}


class ClosedLoop:
    """Clients of one engine, each submitting its next prompt when its last has ended."""

    def __init__(self, core: "EngineCore", output_tokens: int, on_end: Callable[[], None]) -> None:
        self._core = core
        self._stopwatch = Stopwatch(core.runner)
        self._output_tokens, self._temperature = output_tokens, 0.0
        self._on_end = on_end
        self._outcomes: list[Outcome] = []
        self._began = 0.0

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def run(self, clients: int, prompts: list[list[int]]) -> tuple[list[Outcome], Steps]:
        """Every prompt to its end; the outcomes in their order. Raises Interrupted at Ctrl-C."""
        self._outcomes, steps, numbers = [Outcome(0.0) for _ in prompts], Steps(), iter(range(len(prompts)))
        runner, self._core.runner = self._core.runner, self._stopwatch
        self._began = time.perf_counter()
        try:
            for number in islice(numbers, clients):
                self._submit(number, prompts[number])
            while self._core.scheduler.has_work:
                for _ in range(self._step(steps)):
                    number = next(numbers, -1)
                    if number >= 0:
                        self._submit(number, prompts[number])
        except KeyboardInterrupt:
            raise Interrupted(self._outcomes) from None
        finally:
            self._core.runner = runner
        return self._outcomes, steps

    def _submit(self, number: int, prompt: list[int]) -> None:
        from model.step import Sampling

        outcome = self._outcomes[number]
        outcome.intended = outcome.sent = self._clock()
        outcome.input_length = len(prompt)
        self._core.scheduler.submit(number, prompt, self._output_tokens, Sampling(temperature=self._temperature, seed=number))

    def _step(self, steps: Steps) -> int:
        """One step of the engine; how many requests it ended."""
        from server.engine.scheduler import TokenEvent

        began, computed = time.perf_counter(), self._stopwatch.seconds
        news = self._core.step(self._started)
        now = time.perf_counter()
        compute = self._stopwatch.seconds - computed
        steps.host.append(now - began - compute)
        steps.compute.append(compute)
        return sum(self._take(event, now - self._began) for event in news if isinstance(event, TokenEvent))

    def _started(self) -> None:
        self._core.scheduler.take_started()

    def _take(self, event: Any, now: float) -> bool:
        """One token or failure; whether it was the request's last."""
        from model.step import SampleError

        outcome = self._outcomes[event.id]
        if isinstance(event.drawn, SampleError):
            outcome.failure = event.drawn.reason
        else:
            outcome.token_times.append(now)
            outcome.token_ids.append(event.drawn.token)
            if event.finish is None:
                return False
        outcome.end = now
        self._on_end()
        return True


def load_engine(settings: OfflineSettings) -> "tuple[EngineCore, protocol.Ready]":
    """The engine that `onehead serve` would start. Raises ConfigurationError or ResourceError."""
    from model.spec import CheckpointError, OptionError
    from server.engine.worker import load
    from server.service import start_message

    os.environ.update(engine_environment())  # The OpenMP runtime reads it when torch is imported, which is below.
    start = start_message(settings, ServerSection())
    try:
        core, ready = load(start, lambda *_: None)
    except (CheckpointError, OptionError) as error:
        raise ConfigurationError(str(error)) from None
    except MemoryError as error:
        raise ResourceError(f"the model could not be loaded: {error}") from None
    return core, ready


def info_of(settings: OfflineSettings, ready: "protocol.Ready") -> dict[str, Any]:
    """What is measured, by the names that a server's /info has for it."""
    from server.hub.download import model_id

    return {
        "model_id": model_id(settings.model),
        "model_dtype": ready.dtype,
        "model_device_type": ready.device,
        "max_total_tokens": ready.capacity,
        "version": version("onehead"),
        "num_parameters": ready.num_parameters,
        "quantization": ready.quantization,
        "kv_dtype": ready.kv_dtype,
        "kv_bytes_per_token": ready.kv_bytes_per_token,
        "kv_pages": ready.num_pages,
        "kv_page_size": ready.page_size,
        "kernels": ready.kernels,
        "deterministic": ready.deterministic,
    }


def _run_all(settings: OfflineSettings, core: "EngineCore", vocab_size: int) -> list[dict[str, Any]]:
    """Every run after the warm-up, one after the other; after an interruption those that there are, the last one partial."""
    rng = random.Random(f"{settings.seed} prompts")

    def prompts(count: int) -> list[list[int]]:
        return [rng.choices(range(vocab_size), k=settings.prompt_tokens) for _ in range(count)]

    runs: list[dict[str, Any]] = []
    label = WARMUP
    with progress_bar() as progress:
        try:
            ClosedLoop(core, settings.output_tokens, lambda: None).run(1, prompts(settings.warmup))
            for clients in settings.clients:
                label = f"closed {clients}"
                task = progress.add_task(label, total=settings.requests)
                loop = ClosedLoop(core, settings.output_tokens, partial(progress.advance, task))
                outcomes, steps = loop.run(clients, prompts(settings.requests))
                run = run_of(label, outcomes)
                run["figures"]["step"] = steps.figures()
                runs.append(run)
        except Interrupted as interrupted:
            runs += partial_run(label, interrupted.outcomes)
    return runs


def bench(settings: OfflineSettings) -> int:
    """Runs every load that the settings name; the exit status, which is 1 where any request failed. Raises UsageError where the requests
    do not fit, or the earlier result is not of the same cases, and as `load_engine`.
    """
    earlier = None if settings.compare is None else Earlier.read(settings.compare)
    if earlier is not None:
        earlier.must_be_of("offline", settings.model_dump(mode="json"), [f"closed {clients}" for clients in settings.clients])
    core, ready = load_engine(settings)
    needed = settings.prompt_tokens + settings.output_tokens
    if needed > ready.capacity:
        raise UsageError(f"prompt_tokens and output_tokens are {needed} together; the model and its cache hold {ready.capacity}")
    info = info_of(settings, ready)
    if earlier is not None:
        earlier.must_be_on(info)
    return report(settings, "offline", info, _run_all(settings, core, ready.vocab_size), len(settings.clients), earlier)
