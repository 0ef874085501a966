"""Where a decode step's time goes: the device's seconds of a step, the host's of launching it, and
the device's by kernel.

A replayed CUDA graph holds everything up to the draw; filters and penalties stand behind it. It
judges nothing.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from bench.gpu.check import decode_plan, rows_of
from bench.gpu.common import Part, by_kernel, engine, timed
from cache.layout import pages_for
from model.draw_words import History
from model.sampling import begin_draw
from model.step import Sample, Sampling, StepPlan
from tests.support.checks import Found

PAGE_SIZE = 64
CASES = ((1, 1024), (8, 840), (32, 840), (64, 840), (128, 840), (256, 840), (256, 2048))
SAMPLED_CASES = ((1, 1024), (64, 840), (256, 840))
SMALL_CASES = ((1, 64), (3, 128))
TEMPERATURES = (0.0, 0.6)
HISTORY = 4096
SAMPLES = {
    "top_p 0.95": Sample(Sampling(top_p=0.95), [1], [2]),
    "top_k 64, top_p 0.95": Sample(Sampling(top_k=64, top_p=0.95), [1], [2]),
    "repetition 1.1": Sample(
        Sampling(repetition_penalty=1.1), (), [2], history=History(range(HISTORY), [2])
    ),
}
"""What asks for more than a draw. The last has a history of 4,096 different tokens."""
CONFINED, SMALL_CONFINED = ((1, 49_152), (64, 49_152), (1, 262_144), (64, 262_144)), ((2, 5_000),)
"""Rows and tokens of logits that are drawn by top-k and top-p."""
PROMPTS, SMALL_PROMPTS = (4, 1024), (2, 16)
"""Prompts of a step, and tokens of each."""
SAMPLE = Sample(Sampling(), [1], [2])
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


def prompts_plan(runner: Any, count: int, num_tokens: int) -> StepPlan:
    """A step of so many whole prompts."""
    rows = rows_of([num_tokens] * count, SAMPLE, runner.pool.layout)
    return StepPlan(tuple(replace(row, tokens=[3] * num_tokens, start=0) for row in rows))


@torch.inference_mode()
def confined(part: Part, device: Any) -> None:
    """Notes the seconds of a draw of nothing but logits: plain, and with each filter."""
    for num_rows, num_tokens in SMALL_CONFINED if part.small else CONFINED:
        logits_SV = torch.randn(num_rows, num_tokens, device=part.device, dtype=part.dtype) * 3
        for kind, sample in {"plain": SAMPLE, **SAMPLES}.items():
            name = f"draws/{num_rows}x{num_tokens}/{kind}"
            with part.guarded(name):
                samples = [sample] * num_rows
                part.note(name, timed(partial(begin_draw, device, logits_SV, samples), part))


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
    for batch, context in cases if part.small else SAMPLED_CASES:
        for kind, sample in SAMPLES.items():
            name = f"{batch}x{context}/{kind}"
            with part.guarded(name):
                part.note(
                    name, figures(part, runner, decode_plan(runner, [context] * batch, sample))
                )
    confined(part, runner.device)
    with part.guarded("prompts"):
        plan = prompts_plan(runner, *(SMALL_PROMPTS if part.small else PROMPTS))
        part.note("prompts/step", timed(lambda: runner.launch(plan), part))
        part.note("prompts/by kernel", by_kernel(partial(runner.run, plan), PROFILED))
    for batch, context in cases:  # After all that is timed: a profiler slows the host down.
        for temperature in TEMPERATURES:
            name = f"{batch}x{context}/temperature {temperature:g}, by kernel"
            with part.guarded(name):
                plan = decode_plan(
                    runner, [context] * batch, Sample(Sampling(temperature=temperature), [1], [2])
                )
                runner.run(plan)
                part.note(name, by_kernel(partial(runner.run, plan), PROFILED))
