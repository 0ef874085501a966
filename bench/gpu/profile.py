"""Where a decode step's time goes: the device's seconds of a step, the host's of launching it, and the device's by kernel.

A replayed CUDA graph holds everything up to the logits; a step adds drawing. It judges nothing.
"""

import statistics
import time
from typing import Any

import torch

from bench.gpu.check import rows_of
from bench.gpu.common import Part, engine, median_seconds
from cache.layout import pages_for
from model.step import Sample, Sampling, StepPlan
from tests.support.report import Found

PAGE_SIZE = 64
CASES = ((1, 1024), (8, 840), (32, 840), (64, 840), (128, 840), (256, 840), (256, 2048))
SMALL_CASES = ((1, 64), (3, 128))
TEMPERATURES = (0.0, 0.6)
LAUNCHES, PROFILED, LISTED = 20, 5, 20


def timed(part: Part, runner: Any, plan: StepPlan) -> Found:
    """Medians in seconds: of the graph's replay, of a step, and of the host until the step is launched."""
    found: Found = {}
    with torch.inference_mode():
        graph = runner._graphs.find(plan.rows, [-1] * len(plan.rows)) if runner._graphs is not None else None
        if graph is not None:
            found["graph"] = median_seconds(graph, part.device, 3 if part.small else 30)
        found["step"] = median_seconds(lambda: runner.launch(plan), part.device, 3 if part.small else 30)
    launches = []
    for _ in range(3 if part.small else LAUNCHES):
        began = time.perf_counter()
        pending = runner.launch(plan)
        launches.append(time.perf_counter() - began)
        pending.result()
    return found | {"launch": statistics.median(launches)}


def by_kernel(runner: Any, plan: StepPlan) -> Found:
    """Of each kernel and copy, its seconds and calls in a step, the longest first. Empty without a GPU."""
    from torch.profiler import ProfilerActivity, profile

    runner.run(plan)
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            runner.run(plan)
    events = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: -event.self_device_time_total)
    found: Found = {
        event.key[:90]: {"seconds": event.self_device_time_total / 1e6 / PROFILED, "calls": event.count / PROFILED}
        for event in events[:LISTED]
    }
    seconds = sum(event.self_device_time_total for event in events) / 1e6 / PROFILED
    return {"kernels": found, "seconds": seconds, "calls": sum(event.count for event in events) / PROFILED}


def measure(part: Part) -> None:
    cases = SMALL_CASES if part.small else CASES
    pages = max(batch * pages_for(context, PAGE_SIZE) for batch, context in cases)
    sizes = ("--engine.max_running", str(max(batch for batch, _ in cases)), "--cache.page_size", str(PAGE_SIZE))
    core, ready = engine(
        part, part.checkpoint, *sizes, "--engine.step_tokens", "512" if part.small else "4096", "--cache.pages", str(pages)
    )
    part.note("kernels", ready.kernels)
    for batch, context in cases:
        for temperature in TEMPERATURES:
            name = f"{batch}x{context}/temperature {temperature:g}"
            with part.guarded(name):
                plan = StepPlan(rows_of([context] * batch, Sample(Sampling(temperature=temperature), [1], [2])))
                part.note(name, timed(part, core.runner, plan))
        with part.guarded(f"{batch}x{context}/by kernel"):
            part.note(f"{batch}x{context}/by kernel", by_kernel(core.runner, plan))
