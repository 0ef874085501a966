"""Where a decode step's time goes: the device's seconds of a step, the host's of launching it, and
the device's by kernel.

A replayed CUDA graph holds everything up to the logits; a step adds drawing. It judges nothing.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch

from bench.gpu.check import decode_plan
from bench.gpu.common import Part, by_kernel, engine, timed
from cache.layout import pages_for
from model.step import Sample, Sampling, StepPlan
from tests.support.checks import Found

PAGE_SIZE = 64
CASES = ((1, 1024), (8, 840), (32, 840), (64, 840), (128, 840), (256, 840), (256, 2048))
SMALL_CASES = ((1, 64), (3, 128))
TEMPERATURES = (0.0, 0.6)
LAUNCHES, PROFILED = 20, 5


def figures(part: Part, runner: Any, plan: StepPlan) -> Found:
    """The graph's replay and a step, by the device's clock; and seconds of the host until the step
    is launched.
    """
    found: Found = {}
    with torch.inference_mode():
        graph = runner._graphs.find(plan.decode) if runner._graphs is not None else None
        if graph is not None:
            found["graph"] = timed(graph, part)
        found["step"] = timed(lambda: runner.launch(plan), part)
    launches = []
    for _ in range(3 if part.small else LAUNCHES):
        began = time.perf_counter()
        pending = runner.launch(plan)
        launches.append(time.perf_counter() - began)
        pending.result()
    return found | {"launch": statistics.median(launches)}


def measure(part: Part) -> None:
    cases = SMALL_CASES if part.small else CASES
    pages = max(batch * pages_for(context, PAGE_SIZE) for batch, context in cases)
    core, ready = engine(
        part,
        part.checkpoint,
        max_running=max(batch for batch, _ in cases),
        page_size=PAGE_SIZE,
        pages=pages,
    )
    part.note("kernels", ready.kernels)
    runner: Any = core.runner
    for batch, context in cases:
        for temperature in TEMPERATURES:
            name = f"{batch}x{context}/temperature {temperature:g}"
            with part.guarded(name):
                plan = decode_plan(
                    runner, [context] * batch, Sample(Sampling(temperature=temperature), [1], [2])
                )
                part.note(name, figures(part, runner, plan))
    for batch, context in cases:  # After all that is timed: a profiler slows the host down.
        for temperature in TEMPERATURES:
            name = f"{batch}x{context}/temperature {temperature:g}, by kernel"
            with part.guarded(name):
                plan = decode_plan(
                    runner, [context] * batch, Sample(Sampling(temperature=temperature), [1], [2])
                )
                runner.run(plan)
                part.note(name, by_kernel(partial(runner.run, plan), PROFILED))
