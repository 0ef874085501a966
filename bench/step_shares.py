"""Where a step of a decoder goes on a CPU, and its share of what the machine can do: read bandwidth
at one row, products at many.

    python -m bench.step_shares --model FOLDER --quantization int8|none --output FILE [--rows
    1,8,32] [--prefill 1024,2048]

A step computes one token of each of so many sequences behind a context of 192 tokens, or a prompt
of so many. Its parts are timed as programs of their own, which leave out all other operations: the
products by name, attention (with its keys and values written), and what is done to each token
`between` them. `logits` is the head with its norm; `around` is what is left of the whole:
embedding, the draw and Python. Parts are measured in turns, medians and least of all rounds are
written; the table shows the least, which other work on the machine disturbs least.

Anchors (bench/anchors.cpp, compiled here) are measured between the steps, the best of all: reading
128 MiB in the pages that weights have, the processor's products of 8-bit integers, and fused
multiply-adds in float32, by all threads. Shares count weights and their products; attention does
work besides.
"""

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from commands.bench.figures import circumstances
from model.batch import build_batch
from model.checkpoint.families import read_spec
from model.devices.backend import Plans
from model.devices.cpu.huge_pages import HugePages
from model.devices.cpu.products import PackedLinear
from model.devices.cpu.program import RecordedForward
from model.devices.cpu.recording import ATTEND, PRODUCT, Operation
from model.kv_layout import layout_of
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, Sample, Sampling, StepPlan
from tests.support.report import show

CONTEXT = 192
PAGE_SIZE = 64
READ_BYTES, NUM_READ = 2**27, 4
"""Of one measurement, and how many of these lie one after another, so that none is in a cache when
it is read again."""
ROUNDS = 2**18
"""Of an anchor's products: about a millisecond on one core."""


class Anchors:
    """The best of several measurements, per second, by all threads."""

    def __init__(self, threads: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "anchors.so"
            source = Path(__file__).with_name("anchors.cpp")
            subprocess.run(
                ["c++", "-O2", "-march=native", "-shared", "-fPIC", source, "-o", library],
                check=True,
            )
            self._library = ctypes.CDLL(str(library))
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self._memory = (
            HugePages().zeros(torch.Size([NUM_READ * READ_BYTES + 2**13]), torch.uint8).fill_(1)
        )
        self.best = {"GB_read": 0.0, "G_int8_products": 0.0, "G_float32_products": 0.0}

    def measure(self) -> None:
        part = READ_BYTES // self._threads
        for number in range(5 * NUM_READ):
            address = self._memory.data_ptr() + number % NUM_READ * READ_BYTES
            reads = [
                (ctypes.c_void_p(address + i * part), ctypes.c_int64(part))
                for i in range(self._threads)
            ]
            self._note("GB_read", READ_BYTES, self._library.read_memory, reads)
        for name, function in (("G_int8_products", "dots"), ("G_float32_products", "fmas")):
            made = self._threads * ROUNDS * getattr(self._library, f"{function}_per_round")()
            for _ in range(10):
                self._note(
                    name,
                    made,
                    getattr(self._library, function),
                    [(ctypes.c_int64(ROUNDS),)] * self._threads,
                )

    def _note(
        self, name: str, amount: int, function: Any, arguments: list[tuple[Any, ...]]
    ) -> None:
        began = time.perf_counter()
        list(self._pool.map(lambda each: function(*each), arguments))
        self.best[name] = max(self.best[name], amount / (time.perf_counter() - began) / 1e9)


def load(folder: Path, quantization: str, threads: int, blocks: int) -> ModelRunner:
    """Over pages of random numbers, for so many pages of tokens."""
    spec = read_spec(folder)
    pages = blocks * layout_of(spec, PAGE_SIZE).pages_per_block
    options = EngineOptions(
        "cpu", "auto", threads, PAGE_SIZE, pages, None, 4096, 64, 4096, quantization
    )
    runner = ModelRunner.load(folder, spec, options)
    held = runner.pool.numbers_PN
    held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(0)))
    return runner


