"""ModelRunner: weights, pool and backend behind `run(StepPlan) -> StepResult`.

It computes and decides nothing: which rows, which pages and when is the scheduler's. Invariant: between two calls it holds no
state of any sequence but what lies in the pool's pages.

Shape letters: T tokens of the step, S draws, D hidden size, V vocabulary.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cache.layout import CacheLayout
from cache.pool import FLOAT8, KVPool, bytes_per_page
from model.backends import Backend, backend_for, create_backend
from model.batch import Batch, build_batch
from model.decoder import Decoder
from model.packed import PackedMatrix
from model.sampling import draw, score
from model.spec import ModelSpec, OptionError
from model.step import Drawn, NotDrawn, StepPlan, StepResult
from model.weights import load_decoder

SCORED_AT_ONCE = 128
NOT_FINITE_STATES = NotDrawn("a numerical error: the model's states for this request are not finite", code="numerical_error")
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
    cache_dtype: str = "auto"


class ModelRunner:
    """Runs steps of one model on one device."""

    def __init__(self, decoder: Decoder, pool: KVPool, backend: Backend, device: torch.device) -> None:
        self.decoder = decoder
        self.pool = pool
        self.backend = backend
        self.device = device

    @classmethod
    def load(cls, folder: Path, spec: ModelSpec, options: RunnerOptions) -> "ModelRunner":
        """Reads the weights and allocates the pool. Raises CheckpointError, OptionError, and MemoryError where not one page fits."""
        device = choose_device(options.device)
        check_float8(options, device)
        dtype = choose_dtype(options.dtype, device)
        if device.type == "cpu" and options.threads:
            torch.set_num_threads(options.threads)
        return cls.over(load_decoder(folder, spec, dtype, device, options.quantization, packed=True), dtype, device, options)

    @classmethod
    def over(cls, decoder: Decoder, dtype: torch.dtype, device: torch.device, options: RunnerOptions) -> "ModelRunner":
        """A runner of a decoder that is loaded already, its cache in `dtype` or float8. Raises MemoryError where not one page fits."""
        spec = decoder.spec
        layout = CacheLayout.of(spec.num_layers, spec.windows, options.page_size)
        stored_as = FLOAT8 if options.cache_dtype == "fp8" else dtype
        page_bytes = bytes_per_page(layout, spec.key_dim, spec.value_dim, spec.value_in_key, stored_as.itemsize)
        free = free_bytes(device)
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
        except (RuntimeError, MemoryError) as error:  # RuntimeError is torch's way of saying that memory is short.
            raise MemoryError(
                f"a cache of {num_pages} pages takes {wanted} bytes, which cannot be had; lower cache.pages or cache.memory"
            ) from error
        heads = spec.num_query_heads
        return cls(decoder, pool, create_backend(backend_for(pool, heads), pool, spec.attention_scale, heads), device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        filling = sum(module.num_filling_bytes for module in self.decoder.modules() if isinstance(module, PackedMatrix))
        return sum(parameter.nbytes for parameter in self.decoder.parameters()) - filling

    @property
    def kernels(self) -> str:
        """What computes attention and products: kernels of ours and their width of vectors, or torch."""
        packed = next((module for module in self.decoder.modules() if isinstance(module, PackedMatrix)), None)
        products = packed.isa if packed is not None else "torch" if self.device.type == "cpu" else ""
        return self.backend.name if products in self.backend.name else f"{self.backend.name}+{products}"

    @property
    def progress(self) -> int:
        """A number that grows with every layer and every batch of logits computed: so a long step is told from one that hangs."""
        return self.decoder.num_parts_run

    def run(self, plan: StepPlan) -> StepResult:
        """Computes every row of `plan` and draws a token for each that samples. Raises MemoryError; a part of the plan may still fit."""
        try:
            return self._run(plan)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(reason)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        if plan.clear:
            self.pool.clear(list(plan.clear))
        batch = build_batch(plan, self.pool.layout, self.device)
        attend = partial(self.backend.run, self.backend.plan(batch))
        x_TD = self.decoder(batch.token_ids_T, batch.position_ids_T, attend)
        drawn, accepted = self._draw(plan, batch, x_TD)
        scored = self._score(plan, batch, x_TD)
        finite_T = x_TD.isfinite().all(dim=-1).tolist()
        for i, (row, first) in enumerate(zip(plan.rows, batch.firsts, strict=True)):
            if not all(finite_T[first : first + len(row.tokens)]):
                drawn[i] = NOT_FINITE_STATES
                accepted.pop(i, None)
        return StepResult(tuple(drawn), scored, accepted)

    def _draw(self, plan: StepPlan, batch: Batch, x_TD: torch.Tensor) -> tuple[list[Drawn | NotDrawn | None], dict[int, list[Drawn]]]:
        """What every row draws, all places of all rows at once, and the drafts among it that came true."""
        samples = [row.samples for row in plan.rows]
        together = [sample for places in samples for sample in places]
        draws = iter(draw(self.decoder.logits(x_TD[batch.sampled_S]), together) if together else ())
        drawn: list[Drawn | NotDrawn | None] = [None] * len(plan.rows)
        accepted: dict[int, list[Drawn]] = {}
        for i, (row, places) in enumerate(zip(plan.rows, samples, strict=True)):
            if places:
                come_true, drawn[i] = row.settle([next(draws) for _ in places])
                if come_true:
                    accepted[i] = come_true
        return drawn, accepted

    def _score(self, plan: StepPlan, batch: Batch, x_TD: torch.Tensor) -> dict[int, list[Drawn]]:
        """Scores of every row that asks for any. Logits are held for SCORED_AT_ONCE tokens at a time, however long the prompts."""
        wanted = [
            (index, batch.firsts[index] + row.scoring.first + offset, target, row.scoring.num_top)
            for index, row in enumerate(plan.rows)
            if row.scoring is not None
            for offset, target in enumerate(row.scoring.targets)
        ]
        scored: dict[int, list[Drawn]] = {}
        for begin in range(0, len(wanted), SCORED_AT_ONCE):
            rows, states, targets, num_tops = zip(*wanted[begin : begin + SCORED_AT_ONCE], strict=True)
            for row, drawn in zip(rows, score(self.decoder.logits(x_TD[list(states)]), targets, num_tops), strict=True):
                scored.setdefault(row, []).append(drawn)
        return scored


def _is_out_of_memory(error: RuntimeError) -> bool:
    """A GPU's lack of memory has a type of its own; a CPU's only a text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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
    memory = options.memory or (CPU_SHARE if device.type == "cpu" else GPU_SHARE)
    budget = memory * free if memory <= 1.0 else memory
    useful = options.max_running * layout.most_pages(options.max_context + options.page_size, options.step_tokens)
    return min(int(budget // page_bytes), useful)


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now: the device's, or the machine's within the limit of this control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, StopIteration):
        pass  # No /proc or no control group: the machine's own figure stands.
    return free
