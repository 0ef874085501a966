"""What a step costs the host, without a model: the real scheduler, `build_batch` and the backend's `plan`, and tokens that are invented.

It makes schedulers in the states that bench/cost_curves.py asks about and times the four parts of their steps. Invariant: every step that
is timed gives each running sequence exactly one token; none is admitted, ends or is preempted. It knows no weights and computes no logits.
"""

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from cache.layout import CacheLayout
from cache.pool import KVPool
from model.batch import build_batch
from model.devices import create_backend, find_device
from model.devices.backend import Backend
from model.step import SampledToken, Sampling, StepPlan, StepResult
from server.engine.scheduler import Limits, Scheduler

PARTS = "plan", "batch", "backend", "commit"
"""Scheduler.plan, build_batch, Backend.plan, Scheduler.commit."""
PAGE_SIZE = 64
CONTEXT = 256
"""Tokens that a sequence has computed where nothing else is said."""
RUNNING = 64
STEP_TOKENS = 65536
"""Large, so that all prompts are computed in few steps. A timed step uses one token for each sequence."""
MAX_CONTEXT = 2**20
HUGE = 4000
"""Pages that the prompt of the first waiting sequence needs if `for_pages`."""


@dataclass(frozen=True, slots=True)
class State:
    """What a scheduler holds while its steps are timed."""

    running: int = RUNNING
    context: int = CONTEXT
    waiting: int = 0
    for_pages: bool = False
    """True: waiting sequences lack pages. False: as many sequences run as may."""


@dataclass(slots=True)
class Timings:
    """Seconds of each step's parts, and of each submission to the queue."""

    parts: dict[str, list[float]]
    submissions: list[float]

    def told(self) -> dict[str, Any]:
        """Medians in microseconds: of each part, of all together, and of a submission."""
        whole = [sum(parts) for parts in zip(*self.parts.values(), strict=True)]
        found = {name: statistics.median(values) * 1e6 for name, values in self.parts.items()}
        submission = statistics.median(self.submissions) * 1e6 if self.submissions else None
        return found | {"step": statistics.median(whole) * 1e6, "steps": len(whole), "submission": submission}


def measure(state: State, steps: int) -> Timings:
    """So many steps of a scheduler in this state, after a few that are not counted."""
    scheduler, backend = _scheduler(state, steps), _backend()
    rng = random.Random(0)
    timings = Timings({part: [] for part in PARTS}, [])
    for id in range(state.running):
        # Page borders at different steps for different sequences, and no prefix in common.
        _submit(scheduler, id, state.context + id % PAGE_SIZE - PAGE_SIZE // 2, steps, rng)
    while any(sequence.num_uncomputed > 1 for sequence in (*scheduler.running.values(), *scheduler.waiting.values())):
        plan = scheduler.plan()
        scheduler.commit(plan, _invented(plan))
    for id in range(state.running, state.running + state.waiting):
        began = time.perf_counter()
        _submit(scheduler, id, HUGE * PAGE_SIZE if state.for_pages and id == state.running else CONTEXT, steps, rng)
        timings.submissions.append(time.perf_counter() - began)
    layout, device = scheduler.limits.layout, find_device("cpu")
    for number in range(_warmup(steps) + steps):
        times = [time.perf_counter()]
        plan = scheduler.plan()
        times.append(time.perf_counter())
        batch = build_batch(plan, layout, device.upload)
        times.append(time.perf_counter())
        backend.plan(batch)
        times.append(time.perf_counter())
        result = _invented(plan)
        commit = time.perf_counter()
        scheduler.commit(plan, result)
        committed = time.perf_counter() - commit
        if len(plan.rows) != state.running or any(len(row.tokens) != 1 for row in plan.rows):
            raise RuntimeError(f"a step of {len(plan.rows)} sequences where {state} was to be timed")
        if number >= _warmup(steps):
            for part, seconds in zip(PARTS, (*(b - a for a, b in pairwise(times)), committed), strict=True):
                timings.parts[part].append(seconds)
    return timings


def _warmup(steps: int) -> int:
    return max(3, steps // 10)


def _scheduler(state: State, steps: int) -> Scheduler:
    """A scheduler in which the running sequences fit and the waiting ones do not."""
    layout = CacheLayout.of(1, (), PAGE_SIZE)
    growth = steps + _warmup(steps) + PAGE_SIZE
    needed = state.running * (layout.most_pages(state.context + PAGE_SIZE + growth) + 1)
    if state.for_pages:
        needed = max(needed, HUGE + layout.most_pages(growth) + 1)
    places = state.running + 1 if state.for_pages else state.running
    return Scheduler(Limits(needed, layout, MAX_CONTEXT, places, STEP_TOKENS))


def _submit(scheduler: Scheduler, id: int, num_tokens: int, steps: int, rng: random.Random) -> None:
    prompt = [rng.randrange(2**31), *([7] * (max(1, num_tokens) - 1))]
    scheduler.submit(id, prompt, steps + _warmup(steps) + PAGE_SIZE, Sampling(temperature=0.0))


def _invented(plan: StepPlan) -> StepResult:
    return StepResult(tuple(None if row.sample is None else SampledToken(7, -1.0) for row in plan.rows))


def _backend() -> Backend:
    """What serves on this machine; planning looks at no page."""
    pool = KVPool.allocate(CacheLayout.of(1, (), PAGE_SIZE), 1, 64, 64, torch.float32, torch.device("cpu"))
    return create_backend(find_device("cpu").backend_for(pool, 16), pool, 1.0, 16)
