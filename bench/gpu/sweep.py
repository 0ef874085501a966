"""Other configurations of the attention kernel beside the one that serves: seconds of a decode step
and of a prefill chunk.

A line of model.devices.gpu.attention.configurations is worth replacing where another is faster in
every case that matters; the rule for that is in README.md. It changes nothing and judges nothing.
"""

from dataclasses import replace
from typing import Any

import torch

from bench.gpu.attention import PAGE_SIZE, Problem
from bench.gpu.common import Part, captured, timed
from model.batch import build_batch
from model.devices.gpu.attention.configurations import Configuration, choose
from model.step import Row, StepPlan
from tests.support.checks import Found

OTHERS: dict[tuple[int, int], tuple[Configuration, ...]] = {
    (16, 128): (
        Configuration(16, 64, 256, 4, 3),
        Configuration(16, 64, 256, 2, 5),
        Configuration(16, 64, 512, 4, 5),
        Configuration(32, 64, 256, 4, 5),
        Configuration(64, 64, 256, 4, 3),
        Configuration(64, 64, 512, 4, 3),
        Configuration(64, 64, 256, 4, 4),
        Configuration(128, 64, 512, 8, 3),
    ),
    (48, 128): (
        Configuration(64, 64, 512, 4, 3),
        Configuration(64, 64, 512, 4, 4),
        Configuration(64, 64, 1024, 4, 5),
    ),
    (71, 64): (
        Configuration(128, 64, 1024, 8, 3),
        Configuration(128, 64, 512, 8, 5, most_registers=128),
        Configuration(128, 64, 1024, 4, 3),
    ),
    (8, 256): (
        Configuration(16, 32, 256, 4, 3),
        Configuration(16, 64, 256, 4, 3),
        Configuration(64, 32, 256, 4, 3),
        Configuration(64, 64, 256, 8, 2),
    ),
}
"""Query heads and columns -> configurations to try."""
CASES = ((1, 1024), (32, 2048), (64, 840), (256, 840), (256, 2048), (32, 8192))
SMALL_CASES = ((1, 64), (3, 128))
CHUNK, SMALL_CHUNK = (6144, 2048), (64, 64)
"""Tokens before a prefill chunk, and tokens in it."""


def in_words(configuration: Configuration) -> str:
    c = configuration
    return f"rows {c.rows}, keys {c.keys}, split {c.split}, warps {c.warps}, stages {c.stages}"


def backend_of(problem: Problem, configuration: Configuration) -> Any:
    from model.devices.gpu.attention.backend import TritonBackend

    return TritonBackend(problem.pool, problem.scale, problem.heads, configuration)


def decode(
    part: Part, configuration: Configuration, heads: int, columns: int, case: tuple[int, int]
) -> Found:
    """Seconds of a layer, over keys that no cache holds, and the bytes read in a second. What is
    wrong is not timed.
    """
    batch, context = case
    problem = Problem(heads, columns, [context] * batch, part.dtype, part.device)
    backend = backend_of(problem, configuration)
    plan = backend.plan(build_batch(StepPlan(tuple(problem.rows)), problem.layout, problem.upload))

    problem.check(backend.attend(plan, 0, problem.q_BHd))

    def layers() -> None:
        for layer in range(problem.layers):
            backend.attend(plan, layer, problem.q_BHd)

    found = timed(
        captured(layers) if part.device == "cuda" else layers, part, layers=problem.layers
    )
    return found | {"bytes_per_second": problem.num_bytes / found["seconds"]}


def prefill(part: Part, configuration: Configuration, heads: int, columns: int) -> Found:
    """Seconds of a layer of a chunk that follows a cached prefix, and the operations in a
    second.
    """
    start, count = SMALL_CHUNK if part.small else CHUNK
    problem = Problem(heads, columns, [start + count], part.dtype, part.device)
    row = Row(0, [0] * count, start, problem.rows[0].pages, None)
    backend = backend_of(problem, configuration)
    plan = backend.plan(build_batch(StepPlan((row,)), problem.layout, problem.upload))
    q = torch.randn(count, heads, columns, dtype=part.dtype, device=part.device)
    found = timed(lambda: backend.attend(plan, 0, q), part)
    return found | {"flops": 4 * heads * columns * count * (start + count / 2) / found["seconds"]}


@torch.inference_mode()
def measure(part: Part) -> None:
    for (heads, columns), others in list(OTHERS.items())[: 1 if part.small else None]:
        own = choose(heads, columns, part.dtype.itemsize, PAGE_SIZE)
        assert own is not None
        for number, each in enumerate((own, *(others[:1] if part.small else others))):
            configuration = each if part.device == "cuda" else replace(each, stages=1)
            name = f"{heads}x{columns}/{in_words(configuration)}{', serves' if number == 0 else ''}"
            with part.guarded(name):
                for case in SMALL_CASES if part.small else CASES:
                    part.note(
                        f"{name}/{case[0]}x{case[1]}",
                        decode(part, configuration, heads, columns, case),
                    )
                part.note(f"{name}/chunk", prefill(part, configuration, heads, columns))
