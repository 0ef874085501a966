"""A decode step of the whole model through the runner, by batch and context; and whether a launch
waits for the device, by what requests ask for. It knows no floors: those are the report's.
"""

import statistics
import time
from array import array
from collections.abc import Sequence
from typing import Any

from bench.gpu.common import ROUNDS, Part, engine
from cache.layout import pages_for
from model.runner.runner import ModelRunner
from model.step import Row, Sample, SampleError, Sampling, StepPlan, bitmap
from tests.support.checks import Found

CASES = ((1, 2048), (32, 2048), (256, 2048), (1, 8192), (32, 8192), (256, 8192))
"""Sequences, and tokens of each when the step is over."""
MIXED, SMALL_MIXED = (64, 840, 128), (2, 64, 5)
"""Sequences, tokens of each, and tokens of a prompt beside all but one of them."""
SMALL_CASES = ((1, 64), (3, 128))
PAGE_SIZE, LONGEST = 64, 8192
GREEDY = Sample(Sampling(temperature=0.0), [1], [])


def plan_of(context: int, samples: Sequence[Sample]) -> StepPlan:
    """Every row computes its last token and draws."""
    pages = pages_for(context, PAGE_SIZE)
    return StepPlan(
        tuple(
            Row(i, [1], context - 1, [array("q", range(i * pages, (i + 1) * pages))], sample)
            for i, sample in enumerate(samples)
        )
    )


def kinds(vocab_size: int) -> dict[str, list[Sample]]:
    """Rows of a step for everything that a request can ask of a draw, and of one step for all of
    it.
    """

    def asking(sampling: Sampling, **more: Any) -> Sample:
        return Sample(sampling, [1], [2, 3], **more)

    one_by_one = {
        "greedy": asking(Sampling(temperature=0.0)),
        "temperature": asking(Sampling(temperature=0.8)),
        "top_p": asking(Sampling(top_p=0.9)),
        "top_k": asking(Sampling(top_k=50)),
        "min_p": asking(Sampling(min_p=0.05)),
        "typical_p": asking(Sampling(typical_p=0.9)),
        "penalties": asking(
            Sampling(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5)
        ),
        "logit_bias": asking(Sampling(logit_bias={5: 1.0})),
        "allowed_token_ids": asking(Sampling(allowed_tokens=bitmap([4, 5, 6]))),
        "bad_words": asking(Sampling(bad_words=[[3, 7], [8]])),
        "forbidden": asking(Sampling(), forbidden=[0]),
        "num_top": asking(Sampling(), num_top=5),
        "mask": asking(Sampling(), mask=b"\xff" * -(-vocab_size // 8)),
    }
    return {kind: [sample] for kind, sample in one_by_one.items()} | {
        "together": list(one_by_one.values())
    }


def waiting(runner: Any, plan: StepPlan) -> str | None:
    """How launching this step waits for the GPU; None where it does not."""
    import torch

    runner.run(plan)  # Compiling may wait.
    torch.cuda.set_sync_debug_mode("error")
    try:
        flight = runner.launch(plan)
    except RuntimeError as error:
        return f"{error}"[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # begin_draw turns a synchronisation error into the SampleError of a row, so the results are
    # searched for one too.
    return next(
        (drawn.reason for drawn in flight.result().drawn if isinstance(drawn, SampleError)), None
    )


def waits(part: Part, runner: Any, vocab_size: int) -> Found:
    """Of every kind of request. Where nothing is launched there is nothing to ask."""
    if part.device != "cuda":
        return {"asked": False}
    found: dict[str, str | None] = {}
    for kind, samples in kinds(vocab_size).items():
        found[kind] = waiting(runner, plan_of(PAGE_SIZE, samples))
    return {
        "asked": True,
        "kinds": list(found),
        "waiting": {kind: why for kind, why in found.items() if why is not None},
    }


def median_of(runner: Any, plan: StepPlan, count: int) -> float:
    """Seconds of a step from the call to its result, by the host's clock."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        runner.run(plan)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(part: Part) -> None:
    cases = SMALL_CASES if part.small else CASES
    pages = max(batch * pages_for(context, PAGE_SIZE) for batch, context in cases)
    core, ready = engine(part, part.checkpoint, pages=pages, max_running=max(cases)[0])
    part.note("kernels", ready.kernels)
    with part.guarded("captures"):
        part.note("captures", captures(core.runner))
    for batch, context in cases:
        time_step(part, core.runner, batch, context, f"{batch}x{context}")
    time_mixed(part, core.runner)
    with part.guarded("waits"):
        part.note("waits", waits(part, core.runner, ready.vocab_size))


def captures(runner: Any) -> Found:
    """How many steps are captured, and what capturing them once more takes: seconds, and bytes of
    the device by its driver's count.
    """
    import torch

    if runner._graphs is None:
        return {"number": 0}
    again = ModelRunner(
        runner.decoder, runner.pool, runner.backend, runner.device, runner.device.stream(),
        runner._most_rows, runner._most_tokens,
    )  # fmt: skip
    torch.cuda.synchronize()
    free, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    number = again.capture(LONGEST)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "number": number,
        "seconds": seconds,
        "bytes": free - torch.cuda.mem_get_info()[0],
    }


def time_mixed(part: Part, runner: Any) -> None:
    """Notes the seconds of a step of single tokens and a short prompt: replayed, and launched
    kernel by kernel.
    """
    batch, context, count = SMALL_MIXED if part.small else MIXED
    single = plan_of(context, [GREEDY] * batch).listed
    prompt = Row(batch, [1] * count, 0, [array("q", range(pages_for(count, PAGE_SIZE)))], GREEDY)
    plan = StepPlan((*single[1:], prompt))
    for kind, graphs in (("replayed", runner._graphs), ("launched", None)):
        name = f"mixed/{batch}x{context} and {count}/{kind}"
        with part.guarded(name):
            kept, runner._graphs = runner._graphs, graphs
            try:
                first, *rounds = [
                    median_of(runner, plan, 1 if part.small else 5) for _ in range(1 + ROUNDS)
                ]
            finally:
                runner._graphs = kept
            part.note(
                name,
                {
                    "seconds": statistics.median(rounds),
                    "spread": [min(rounds), max(rounds)],
                    "first": first,
                },
            )


def time_step(part: Part, runner: Any, batch: int, context: int, name: str) -> None:
    """Notes the seconds of a step of so many sequences."""
    with part.guarded(name):
        plan = plan_of(context, [GREEDY] * batch)
        first, *rounds = [
            median_of(runner, plan, 1 if part.small else 5) for _ in range(1 + ROUNDS)
        ]
        part.note(
            name,
            {
                "seconds": statistics.median(rounds),
                "spread": [min(rounds), max(rounds)],
                "first": first,
            },
        )
