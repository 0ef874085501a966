"""`onehead bench --offline`: the bench's closed loops on an engine in this process, without HTTP,
text or a second process.

The engine is the one that `onehead serve` starts, loaded by the same function from the same
message, so the difference to a result over HTTP is what the service costs.
"""

import os
import random
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from pydantic import model_validator

from commands.bench.bench import Cases, report, run_of
from commands.bench.closed_loop import ClosedLoop
from commands.progress import progress
from server.config import EngineSettings, ServerSection
from server.errors import ConfigurationError, ResourceError, UsageError
from server.supervision.processors import engine_environment

if TYPE_CHECKING:
    from server import protocol
    from server.engine.core import EngineCore


class OfflineSettings(Cases, EngineSettings):
    """onehead bench --offline: put load on an engine in this process and report rates, latencies
    and the parts of a step.
    """

    @model_validator(mode="after")
    def _there_is_a_run(self) -> "OfflineSettings":
        if not self.concurrency:
            raise ValueError("concurrency is empty, so there is nothing to run")
        return self


def load_engine(settings: OfflineSettings) -> "tuple[EngineCore, protocol.Ready]":
    """The engine that `onehead serve` would start. Raises ConfigurationError or ResourceError."""
    from model.spec import CheckpointError, OptionError
    from server.engine.worker import load
    from server.service import start_message

    # The OpenMP runtime reads it when torch is imported, which is below.
    os.environ.update(
        engine_environment(),
    )
    start = start_message(settings, ServerSection())
    try:
        core, ready = load(start, lambda *_: None)
    except (CheckpointError, OptionError) as error:
        raise ConfigurationError(str(error)) from None
    except MemoryError as error:
        raise ResourceError(f"the model could not be loaded: {error}") from None
    return core, ready


def info_of(settings: OfflineSettings, ready: "protocol.Ready") -> dict[str, Any]:
    """The model's id, this version, and what the engine says when it is ready."""
    from server.hub.download import model_id

    return {"model_id": model_id(settings.model), "version": version("onehead")} | asdict(ready)


def _run_all(
    settings: OfflineSettings,
    core: "EngineCore",
    vocab_size: int,
    runs: list[dict[str, Any]],
) -> None:
    """Appends every run after the warm-up, one after the other."""
    rng = random.Random(f"{settings.seed} prompts")

    def prompts(count: int) -> list[list[int]]:
        return [rng.choices(range(vocab_size), k=settings.prompt_tokens) for _ in range(count)]

    with progress() as shown:
        ClosedLoop(core, settings.output_tokens, lambda: None).run(1, prompts(settings.warmup))
        for clients in settings.clients:
            label = f"closed {clients}"
            task = shown.add_task(label, total=settings.requests)
            loop = ClosedLoop(core, settings.output_tokens, partial(shown.advance, task))
            outcomes, steps = loop.run(clients, prompts(settings.requests))
            run = run_of(label, outcomes)
            run["figures"]["step"] = steps.figures()
            runs.append(run)


def bench(settings: OfflineSettings) -> int:
    """Runs every load that the settings name; the exit status, 1 where any request failed. Raises
    UsageError where the requests do not fit, and as `load_engine`.
    """
    core, ready = load_engine(settings)
    needed = settings.prompt_tokens + settings.output_tokens
    if needed > ready.capacity:
        words = f"prompt_tokens and output_tokens are {needed} together"
        raise UsageError(f"{words}; the model and its cache hold {ready.capacity}")
    runs: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):
        _run_all(settings, core, ready.vocab_size, runs)
    return report(settings, "offline", info_of(settings, ready), runs, len(settings.clients))
