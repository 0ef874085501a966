"""What a launched step costs the host, without a device: scheduler, captured steps' lists,
launches, and sending events.

The real engine core, scheduler, runner, lists and worker, over a fake stream, which does work at
once and skips captured work, and a decoder and a draw that compute nothing. torch's operations
around a captured step (copies) run on a few numbers of a CPU, which takes about as long as
launching them does. Needs Triton installed, but compiles nothing. Each step computes one token of
each sequence, and is launched before the previous one is committed. A mixed step computes a prompt
besides, of as many tokens as a step may have, or of so few that it is captured.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.gpu.serve import step, watch
from cache.pool import KVPool
from commands.bench.figures import circumstances
from model.checkpoint.families import read_spec
from model.devices import create_backend
from model.devices.cpu.device import CpuDevice
from model.draw_words import pack_redraw
from model.kv_layout import layout_of
from model.runner.pending_step import PendingStep
from model.runner.runner import ModelRunner
from model.sampling import ALL_FINITE
from model.spec import ModelSpec
from model.step import Sampling
from server.config import EMBEDDED_MODEL
from server.engine.core import EngineCore
from server.engine.masks import MaskProcesses
from server.engine.scheduler import Limits, Scheduler
from server.engine.worker import Worker
from tests.support.report import show
from tests.support.submitting import submit

CPU = torch.device("cpu")
PAGE_SIZE = 64
MOST_CAPTURED = 256
SHORT = 64, 90
"""Sequences, and tokens of a prompt beside them, which is short enough for steps of two to be
captured."""
STEP_TOKENS = 4096
VOCAB_SIZE = 512
PARTS = "plan", "launch", "result", "commit", "_send_events"
"""Of a step: Scheduler.plan, ModelRunner.launch, PendingStep.result, Scheduler.commit,
Worker._send_events."""


class Nothing:
    """A decoder of this shape that computes nothing."""

    num_parts_run = row_multiple = 1
    pooler = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def __call__(self, token_ids_T: Tensor, *_: Any) -> Tensor:
        return torch.zeros(len(token_ids_T), 1)

    def logits(self, x_TD: Tensor) -> Tensor:
        return torch.zeros(len(x_TD), VOCAB_SIZE)


class NoDraws:
    """The kernels that draw; every row gets token 0."""

    def __init__(self, num_rows: int) -> None:
        self.results_SR = torch.zeros(num_rows, 5, dtype=torch.int32)
        self.results_SR[:, 4] = ALL_FINITE

    def draw(self, *_: Any) -> None: ...

    def redraw(
        self, logits_SV: Any, settings: Any, drawn: Any, rows: Any, samples: Any, *_: Any
    ) -> None:
        """Packs what kernels would read."""
        pack_redraw(rows, samples, VOCAB_SIZE, True)


class NoDevice(CpuDevice):
    """A device that has kernels for draws, as a GPU has."""

    def row_draws(self, num_rows: int, num_tokens: int) -> Any:
        return NoDraws(num_rows)


class Done:
    """A fake stream, event and pipe: work runs at once, waits return at once, a captured graph does
    nothing, sent bytes are dropped.
    """

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> "Done":
        return self

    def synchronize(self) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    def send_bytes(self, data: bytes) -> None: ...


class NoMasks:
    """The masks of a worker without constraints."""

    def collect(self, patience: float) -> None: ...


GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.1)


def make_worker(num_sequences: int, num_tokens: int, most_captured: int = 0) -> Worker:
    """With room for so many sequences of so many tokens. At least so many tokens of a step can be
    captured.
    """
    spec = read_spec(EMBEDDED_MODEL)
    layout = layout_of(spec, PAGE_SIZE)
    num_pages = num_sequences * layout.most_pages(num_tokens, STEP_TOKENS)
    # Nothing is ever written to it, so that it takes no memory.
    pool = KVPool.allocate(layout, num_pages, torch.float32, CPU)
    backend = create_backend("triton-fast", pool, spec.attention_scale, spec.num_query_heads)
    runner = ModelRunner(
        cast(Any, Nothing(spec)),
        pool,
        backend,
        NoDevice(),
        Done(),
        max(num_sequences, most_captured),
        STEP_TOKENS,
    )
    runner.capture(num_tokens)
    scheduler = Scheduler(Limits(num_pages, layout, num_tokens, num_sequences, STEP_TOKENS))
    return Worker(cast(Any, Done()), EngineCore(scheduler, runner), cast(MaskProcesses, NoMasks()))


def measure(
    num_sequences: int, context: int, steps: int, num_prompt: int = 0, sampling: Sampling = GREEDY
) -> dict[str, Any]:
    """Medians of so many steps in microseconds: of each part, and of all that the host does between
    two launches. With `num_prompt` tokens of a prompt in each, or of two prompts.
    """
    warm_up, mixed = steps // 10 + 2, num_prompt > 0
    longest = max(context + PAGE_SIZE + 2 * (steps + warm_up), num_prompt + 1)
    worker = make_worker(num_sequences + 2 * mixed, longest, MOST_CAPTURED if mixed else 0)
    core, seconds = worker.core, {part: list[float]() for part in PARTS}
    scheduler, runner = core.scheduler, cast(Any, core.runner)
    for id in range(num_sequences):
        # Page borders at different steps for different sequences, and no prefix in common.
        prompt = [id + 2, *([1] * (context + id % PAGE_SIZE - PAGE_SIZE // 2))]
        submit(scheduler, id, prompt, 2 * (steps + warm_up), sampling)
    while any(
        sequence.num_uncomputed > 1
        for sequence in (*scheduler.running.values(), *scheduler.waiting.values())
    ):
        core.step()
    if mixed:
        for number in range(warm_up + steps + 2):
            prompt = [number, *([0] * (num_prompt - 1))]
            submit(scheduler, num_sequences + number, prompt, 1, GREEDY)
    gc.freeze()  # As the engine does before it serves.
    for owner, part in zip((scheduler, runner, PendingStep, scheduler, worker), PARTS, strict=True):
        watch(owner, part, seconds[part])
    whole = []
    for number in range(warm_up + steps):
        began = time.perf_counter()
        step(worker)
        if number >= warm_up:
            whole.append(time.perf_counter() - began)
    if not num_sequences <= len(scheduler.running) <= num_sequences + 2 * mixed or mixed != bool(
        scheduler.waiting
    ):
        raise RuntimeError(
            f"{len(scheduler.running)} sequences run and {len(scheduler.waiting)} wait, not "
            f"{num_sequences}"
        )
    parts = {part.lstrip("_"): statistics.median(seconds[part][warm_up:]) * 1e6 for part in PARTS}
    kind = f"mixed, {num_prompt}" if mixed else f"single{', penalised' * sampling.penalises}"
    return (
        {"sequences": num_sequences, "step of": kind, "context": context}
        | parts
        | {"step": statistics.median(whole) * 1e6}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for launch_costs.json")
    parser.add_argument("--sequences", default="1,16,64,256")
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        help="tokens of a sequence before the steps that are timed",
    )
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    read = PendingStep.result
    rows = []
    cases = [(number, 0) for number in map(int, options.sequences.split(","))]
    cases += [SHORT, (cases[-1][0], STEP_TOKENS - cases[-1][0])]
    for num_sequences, num_prompt in cases:
        for sampling in (GREEDY,) if num_prompt else (GREEDY, PENALISED):
            costs = measure(num_sequences, options.context, options.steps, num_prompt, sampling)
            rows.append(costs)
            PendingStep.result = read  # type: ignore[method-assign]
    show(rows[0], (row.values() for row in rows), "microseconds of a step")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        settings = {"steps": options.steps}
        (options.output / "launch_costs.json").write_text(
            json.dumps(circumstances(settings) | {"rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
