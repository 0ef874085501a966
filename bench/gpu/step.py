"""A decode step of the whole model through the runner, by batch and context. It knows no floors: those are the report's."""

import statistics
import time
from array import array

from bench.gpu.common import Part, engine
from cache.layout import pages_for
from model.step import Row, Sample, Sampling, StepPlan

CASES = ((1, 2048), (32, 2048), (256, 2048), (1, 8192), (32, 8192), (256, 8192))
"""Sequences, and tokens of each when the step is over."""
SMALL_CASES = ((1, 64), (3, 128))
PAGE_SIZE = 64


def plan_of(batch: int, context: int) -> StepPlan:
    """Every row computes its last token and draws greedily."""
    pages, sample = pages_for(context, PAGE_SIZE), Sample(Sampling(temperature=0.0), [1], [])
    return StepPlan(tuple(Row(i, [1], context - 1, [array("q", range(i * pages, (i + 1) * pages))], sample) for i in range(batch)))


def measure(part: Part) -> None:
    cases = SMALL_CASES if part.small else CASES
    pages = max(batch * pages_for(context, PAGE_SIZE) for batch, context in cases)
    core, ready = engine(part, part.checkpoint, "--cache.pages", str(pages), "--engine.max_running", str(max(cases)[0]))
    part.note("kernels", ready.kernels)
    for batch, context in cases:
        name = f"{batch}x{context}"
        with part.guarded(name):
            plan, times = plan_of(batch, context), []
            for _ in range(5 if part.small else 25):
                began = time.perf_counter()
                core.runner.run(plan)
                times.append(time.perf_counter() - began)
            part.note(name, {"seconds": statistics.median(times[len(times) // 5 :]), "first": times[0]})
