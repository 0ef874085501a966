"""ModelRunner: weights, pool and backend behind `run(StepPlan) -> StepResult`.

It computes and decides nothing: which rows, which pages and when is the scheduler's. Invariant: between two calls it holds no
state of any sequence but what lies in the pool's pages.

Shape letters: T tokens of the step, S draws, D hidden size, V vocabulary.
"""

from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cache.layout import CacheLayout, pages_for
from cache.pool import FLOAT8, KVPool, bytes_per_page
from model.batch import Batch, build_batch
from model.checkpoint.weights import Report, load_decoder
from model.decoder import Decoder
from model.devices import backend_for, create_backend
from model.devices.backend import Backend
from model.devices.cpu.products import PackedMatrix
from model.runner.device_memory import free_bytes, lack_of_memory, memory_error, total_bytes
from model.runner.pending_step import PendingStep
from model.sampling import Scores, begin_draw
from model.spec import ModelSpec, OptionError
from model.step import Row, Sample, Sampling, StepPlan, StepResult
from model.transfer import download, upload

SCORED_AT_ONCE = 128
INVARIANT = "native", "triton"
"""How the names of kernels begin by which a row's bits come from that row alone."""
GREEDY, SORTING = Sampling(temperature=0.0), Sampling(top_p=0.9, typical_p=0.9)
"""What draws take the least memory by, and the most."""
FLOAT8_CAPABILITY = 8, 9
"""Of the first GPUs that convert it."""
CPU_SHARE, GPU_SHARE = 0.4, 0.9
"""Default share of free memory that the cache may take: a CPU's memory is also everybody else's."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to load and size a runner. The cache gets `pages` where given, else `memory`: bytes, or a share up to 1.0 of what is free."""

    device: str
    dtype: str
    threads: int
    page_size: int
    pages: int | None
    memory: float | None
    max_context: int
    max_running: int
    step_tokens: int
    """What the scheduler will ask for at most: a larger pool would never be used."""
    quantization: str = "none"
    deterministic: bool = False
    """What must not depend on the company: on a GPU by products of ours, on a CPU as it is, or not at all."""
    cache_dtype: str = "auto"

    def stored_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type of keys and values in the cache of a model that computes in `dtype`."""
        return FLOAT8 if self.cache_dtype == "fp8" else dtype


class ModelRunner:
    """Runs steps of one model on one device."""

    def __init__(self, decoder: Decoder, pool: KVPool, backend: Backend, device: torch.device) -> None:
        self.decoder = decoder
        self.pool = pool
        self.backend = backend
        self.device = device

    @classmethod
    def load(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, report: Report = lambda *_: None) -> "ModelRunner":
        """Reads the weights and allocates the pool. Raises CheckpointError, OptionError, and MemoryError where not one page fits."""
        device = choose_device(options.device)
        check_float8(options, device)
        dtype = choose_dtype(options.dtype, device)
        if device.type == "cpu" and options.threads:
            torch.set_num_threads(options.threads)
        if options.deterministic:
            _check_deterministic(spec, options, dtype, device)
        decoder = load_decoder(folder, spec, dtype, device, options.quantization, packed=True, report=report)
        report("measuring memory", 0, 0)
        if options.deterministic and device.type == "cuda":
            from model.devices.gpu.modules import replace_modules

            replace_modules(decoder)
        return cls.over(decoder, dtype, device, options)

    @classmethod
    def over(cls, decoder: Decoder, dtype: torch.dtype, device: torch.device, options: RunnerOptions) -> "ModelRunner":
        """A runner of a decoder that is loaded already, its cache in `dtype` or float8. Raises MemoryError where not one page fits."""
        spec = decoder.spec
        layout = CacheLayout.of(spec.num_layers, spec.windows, options.page_size)
        stored_as = options.stored_as(dtype)
        page_bytes = bytes_per_page(layout, spec.key_dim, spec.value_dim, spec.value_in_key, stored_as.itemsize)
        # Steps are measured before memory is: their first ones load libraries, which keep what they take.
        steps = cls._step_bytes(decoder, dtype, device, options, layout) if device.type == "cuda" and not options.pages else 0
        free = free_bytes(device) - steps
        num_pages = options.pages or _pages_that_fit(layout, page_bytes, options, device, free)
        if layout.most_tokens(num_pages, options.step_tokens, options.max_context) < 1:
            allowed = f"cache.pages is {num_pages}" if options.pages else f"cache.memory allows {num_pages}"
            needed = layout.pages_per_step
            raise MemoryError(f"{allowed} pages; {options.page_size} tokens of one sequence need {needed}, {needed * page_bytes} bytes")
        dims, wanted = (spec.key_dim, spec.value_dim), num_pages * page_bytes
        if device.type == "cpu" and wanted > free:
            # Its memory is taken when it is used: what is not there would be missed only under load.
            raise MemoryError(f"a cache of {num_pages} pages takes {wanted} bytes, {free} are free; lower cache.pages or cache.memory")
        try:
            pool = KVPool.allocate(layout, num_pages, *dims, dtype, device, value_in_key=spec.value_in_key, stored_as=stored_as)
            backend = create_backend(backend_for(pool, spec.num_query_heads), pool, spec.attention_scale, spec.num_query_heads)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError):
                lack_of_memory(error)
            raise MemoryError(
                f"a cache of {num_pages} pages takes {wanted} bytes, which cannot be had; lower cache.pages or cache.memory"
            ) from error
        return cls(decoder, pool, backend, device)

    @classmethod
    def _step_bytes(cls, decoder: Decoder, dtype: torch.dtype, device: torch.device, options: RunnerOptions, layout: CacheLayout) -> int:
        """What steps take on a GPU besides weights and cache, measured over a cache of next to nothing: the largest there can be, and the
        largest that is captured, as captured ones have memory of their own.
        """
        spec, held = decoder.spec, torch.cuda.memory_allocated(device)
        sizes, stored_as = (spec.key_dim, spec.value_dim, dtype, device), options.stored_as(dtype)
        pool = KVPool.allocate(layout, layout.pages_per_step, *sizes, value_in_key=spec.value_in_key, stored_as=stored_as)
        heads = spec.num_query_heads
        runner = cls(decoder, pool, create_backend(backend_for(pool, heads), pool, spec.attention_scale, heads), device)
        limits = options.max_running, options.max_context
        plans = largest_step(layout, options.step_tokens, *limits), largest_step(layout, options.max_running, *limits, GREEDY)
        total = torch.cuda.memory_allocated(device) - held  # The backend's own.
        for plan in plans:
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            with suppress(MemoryError):  # It will be computed in parts, which need what it got.
                runner.run(plan)
            total += torch.cuda.max_memory_allocated(device) - before
        del runner, pool
        torch.cuda.empty_cache()
        return total

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        filling = sum(module.num_filling_bytes for module in self.decoder.modules() if isinstance(module, PackedMatrix))
        return sum(parameter.nbytes for parameter in self.decoder.parameters()) - filling

    @property
    def kernels(self) -> str:
        """What computes attention, and what products where that is another: kernels of ours (and their width of vectors), or torch's."""
        attention, products = self.backend.name, self._products
        return attention if attention == products else f"{attention}+{products}"

    @property
    def deterministic(self) -> bool:
        """Whether what a sequence gets depends on that sequence alone, bit for bit."""
        return self.backend.name.startswith(INVARIANT) and self._products.startswith(INVARIANT)

    @property
    def _products(self) -> str:
        for module in self.decoder.modules():
            if isinstance(module, PackedMatrix):
                return module.isa
        # A norm tells: every decoder has one, quantized or not.
        return str(getattr(self.decoder.final_norm, "computed_by", "torch" if self.device.type == "cpu" else "cublas"))

    @property
    def progress(self) -> int:
        """A number that grows with every layer and every batch of logits computed: so a long step is told from one that hangs."""
        return self.decoder.num_parts_run

    def warm_up(self, longest: int) -> None:
        """Computes a step at the end of the longest context for every way of drawing that has kernels of its own, so that what compiles
        kernels does it before anybody waits for them.
        """
        pages = all_in_page_0(self.pool.layout, longest)
        for sampling in (GREEDY, Sampling(), SORTING):
            self.run(StepPlan((Row(0, [0], longest - 1, pages, Sample(sampling, (), ())),)))
        self.pool.clear(upload([0], self.device))

    def run(self, plan: StepPlan) -> StepResult:
        """Computes every row of `plan` and draws a token for each that samples. Raises MemoryError; a part of the plan may still fit."""
        try:
            return self._run(plan)
        except RuntimeError as error:
            reason = lack_of_memory(error)
        raise memory_error(reason, self.device)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        batch = build_batch(plan, self.pool.layout, self.device)
        flight = PendingStep(plan.rows, batch.firsts)
        self._compute(plan, flight, batch, self.backend.plan(batch))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return flight.result()

    def _compute(self, plan: StepPlan, flight: PendingStep, batch: Batch, attended: Any) -> None:
        """All that the device does for a step. `attended` is the backend's plan."""
        if plan.clear:
            self.pool.clear(upload(plan.clear, self.device, torch.long))
        x_TD = self.decoder(batch.token_ids_T, batch.position_ids_T, partial(self.backend.run, attended))
        if len(batch.sampled_S):
            self._draw(flight, self.decoder.logits(x_TD[batch.sampled_S]))
        self._score(flight, x_TD)
        flight.finite_T = download(x_TD.isfinite().all(dim=-1))

    def _draw(self, flight: PendingStep, logits_SV: torch.Tensor) -> None:
        flight.draws = begin_draw(logits_SV, [sample for places in flight.samples for sample in places])

    def _score(self, flight: PendingStep, x_TD: torch.Tensor) -> None:
        """Scores of every row that asks for any. Logits are held for SCORED_AT_ONCE tokens at a time, however long the prompts."""
        wanted = [
            (index, flight.firsts[index] + row.scoring.first + offset, target, row.scoring.num_top)
            for index, row in enumerate(flight.rows)
            if row.scoring is not None
            for offset, target in enumerate(row.scoring.targets)
        ]
        for begin in range(0, len(wanted), SCORED_AT_ONCE):
            rows, states, targets, num_tops = (list(part) for part in zip(*wanted[begin : begin + SCORED_AT_ONCE], strict=True))
            logits_SV = self.decoder.logits(x_TD[upload(states, self.device)])
            flight.scores.append((rows, Scores(logits_SV, targets, num_tops)))


