"""CudaGraphs: CUDA graphs of steps of few tokens, by bucket of their number and of context length.

Most steps of a server compute one token for each row and draw after it, in about a hundred small
launches. Such a step is captured once for each bucket over static tensors; a step replays the
smallest graph that it fits in, and fills it up with padding. So does a mixed step of decode rows
and short chunks of prompts, each of whose tokens is a row of its own. Invariant: nothing is
captured while requests are served; what a replay reads was copied into place by the same step,
after the replay before it. Where the device has kernels for it, a captured step ends with the draw
of all its rows. It knows nothing of requests, penalties and filters.

Shape letters: B rows of a captured step, S rows of a step, D hidden size, V vocabulary, N settings
of a draw, W pages of a line, F fields and R rows of a DecodeStep.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cache.layout import CacheLayout, pages_for
from model.decode import (
    NO_LINE,
    NUM_FIELDS,
    DecodeStep,
    DecodeTable,
    Numbers,
    aligned,
    table_widths,
)
from model.decoder import Decoder
from model.devices.backend import Backend
from model.devices.device import Device, RowDraws, Stream, is_lack_of_memory
from model.draw_words import NUM_SETTINGS
from model.sampling import Captured
from model.step import PENDING, Row, StepPlan

log = logging.getLogger("onehead.engine")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 768, 1024)
"""Not 192: cuBLAS takes longer for 192 rows than for 256 (measured on an H100)."""
FOUND = 4096
"""Sizes and numbers of pages for which the graph is remembered."""
LEAST_SEVERAL = 32
"""The smallest size of mixed steps. Smaller ones are padded."""
MOST_KEYS_AGAIN = 2**17
"""Keys that the chunks of a mixed step may read again because each token reads its own: 64 MiB of a
layer for 128 columns, some 15 us from an H100's L2. Tiles, which read them for several tokens at
once, need a launch kernel by kernel, some 70 us of the host for a layer.
"""


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple that is not smaller."""
    return -(-number // multiple) * multiple


class Shape(Protocol, Hashable):
    """The facts that the launches of a captured step depend on."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_keys(self) -> int:
        """The longest context."""


@runtime_checkable
class ListedBackend(Backend, Protocol):
    """A Backend that computes a step of single tokens from numbers on the device, so that a graph
    can be replayed with others.
    """

    def contexts(self, longest: int) -> Sequence[int]:
        """Upper ends of the buckets of context lengths, up to the bucket of the longest context."""

    def shape(self, num_keys: int, num_rows: int, several: bool = False) -> Shape | None:
        """The bucket of steps of so many rows with contexts of up to `num_keys`. None where a step
        has to be launched kernel by kernel. `several`: rows may be of one sequence, where that
        makes a difference.
        """

    def listed(self, positions_B: Tensor, tables_BW: Sequence[Tensor], shape: Any) -> Any:
        """The plan of a step, for `run`: the position of each row (NO_LINE: padding), and for each
        group of layers its page table.
        """


class Lists(NamedTuple):
    """The lists of a captured step: parts of one array on the host, or of its copy on the
    device.
    """

    fields_FB: Any
    """As in DecodeTable: positions (NO_LINE: padding), tokens, and where tokens come from."""
    settings_BN: Any
    """Of the draw."""
    tables_BW: list[Any]
    """For each group of layers the pages of each row."""

    @classmethod
    def of(cls, numbers: Any, num_rows: int, widths: Sequence[int]) -> "Lists":
        """The parts of an array or a tensor; a table has lines of `widths` pages."""
        begin = NUM_FIELDS * aligned(num_rows)
        fields = numbers[:begin].reshape(NUM_FIELDS, -1)[:, :num_rows]
        settings = numbers[begin : begin + num_rows * NUM_SETTINGS].reshape(num_rows, NUM_SETTINGS)
        begin += aligned(num_rows * NUM_SETTINGS)
        tables = []
        for width in widths:
            tables.append(numbers[begin : begin + num_rows * width].reshape(num_rows, width))
            begin += num_rows * width
        return cls(fields, settings, tables)


class Bucket(NamedTuple):
    """The part that all steps of a shape have in common."""

    shape: Shape
    widths: list[int]
    """Of a line of each table."""
    num_numbers: int
    """Of all lists together."""


class Replayed(NamedTuple):
    """What a replay has computed, which the next one overwrites."""

    logits_SV: Tensor
    finite_S: Tensor | None
    """Whether hidden states are finite; None where the draw tells it."""
    captured: Captured | None
    """The draw, where it is captured."""


class CudaGraphs:
    """The graphs of one decoder. `drawn_S` holds the tokens drawn by the previous step."""

    def __init__(
        self,
        decoder: Decoder,
        backend: ListedBackend,
        layout: CacheLayout,
        device: Device,
        stream: Stream,
        drawn_S: Tensor,
        most_rows: int,
    ) -> None:
        assert most_rows <= len(drawn_S), "padding is drawn too"
        self._decoder = decoder
        self._backend = backend
        self._layout = layout
        self._device = device
        self._stream = stream
        self._drawn_S = drawn_S
        sizes = *(size for size in SIZES if size < most_rows), most_rows
        self.sizes = sorted({rounded_up(size, decoder.row_multiple) for size in sizes})
        self._numbers = torch.zeros(0, dtype=torch.int32, device=drawn_S.device)
        """Of the step that is replayed."""
        self._logits_BV = torch.zeros(0, 0)
        """Allocated by the first capture, which knows the dtype; so are the draws."""
        self._draws: RowDraws | None = None
        self._finite_B = torch.zeros(most_rows, dtype=torch.bool, device=drawn_S.device)
        self._find = lru_cache(FOUND)(self._captured_for)
        self._replays: dict[Hashable, tuple[Callable[[], None], Lists]] = {}

    def capture(self, steps: Iterable[DecodeStep]) -> None:
        """Captures these steps, each in every batch size that it fits in. The largest come first:
        the others reuse their memory. Steps that cannot be captured are launched kernel by kernel.
        Raises the error of a broken device.
        """
        asked = [
            (step, size, several)
            for step in steps
            for several in (False, True)
            for size in self._sizes(several)
            if size >= len(step)
        ]
        found = (
            (step, self._bucket(step.num_keys, size, several)) for step, size, several in asked
        )
        # Of a shape once: a backend may have the same for steps with several rows of a sequence.
        packed = [
            *{
                bucket.shape: (bucket, self._pack(step, bucket))
                for step, bucket in found
                if bucket is not None
            }.values()
        ]
        packed.sort(key=lambda pair: -pair[0].num_numbers)
        if packed:
            self._numbers = torch.zeros(
                packed[0][0].num_numbers, dtype=torch.int32, device=self._drawn_S.device
            )
        num_failed = 0
        for (shape, widths, _), numbers in packed:
            if shape not in self._replays:
                self._numbers[: len(numbers)].copy_(self._device.upload(torch.from_numpy(numbers)))
                lists = Lists.of(self._numbers, shape.num_rows, widths)
                try:
                    self._replays[shape] = (
                        self._stream.capture(partial(self._work, lists, shape)),
                        lists,
                    )
                except Exception as error:
                    self._device.raise_if_broken()
                    if is_lack_of_memory(error):
                        log.warning(
                            "memory is short: %d CUDA graphs, other steps are launched kernel by "
                            "kernel",
                            self.num_captured,
                        )
                        break
                    if not num_failed:
                        log.warning(
                            "a step of %d sequences cannot be captured as a CUDA graph",
                            shape.num_rows,
                            exc_info=True,
                        )
                    num_failed += 1
        if num_failed:
            log.warning(
                "%d CUDA graphs are missing; such steps are launched kernel by kernel, which is "
                "slower",
                num_failed,
            )
        self._find.cache_clear()

    def _sizes(self, several: bool) -> list[int]:
        """Numbers of rows for which steps are captured."""
        return (
            [size for size in self.sizes if size >= LEAST_SEVERAL] or self.sizes[-1:]
            if several
            else self.sizes
        )

    def _captured_for(
        self, size: int, num_pages: int, several: bool
    ) -> tuple[Bucket, Callable[[], None], Lists] | None:
        """The graph for steps of this size whose longest context has so many pages."""
        bucket = self._bucket(num_pages * self._layout.page_size, size, several)
        return (
            None
            if bucket is None or (found := self._replays.get(bucket.shape)) is None
            else (bucket, *found)
        )

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def _bucket(self, num_keys: int, size: int, several: bool) -> Bucket | None:
        """The bucket of steps of `size` rows, padding included; None where there is none."""
        shape = self._backend.shape(num_keys, size, several)
        if shape is None:
            return None
        widths = table_widths(self._layout, shape.num_keys)
        return Bucket(
            shape,
            widths,
            NUM_FIELDS * aligned(size) + aligned(size * NUM_SETTINGS) + size * sum(widths),
        )

    def _pack(self, step: DecodeStep, bucket: Bucket) -> Numbers:
        num_rows, size = len(step), bucket.shape.num_rows
        numbers = np.zeros(bucket.num_numbers, np.int32)
        fields_FB, settings_BN, tables_BW = Lists.of(numbers, size, bucket.widths)
        fields_FB[:, :num_rows], settings_BN[:num_rows] = step.fields_FR, step.settings_RN
        if num_rows < size:
            fields_FB[0, num_rows:], fields_FB[2, num_rows:] = NO_LINE, PENDING
        step.copy_tables(tables_BW)
        return numbers

    def _work(self, lists: Lists, shape: Shape) -> None:
        """The step itself, over static tensors."""
        size, (positions_B, ids_B, sources_B) = shape.num_rows, lists.fields_FB
        ids_B = torch.where(sources_B >= 0, self._drawn_S[sources_B.clamp(min=0)], ids_B)
        attend = partial(
            self._backend.run, self._backend.listed(positions_B, lists.tables_BW, shape)
        )
        # Every table of positions has one for 0.
        x_BD = self._decoder(ids_B, positions_B.clamp(min=0), attend)
        logits_BV = self._decoder.logits(x_BD)
        if not len(self._logits_BV):
            self._logits_BV = logits_BV.new_zeros(self.sizes[-1], logits_BV.shape[-1])
            self._draws = self._device.row_draws(*self._logits_BV.shape)
        self._logits_BV[:size].copy_(logits_BV)
        if self._draws is None:
            self._finite_B[:size].copy_(x_BD.isfinite().all(dim=-1))
        else:
            self._draws.draw(self._logits_BV[:size], lists.settings_BN, self._drawn_S, x_BD)

    def step_of(
        self, plan: StepPlan, sources_of: Callable[[Sequence[Row]], Sequence[int]]
    ) -> DecodeStep | None:
        """A step with a row for each token; None where these may not be rows of a graph.
        `sources_of`: those of listed rows.
        """
        num_tokens, num_keys = 0 if plan.decode is None else len(plan.decode), 0
        for row in plan.listed:
            if (
                row.scoring is not None
                or row.drafts
                or (row.sample is None and len(row.tokens) == 1)
            ):
                return None
            num_tokens += len(row.tokens)
            num_keys += (len(row.tokens) - 1) * (row.start + len(row.tokens))
        if num_tokens > self.sizes[-1] or num_keys > MOST_KEYS_AGAIN:
            return None
        return DecodeTable.of(
            self._layout, plan.listed, sources_of(plan.listed), plan.decode
        ).advance()

    def find(self, step: DecodeStep, several: bool = False) -> "Callable[[], Replayed] | None":
        """A function that replays this step; None where no graph fits. `several`: whether rows are
        of one sequence.
        """
        sizes = self._sizes(several)
        if len(step) > sizes[-1]:
            return None
        captured = self._find(
            sizes[bisect_left(sizes, len(step))],
            pages_for(step.num_keys, self._layout.page_size),
            several,
        )
        if captured is None:
            return None
        bucket, replay, lists = captured
        numbers = self._device.for_upload(torch.from_numpy(self._pack(step, bucket)))
        return partial(self._replay, numbers, replay, lists, len(step))

    def _replay(
        self, numbers: Tensor, replay: Callable[[], None], lists: Lists, num_rows: int
    ) -> Replayed:
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
        replay()
        logits_SV = self._logits_BV[:num_rows]
        if self._draws is None:
            return Replayed(logits_SV, self._finite_B[:num_rows], None)
        return Replayed(logits_SV, None, Captured(self._draws, lists.settings_BN))