def plan_of(runner: ModelRunner, rows: int, tokens: int, start: int) -> StepPlan:
    """So many rows of so many tokens, each on pages of its own."""
    numbers, rng, draw = count(), random.Random(rows), Sample(Sampling(temperature=0.0), (), ())
    blocks = -(-(start + tokens) // PAGE_SIZE)
    made = []
    for sequence in range(rows):
        pages = [
            array("q", islice(numbers, blocks * group.num_stacks))
            for group in runner.pool.layout.groups
        ]
        made.append(
            Row(
                sequence,
                rng.choices(range(runner.decoder.spec.vocab_size), k=tokens),
                start,
                pages,
                draw,
            )
        )
    return StepPlan(tuple(made))


# --- parts of a step


def names(runner: ModelRunner) -> dict[int, str]:
    """The address of a product's struct -> the name of its module within a block."""
    found = {}
    for name, module in runner.decoder.blocks.named_modules():
        for _, product in module.parts if isinstance(module, PackedLinear) else ():
            found[ctypes.addressof(product)] = name.partition(".")[2]
    return found


def kind_of(operation: Operation, named: dict[int, str]) -> str:
    if operation.kind == PRODUCT:
        return named[operation.details]
    return "attention" if operation.kind == ATTEND else "between"


class Part:
    """A forward pass that has only some of the operations."""

    def __init__(self, forward: RecordedForward, operations: Iterable[Operation]) -> None:
        self._forward, chosen = forward, list(operations)
        self._operations = (Operation * len(chosen))(*chosen)

    def __call__(self, *arguments: Any) -> None:
        program = self._forward.whole
        whole, program._operations = program._operations, self._operations
        try:
            self._forward(*arguments)
        finally:
            program._operations = whole


def timed_parts(runner: ModelRunner, plan: StepPlan) -> dict[str, Callable[[], object]]:
    """What is measured of a step, by name. `nothing` is the program without operations, which every
    part has besides its own.
    """
    forward = runner.forward
    assert isinstance(forward, RecordedForward), "this model's layers are not one call"
    batch = build_batch(plan, runner.pool.layout, runner.device.upload)
    attended, named = Plans.of(runner.backend, batch), names(runner)
    kinds: dict[str, list[Operation]] = {"nothing": []}
    for operation in forward.whole._operations:
        kinds.setdefault(kind_of(operation, named), []).append(operation)
    states = forward(batch, attended)[batch.sampled_S].clone()
    found: dict[str, Callable[[], object]] = {
        "whole": lambda: runner.run(plan),
        "layers": lambda: forward(batch, attended),
    }
    for kind, operations in kinds.items():
        part = Part(forward, operations)
        found[kind] = lambda part=part: part(batch, attended)  # type: ignore[misc]
    found["logits"] = lambda: runner.decoder.logits(states)
    return found


@torch.inference_mode()
def measure(
    runner: ModelRunner, plan: StepPlan, rounds: int, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians and least of a step and its parts in milliseconds. The parts' are without what a
    program costs that has no operations.
    """
    parts = timed_parts(runner, plan)
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            part()  # Its data come into the caches as they do in a row of steps.
            for _ in range(repeats):
                began = time.perf_counter()
                part()
                seconds[name].append(time.perf_counter() - began)
    return _told(seconds, statistics.median), _told(seconds, min)


def _told(
    seconds: dict[str, list[float]], chosen: Callable[[list[float]], float]
) -> dict[str, float]:
    found = {name: chosen(values) * 1000 for name, values in seconds.items()}
    nothing = found.pop("nothing")
    inside = {
        name: ms if name in ("whole", "layers", "logits") else ms - nothing
        for name, ms in found.items()
    }
    return inside | {"around": found["whole"] - found["layers"] - found["logits"]}


# --- shares


def amounts(runner: ModelRunner, tokens: int, samples: int) -> tuple[float, float]:
    """GB of weights that a step reads, and billions of products that it makes with them."""
    linears = [
        module for module in runner.decoder.blocks.modules() if isinstance(module, PackedLinear)
    ]
    head: Any = (
        runner.decoder.token_embedding if runner.decoder.head is None else runner.decoder.head
    )
    products = (
        tokens * sum(module.shape[0] * module.shape[1] for module in linears)
        + samples * head.shape[0] * head.shape[1]
    )
    return sum(
        p.nbytes for module in (*linears, head) for p in module.parameters()
    ) / 1e9, products / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cases = [(f"{rows} rows", int(rows), 1, CONTEXT) for rows in options.rows.split(",") if rows]
    cases += [
        (f"prompt of {tokens}", 1, int(tokens), 0)
        for tokens in options.prefill.split(",")
        if tokens
    ]
    blocks = max(rows * -(-(start + tokens) // PAGE_SIZE) for _, rows, tokens, start in cases)
    runner = load(options.model, options.quantization, options.threads, blocks)
    anchors = Anchors(options.threads)
    found: list[dict[str, Any]] = []
    for name, rows, tokens, start in cases:
        anchors.measure()
        medians, least = measure(
            runner, plan_of(runner, rows, tokens, start), options.rounds, 1 if tokens > 1 else 20
        )
        found.append(
            {
                "step": name,
                "amounts": amounts(runner, rows * tokens, rows),
                "median": medians,
                "least": least,
            }
        )
    anchors.measure()
    peak = anchors.best[
        "G_float32_products" if options.quantization == "none" else "G_int8_products"
    ]
    for each in found:
        seconds, (gigabytes, products) = each["least"]["whole"] / 1000, each["amounts"]
        each["shares"] = {
            "read": gigabytes / seconds / anchors.best["GB_read"],
            "peak": products / seconds / peak,
        }
    print({name: round(value, 1) for name, value in anchors.best.items()})
    columns = [each["least"] | each["shares"] for each in found]
    lines = ([name, *(column[name] for column in columns)] for name in columns[0])
    show(
        ["", *(each["step"] for each in found)], lines, "milliseconds, least; shares of the anchors"
    )
    settings = {
        "quantization": options.quantization,
        "threads": options.threads,
        "kernels": runner.kernels,
    }
    options.output.write_text(
        json.dumps(circumstances(settings) | {"anchors": anchors.best, "steps": found}, indent=1)
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