def largest_step(layout: CacheLayout, step_tokens: int, max_running: int, max_context: int, sampling: Sampling = SORTING) -> StepPlan:
    """A step that takes as much memory as any: all the tokens that there can be, and as many draws. What it computes means nothing: all
    its keys lie in page 0.
    """
    sample = Sample(sampling, (), ())
    counts, left = [1] * max_running, step_tokens - max_running
    while left > 0:
        counts.append(min(left, max_context))
        left -= counts[-1]
    rows = []
    for number, count in enumerate(counts):
        rows.append(Row(number, [0] * count, 0, all_in_page_0(layout, count), sample if number < max_running else None))
    return StepPlan(tuple(rows))


def all_in_page_0(layout: CacheLayout, num_tokens: int) -> "list[array[int]]":
    """Pages of a row that is nobody's, of so many tokens."""
    return [array("q", bytes(8 * pages_for(num_tokens, layout.page_size) * group.num_stacks)) for group in layout.groups]


def _check_deterministic(spec: ModelSpec, options: RunnerOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Raises OptionError, before weights are read, where answers would depend on what is computed with them."""
    if options.quantization == "fp8" and device.type == "cpu":
        raise OptionError(
            "engine.deterministic is true, but products of fp8 weights are torch's on a CPU and depend on the company; "
            "expected engine.quantization none or int8"
        )
    layout, stored_as = CacheLayout.of(spec.num_layers, spec.windows, options.page_size), options.stored_as(dtype)
    sizes = spec.key_dim, spec.value_dim, dtype, torch.device("meta")
    pool = KVPool.allocate(layout, layout.pages_per_step, *sizes, value_in_key=spec.value_in_key, stored_as=stored_as)
    found = backend_for(pool, spec.num_query_heads, device)
    if not found.startswith(INVARIANT):
        expected = {
            "cpu": "engine.dtype float32, cache.dtype auto, cache.page_size and the columns of keys and values multiples of 16, and "
            "kernels that were compiled when onehead was installed",
            "cuda": "triton (`.venv/bin/pip install -c constraints.txt -e '.[gpu]'` in onehead's checkout), cache.page_size a power of two "
            "from 16, and keys of at most 576 columns",
        }[device.type]
        raise OptionError(
            f"engine.deterministic is true, but attention by {found!r} on {device.type}, in {str(dtype).removeprefix('torch.')} with "
            f"pages of {options.page_size} and keys of {spec.key_dim} columns in {str(stored_as).removeprefix('torch.')}, depends on "
            f"the company; expected {expected}"
        )


def choose_device(name: str) -> torch.device:
    """`cpu`, `cuda`, or for `auto` cuda where there is one. Raises OptionError for a device that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("engine.device is cuda, but torch finds no GPU it can use")
    return torch.device(name)


def check_float8(options: RunnerOptions, device: torch.device) -> None:
    """Raises OptionError where float8 is asked of a GPU that has no instructions for it."""
    asked = (("engine.quantization", options.quantization), ("cache.dtype", options.cache_dtype))
    names = " and ".join(name for name, value in asked if value == "fp8")
    if not names or device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY:
        return
    has, needed = (f"{major}.{minor}" for major, minor in (torch.cuda.get_device_capability(device), FLOAT8_CAPABILITY))
    raise OptionError(
        f"{names} fp8: this GPU has compute capability {has}, expected {needed} or more; leave it out, or take int8 for weights"
    )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and cache; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]


def _pages_that_fit(layout: CacheLayout, page_bytes: int, options: RunnerOptions, device: torch.device, free: int) -> int:
    """Pages of the memory that options allow, and no more than requests can use. Raises MemoryError for more than the device has."""
    memory = options.memory or (CPU_SHARE if device.type == "cpu" else GPU_SHARE)
    if memory > (total := total_bytes(device)):
        raise MemoryError(f"cache.memory is {memory / 2**30:.2f} GiB, and {device.type} has {total / 2**30:.2f} GiB in all; lower it")
    budget = memory * free if memory <= 1.0 else memory
    useful = options.max_running * layout.most_pages(options.max_context + options.page_size, options.step_tokens)
    return min(int(budget // page_bytes), useful)
