"""ModelRunner: weights, KV pool and attention backend, which compute a StepPlan.

It makes no scheduling decisions: the scheduler chooses rows and pages. On a device with a stream,
the next step can be planned and launched while one computes. A row that continues with a token that
the previous step draws takes it on the device, from `_drawn_S`, into which every step copies its
tokens. Invariant: between two calls, that token, the pool's pages and, for an assistant, the state
that the token was drawn from are all it has of a sequence.

Shape letters: T tokens of the step, S draws, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from cache.layout import CacheLayout
from cache.pool import FLOAT8, KVPool, bytes_per_page
from model.batch import Batch, build_batch
from model.checkpoint.weights import Report, load_decoder
from model.decode import DecodeStep
from model.decoder import Decoder
from model.devices import create_backend, find_device
from model.devices.backend import Backend, Plans
from model.devices.device import Device, Stream, lack_of_memory
from model.devices.replacement import RowMatrix
from model.kv_layout import layout_of
from model.options import EngineOptions
from model.pooling import Pooler
from model.runner.cuda_graphs import CudaGraphs, ListedBackend, all_in_page_0, captured_sizes
from model.runner.pending_step import PendingStep
from model.sampling import Scores, Vectors, begin_draw
from model.spec import ModelSpec, OptionError
from model.step import PENDING, Row, Sample, Sampling, Scoring, StepPlan, StepResult

META = torch.device("meta")
SCORED_AT_ONCE = 128
MOST_DECODED = 128
"""Tokens of short chunks that a device may compute as it does single tokens."""
GREEDY, SORTING = Sampling(temperature=0.0), Sampling(top_p=0.9, typical_p=0.9)
"""The ways of drawing that take the least memory and the most."""


class ModelRunner:
    """Runs steps of one model on one device.

    With a stream, steps have at most `most_tokens` tokens, and those of up to `most_rows` rows can
    be captured as CUDA graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        backend: Backend,
        device: Device,
        stream: Stream | None = None,
        most_rows: int = 0,
        most_tokens: int = 0,
    ) -> None:
        assert stream is None or decoder.spec.experts is None, (
            "the host chooses experts, and its choice would be captured"
        )
        self.decoder = decoder
        self.pool = pool
        self.backend = backend
        self.device = device
        self.forward = device.forward(decoder, backend)
        self._most_rows = most_rows
        self._stream = stream
        self._most_tokens = most_tokens
        sizes = captured_sizes(most_rows, decoder.row_multiple)
        # Captured steps are filled up, and what fills them is drawn too.
        self._drawn_S = torch.zeros(
            max(most_tokens, sizes[-1]), dtype=torch.long, device=device.torch_device
        )
        self.states: dict[int, torch.Tensor] | None = None
        """By sequence the state, normalised, from which its last token was drawn; None where they
        are not kept."""
        self._drawn_ids: Sequence[int] = ()
        """The sequences whose tokens drawn_S holds once the step launched last is done."""
        self._graphs: CudaGraphs | None = None
        if stream is not None and isinstance(backend, ListedBackend):
            self._graphs = CudaGraphs(
                decoder, backend, pool.layout, device, stream, self._drawn_S, sizes
            )

    @classmethod
    def load(
        cls, folder: Path, spec: ModelSpec, options: EngineOptions, report: Report = lambda *_: None
    ) -> "ModelRunner":
        """Reads the weights and allocates the pool. Raises CheckpointError, OptionError, and
        MemoryError as `over`.
        """
        _check_options(spec, options, find_device(options.device))
        decoder, device = load_weights(folder, spec, options, report)
        report("measuring memory", 0, 0)
        runner = cls.over(decoder, device, options)
        if device.warms_up:
            report("compiling kernels", 0, 0)
            longest = runner.pool.layout.most_tokens(
                runner.pool.num_pages, options.step_tokens, options.max_context
            )
            runner.capture(longest)
            runner.warm_up(longest)
        return runner

    @classmethod
    def over(cls, decoder: Decoder, device: Device, options: EngineOptions) -> "ModelRunner":
        """A runner of a loaded decoder and a cache. Raises MemoryError if the memory for the cache
        is not there, or if its pages cannot hold one token of a sequence.
        """
        spec = decoder.spec
        layout = layout_of(spec, options.page_size)
        page_bytes = bytes_per_page(layout, _pool(layout, 1, options, device, META).dtype.itemsize)
        # Steps are measured before free memory is: the first ones load libraries, whose memory
        # stays taken.
        steps = 0 if options.pages else _step_bytes(decoder, device, options, layout)
        free = device.memory()[0] - steps
        num_pages = options.pages or _pages_that_fit(layout, page_bytes, options, device, free)
        if layout.most_tokens(num_pages, options.step_tokens, options.max_context) < 1:
            allowed = (
                f"cache.pages is {num_pages}"
                if options.pages
                else f"cache.memory allows {num_pages}"
            )
            raise MemoryError(
                f"{allowed} pages; {options.page_size} tokens of one sequence need "
                f"{layout.pages_per_block}, {layout.pages_per_block * page_bytes} bytes; "
                f"{device.memory_in_words()}"
            )
        wanted = num_pages * page_bytes
        if device.overcommits and wanted > free:
            raise MemoryError(
                f"a cache of {num_pages} pages takes {wanted} bytes, {free} are free; lower "
                "cache.pages or cache.memory"
            )
        try:
            pool = _pool(layout, num_pages, options, device)
            backend = _backend(spec, pool, device, options)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError):
                lack_of_memory(error)
            raise MemoryError(
                f"a cache of {num_pages} pages takes {wanted} bytes, which cannot be had; "
                f"{device.memory_in_words()}; "
                "lower cache.pages or cache.memory"
            ) from error
        # With experts, which the host chooses, every layer waits for the device: there is nothing
        # to overlap or capture.
        stream = device.stream() if spec.experts is None else None
        return cls(decoder, pool, backend, device, stream, options.max_running, options.step_tokens)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of captured steps."""
        return 0 if self._graphs is None else self._graphs.num_captured

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        filling = sum(
            m.num_filling * m.weight.itemsize
            for m in self.decoder.modules()
            if isinstance(m, RowMatrix)
        )
        return sum(parameter.nbytes for parameter in self.decoder.parameters()) - filling

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights or, where these are quantized, of what is not."""
        most = max(self.decoder.parameters(), key=torch.Tensor.numel).dtype
        return most if most.itemsize > 1 else self.pool.compute_dtype

    @property
    def kernels(self) -> str:
        """What computes attention, and products where that is another: kernels of ours or
        torch's.
        """
        attention, products = self.backend.name, self.decoder.products
        return attention if attention == products else f"{attention}+{products}"

    @property
    def deterministic(self) -> bool:
        """Whether the outputs of a sequence depend on that sequence alone, bit for bit (batch
        invariance).
        """
        return self.backend.batch_invariant and self.decoder.batch_invariant

    @property
    def progress(self) -> int:
        """A number that grows with every layer and every batch of logits computed, which tells a
        long step from one that hangs.
        """
        return self.decoder.num_parts_run + self.device.num_parts_run()

    def capture(self, longest: int) -> int:
        """Captures steps of every batch size, for contexts up to the longest; returns how many.
        Takes seconds.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture(longest)
        return self.num_graphs

    def warm_up(self, longest: int) -> None:
        """Computes a step at the end of the longest context for every way of drawing that has
        kernels of its own, and short and long chunks beside few and many single tokens, so that
        kernels are compiled before requests are served.
        """
        pages = all_in_page_0(self.pool.layout, longest)
        for sampling in (
            GREEDY,
            Sampling(),
            Sampling(top_p=0.9),
            Sampling(top_p=0.9, presence_penalty=1.0),
            SORTING,
        ):
            self.run(StepPlan((Row(0, [0], longest - 1, pages, Sample(sampling, (), ())),)))
        if longest > 1:
            self.run(StepPlan((Row(0, [0, 0], 0, pages, None, Scoring(0, [0], 0)),)))
        # A step of few tokens would be captured. Its kernels also serve where there is no graph:
        # behind long prompts, and with scores.
        graphs, self._graphs = self._graphs, None
        most = self._most_tokens - self._most_rows
        for num_singles, chunk in product({1, self._most_rows}, {2, min(MOST_DECODED, most), most}):
            if num_singles and (count := min(chunk, longest)) > 1:
                singles = [
                    Row(1 + i, [0], longest - 1, pages, Sample(GREEDY, (), ()))
                    for i in range(num_singles)
                ]
                _try(self, StepPlan((Row(0, [0] * count, 0, pages, None), *singles)))
        self._graphs = graphs
        self.pool.clear(self.device.upload([0]))

    def run(self, plan: StepPlan) -> StepResult:
        """Computes every row of `plan` and draws a token for each that samples. Raises MemoryError;
        a part of the plan may still fit.
        """
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step after all that were begun before. A row whose last token is PENDING
        continues with the token that its sequence draws in the step launched last. What the plan
        refers to may change when this has returned. Raises MemoryError.
        """
        try:
            return self._launch(plan)
        except RuntimeError as error:
            reason = lack_of_memory(error)
        # A library that cannot allocate on a broken device reports lack of memory.
        self.device.raise_if_broken()
        # Not within `except`: the error keeps alive what the step had made.
        self.device.release_cached_memory()
        raise MemoryError(reason)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        captured = self._launch_captured(plan)
        if captured is not None:
            return captured
        spec = self.decoder.spec
        # All tokens' states are pooled.
        has_tail = spec.num_storing_layers < spec.num_layers and spec.pooling is None
        upload = self.device.upload
        batch = build_batch(plan, self.pool.layout, upload, has_tail, spec.bidirectional)
        pending = PendingStep(plan.listed, batch.firsts[plan.num_decoding :], plan.num_decoding)
        work = partial(
            self._compute,
            plan,
            pending,
            batch,
            Plans.of(self.backend, batch),
            self._pending_tokens(plan, pending),
        )
        if self._stream is None:
            work()
            self.device.synchronize()
            return pending
        self._stream.enqueue(work)
        drawn = (
            row.sequence
            for row, places in zip(plan.listed, pending.samples, strict=True)
            for _ in places
        )
        self._drawn_ids = [*(() if plan.decode is None else plan.decode.ids), *drawn]
        pending.event = self._stream.mark()
        return pending

    def _launch_captured(self, plan: StepPlan) -> PendingStep | None:
        """Launches a step by a CUDA graph; None where there is none for it."""
        if self._graphs is None or self._stream is None:
            return None
        step, listed = plan.decode, plan.listed
        if step is None or listed:
            step = self._graphs.step_of(plan, self._sources)
        if step is None or (replay := self._graphs.find(step)) is None:
            return None
        pending = PendingStep((), (), len(step))
        if any(len(row.tokens) > 1 for row in listed):
            pending = PendingStep.of_lines(listed, plan.num_decoding)
        self._stream.enqueue(partial(self._replay, plan, step, pending, replay))
        self._drawn_ids = step.ids
        pending.event = self._stream.mark()
        return pending

    def _sources(self, rows: Sequence[Row]) -> list[int]:
        """For each row whose last token is PENDING its index in drawn_S, else PENDING."""
        places = {id: place for place, id in enumerate(self._drawn_ids)}
        return [places[row.sequence] if row.tokens[-1] == PENDING else PENDING for row in rows]

    def _pending_tokens(
        self, plan: StepPlan, pending: PendingStep
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices of the pending tokens among the step's tokens, and of their values in drawn_S.
        None where no token is ever pending.
        """
        if self._stream is None:
            return None
        known = () if plan.decode is None else plan.decode.sources_R.tolist()
        lasts = [
            first + len(row.tokens) - 1
            for row, first in zip(plan.listed, pending.firsts, strict=True)
        ]
        found = [
            (place, source)
            for place, source in chain(
                enumerate(known), zip(lasts, self._sources(plan.listed), strict=True)
            )
            if source >= 0
        ]
        places, sources = zip(*found, strict=True) if found else ((), ())
        return self.device.upload(places, torch.long), self.device.upload(sources, torch.long)

    def _compute(
        self,
        plan: StepPlan,
        pending: PendingStep,
        batch: Batch,
        attended: Plans,
        taken: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """All that the device does for a step that is launched kernel by kernel. `attended`: the
        backend's plans.
        """
        if taken is not None:
            places, sources = taken
            batch.token_ids_T[places] = self._drawn_S[sources]
        self._clear(plan)
        x_TD = self.forward(batch, attended)
        if self.decoder.pooler is not None:
            pending.draws = self._pooled(self.decoder.pooler, pending, x_TD)
        elif len(batch.sampled_S):
            samples = [sample for places in pending.samples for sample in places]
            logits_SV = self.decoder.logits(x_TD[batch.sampled_S])
            drawn_S = None if self._stream is None else self._drawn_S
            pending.draws = begin_draw(self.device, logits_SV, samples, plan.decode, drawn_S)
            if self.states is not None:
                pending.states = x_TD[batch.sampled_S], self.states
        self._score(pending, x_TD)
        pending.finite_T = self.device.download(x_TD.isfinite().all(dim=-1))

    def _pooled(self, pooler: Pooler, pending: PendingStep, x_TD: torch.Tensor) -> Vectors | None:
        """The vectors of the rows that end a text."""
        texts = [
            slice(first, first + len(row.tokens))
            for row, first in zip(pending.rows, pending.firsts, strict=True)
            if row.sample is not None
        ]
        return Vectors(self.device, pooler(x_TD, texts)) if texts else None

    def _replay(self, plan: StepPlan, step: DecodeStep, pending: PendingStep, replay: Any) -> None:
        """All that the device does for a captured step."""
        self._clear(plan)
        logits_SV, finite_S, captured = replay()
        pending.draws = begin_draw(self.device, logits_SV, (), step, self._drawn_S, captured)
        if finite_S is not None:
            pending.finite_T = self.device.download(finite_S)
        self.decoder.num_parts_run += 1

    def _clear(self, plan: StepPlan) -> None:
        if plan.clear:
            self.pool.clear(self.device.upload(plan.clear, torch.long))

    def _score(self, pending: PendingStep, x_TD: torch.Tensor) -> None:
        """Scores of every row that wants any. Logits are held for SCORED_AT_ONCE tokens at a time,
        however long the prompts are.
        """
        wanted = [
            (
                pending.num_decoding + index,
                pending.firsts[index] + row.scoring.first + offset,
                target,
                row.scoring.num_top,
            )
            for index, row in enumerate(pending.rows)
            if row.scoring is not None
            for offset, target in enumerate(row.scoring.targets)
        ]
        for begin in range(0, len(wanted), SCORED_AT_ONCE):
            rows, states, targets, num_tops = (
                list(part) for part in zip(*wanted[begin : begin + SCORED_AT_ONCE], strict=True)
            )
            logits_SV = self.decoder.logits(x_TD[self.device.upload(states)])
            pending.scores.append((rows, Scores(self.device, logits_SV, targets, num_tops)))


def load_weights(
    folder: Path, spec: ModelSpec, options: EngineOptions, report: Report
) -> tuple[Decoder, Device]:
    """The decoder of a checkpoint on the device that the options name. Raises CheckpointError and
    OptionError.
    """
    device = find_device(options.device)
    device.use_threads(options.threads)
    dtypes, place = device.dtypes(options.dtype), device.torch_device
    products = device.products(dtypes, options.quantization, options.deterministic)
    return load_decoder(folder, spec, dtypes.compute, place, products, report), device


def _pool(
    layout: CacheLayout,
    num_pages: int,
    options: EngineOptions,
    device: Device,
    place: torch.device | None = None,
) -> KVPool:
    dtypes = device.dtypes(options.dtype)
    stored_as = FLOAT8 if options.cache_dtype == "fp8" else dtypes.cache
    place = place or device.torch_device
    return KVPool.allocate(layout, num_pages, dtypes.compute, place, stored_as=stored_as)


def _backend(spec: ModelSpec, pool: KVPool, device: Device, options: EngineOptions) -> Backend:
    heads = spec.num_query_heads
    return create_backend(
        device.backend_for(pool, heads, options.deterministic), pool, spec.attention_scale, heads
    )


def _step_bytes(
    decoder: Decoder, device: Device, options: EngineOptions, layout: CacheLayout
) -> int:
    """Bytes that steps take besides weights and cache, measured over the smallest cache: the
    largest step, and the largest captured one.
    """

    def prepare() -> Any:
        pool = _pool(layout, layout.pages_per_block, options, device)
        return partial(
            _try, ModelRunner(decoder, pool, _backend(decoder.spec, pool, device, options), device)
        )

    limits = options.max_running, options.max_context
    plans = (
        largest_step(layout, options.step_tokens, *limits),
        largest_step(layout, options.max_running, *limits, GREEDY),
    )
    return device.step_bytes(prepare, plans)


def _try(runner: ModelRunner, plan: StepPlan) -> None:
    """Runs a plan that may not fit: it would be computed in parts, which take the memory there
    is.
    """
    with suppress(MemoryError):
        runner.run(plan)


def largest_step(
    layout: CacheLayout,
    step_tokens: int,
    max_running: int,
    max_context: int,
    sampling: Sampling = SORTING,
) -> StepPlan:
    """A step that takes as much memory as any: as many tokens and as many draws as there can be.
    All keys lie in page 0.
    """
    sample = Sample(sampling, (), ())
    counts, left = [1] * max_running, step_tokens - max_running
    while left > 0:
        counts.append(min(left, max_context))
        left -= counts[-1]
    return StepPlan(
        tuple(
            Row(
                number,
                [0] * count,
                0,
                all_in_page_0(layout, count),
                sample if number < max_running else None,
                # So that all its tokens pass all layers.
                None if number < max_running else Scoring(0, [0], 0),
            )
            for number, count in enumerate(counts)
        )
    )


def _check_options(spec: ModelSpec, options: EngineOptions, device: Device) -> None:
    """Raises OptionError where the device lacks float8 for the cache, or where attention would not
    be batch-invariant although engine.deterministic is true.
    """
    if spec.pooling and (device.name != "cpu" or options.speculation != "none"):
        raise OptionError(
            f"engine.device is {device.name} and engine.speculation {options.speculation}; a model "
            "that makes vectors of texts is computed on a CPU, without speculation: "
            "--engine.device cpu --engine.speculation none"
        )
    if spec.is_whole and options.cache_disk:
        raise OptionError("cache.disk is set, and nothing of this model's texts is used again")
    if options.cache_dtype == "fp8":
        device.check_float8()
    if not options.deterministic:
        return
    layout = layout_of(spec, options.page_size)
    pool = _pool(layout, 1, options, device, META)
    found = device.backend_for(pool, spec.num_query_heads, options.deterministic)
    if found != device.invariant_backend:
        raise OptionError(
            f"engine.deterministic is true, but attention by {found!r} on {device.name}, with "
            f"pages of {options.page_size} and keys of "
            f"{max(group.columns.key for group in layout.groups)} columns in "
            f"{str(pool.dtype).removeprefix('torch.')}, is "
            "not batch-invariant; expected "
            f"{device.invariant_backend_needs}"
        )


def _pages_that_fit(
    layout: CacheLayout, page_bytes: int, options: EngineOptions, device: Device, free: int
) -> int:
    """Pages that the options allow, and no more than max_running sequences of the longest context
    can use at once. Raises MemoryError for more memory than the device has.
    """
    memory = options.memory or device.default_cache_share
    if memory > (total := device.memory()[1]):
        raise MemoryError(
            f"cache.memory is {memory / 2**30:.2f} GiB, and {device.name} has {total / 2**30:.2f} "
            "GiB in all; lower it"
        )
    budget = memory * free if memory <= 1.0 else memory
    longest = options.max_context + options.page_size
    useful = options.max_running * layout.most_pages(longest, options.step_tokens)
    return min(int(budget // page_bytes), useful)
