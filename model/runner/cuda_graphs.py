"""CudaGraphs: CUDA graphs of steps of few tokens, one for each of some numbers of rows.

Most steps of a server compute one token for each row and draw after it, in about a hundred small
launches. Such a step is captured over static tensors; a step replays the smallest graph that it
fits in, and fills it up with padding. So does a mixed step of decode rows and short chunks of
prompts, each of whose tokens is a row of its own. Invariant: nothing is captured while requests are
served; what a replay reads was copied into place by the same step, after the replay before it.
Where the device has kernels for it, a captured step ends with the draw of all its rows. It knows
nothing of requests, penalties and filters.

Shape letters: B rows of a captured step, S rows of a step, D hidden size, V vocabulary, N settings
of a draw, F fields of a DecodeStep, G groups of layers, P pages of all rows.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cache.layout import CacheLayout, pages_for
from model.decode import (
    NO_LINE,
    NO_SAMPLE,
    NUM_FIELDS,
    DecodeStep,
    DecodeTable,
    Numbers,
    table_widths,
)
from model.decoder import Decoder
from model.devices.backend import Backend
from model.devices.device import Device, RowDraws, Stream, is_lack_of_memory
from model.draw_words import NUM_SETTINGS, aligned
from model.sampling import Captured
from model.step import PENDING, Row, StepPlan

log = logging.getLogger("onehead.engine")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 768, 1024)
"""Not 192: cuBLAS takes longer for 192 rows than for 256 (measured on an H100)."""
MOST_PADDED = 128
"""Rows of a graph that replays a smaller step whose own graph is missing: up to so many, a step
takes as long as its weights are read.
"""
MOST_BLOCKS = 2**18
"""Blocks of `page_size` tokens of all rows of a captured step together, each row's padded to the
longest. Their pages are listed by 4 bytes each: 1 MiB for each page of a block.
"""
MOST_KEYS_AGAIN = 2**17
"""Keys that the chunks of a mixed step may read again because each token reads its own: 64 MiB of a
layer for 128 columns, some 15 us from an H100's L2. Tiles, which read them for several tokens at
once, need a launch kernel by kernel, some 70 us of the host for a layer.
"""


def captured_sizes(most_rows: int, multiple: int) -> list[int]:
    """Numbers of rows for which steps are captured, so that a step of up to `most_rows` finds one:
    the shipped ones, rounded up to this multiple.
    """
    sizes = *(size for size in SIZES if size < most_rows), most_rows
    return sorted({-(-size // multiple) * multiple for size in sizes})


def all_in_page_0(layout: CacheLayout, num_tokens: int) -> "list[array[int]]":
    """Pages of a row of so many tokens that belongs to no request."""
    return [array("q", bytes(8 * width)) for width in table_widths(layout, num_tokens)]


@runtime_checkable
class ListedBackend(Backend, Protocol):
    """A Backend that computes a step of single tokens from numbers on the device, so that a graph
    can be replayed with others.
    """

    def listed(
        self, positions_B: Tensor, offsets_GB: Tensor, pages_P: Tensor, num_keys: int
    ) -> Any:
        """The plan of a step, for `run`: the position of each row (NO_LINE: padding), and for each
        group of layers where its page table begins in one list of pages. `num_keys`: the longest
        context there can be.
        """


class Lists(NamedTuple):
    """The lists of a captured step: parts of one array on the host, or of its copy on the
    device.
    """

    fields_FB: Any
    """As in DecodeTable: positions (NO_LINE: padding), tokens, and where tokens come from."""
    settings_BN: Any
    """Of the draw."""
    offsets_GB: Any
    """Where the pages of each row begin."""
    pages_P: Any

    @classmethod
    def of(cls, numbers: Any, num_rows: int, num_groups: int) -> "Lists":
        """The parts of an array or a tensor."""
        width = aligned(num_rows)
        sizes = NUM_FIELDS * width, aligned(num_rows * NUM_SETTINGS), num_groups * width
        begin, middle, end = accumulate(sizes)
        return cls(
            numbers[:begin].reshape(NUM_FIELDS, width)[:, :num_rows],
            numbers[begin : begin + num_rows * NUM_SETTINGS].reshape(num_rows, NUM_SETTINGS),
            numbers[middle:end].reshape(num_groups, width),
            numbers[end:],
        )


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
        sizes: list[int],
    ) -> None:
        assert sizes[-1] <= len(drawn_S), "padding is drawn too"
        self._decoder = decoder
        self._backend = backend
        self._layout = layout
        self._device = device
        self._stream = stream
        self._drawn_S = drawn_S
        self.sizes = sizes
        self._numbers = torch.zeros(0, dtype=torch.int32, device=drawn_S.device)
        """Of the step that is replayed."""
        self._longest = 0
        """The longest context that the captured launches are made for."""
        self._logits_BV = torch.zeros(0, 0)
        """Allocated by the first capture, which knows the dtype; so are the draws."""
        self._draws: RowDraws | None = None
        self._finite_B = torch.zeros(sizes[-1], dtype=torch.bool, device=drawn_S.device)
        self._replays: dict[int, tuple[Callable[[], None], Lists]] = {}
        """By number of rows."""

    def capture(self, longest: int) -> None:
        """Captures a step of every size, for contexts up to the longest. The largest come first:
        the others reuse their memory. Raises the error of a broken device.
        """
        # Of one token in page 0, which holds nothing yet.
        row = Row(0, [0], 0, all_in_page_0(self._layout, 1), NO_SAMPLE)
        step = DecodeTable.of(self._layout, [row], [PENDING]).advance()
        self._longest = longest
        num_blocks = self.sizes[-1] * pages_for(longest, self._layout.page_size)
        num_pages = min(num_blocks, MOST_BLOCKS) * self._layout.pages_per_block
        self._numbers = torch.zeros(
            len(self._pack(step, self.sizes[-1])) + num_pages,
            dtype=torch.int32,
            device=self._drawn_S.device,
        )
        num_failed = 0
        for size in reversed(self.sizes):
            numbers = torch.from_numpy(self._pack(step, size))
            self._numbers[: len(numbers)].copy_(self._device.upload(numbers))
            lists = Lists.of(self._numbers, size, len(self._layout.groups))
            try:
                self._replays[size] = self._stream.capture(partial(self._work, lists)), lists
            except Exception as error:
                self._device.raise_if_broken()
                if is_lack_of_memory(error):
                    log.warning(
                        "memory is short: %d CUDA graphs; steps that fit none are launched kernel "
                        "by kernel",
                        self.num_captured,
                    )
                    break
                if not num_failed:
                    log.warning(
                        "a step of %d sequences cannot be captured as a CUDA graph",
                        size,
                        exc_info=True,
                    )
                num_failed += 1
        if num_failed:
            log.warning(
                "%d CUDA graphs are missing; steps that fit no other are launched kernel by "
                "kernel, which is slower",
                num_failed,
            )

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def _pack(self, step: DecodeStep, size: int) -> Numbers:
        """The lists of a step, padded to so many rows."""
        num_rows, widths = len(step), table_widths(self._layout, step.num_keys)
        num_aligned = (NUM_FIELDS + len(widths)) * aligned(size) + aligned(size * NUM_SETTINGS)
        numbers = np.zeros(num_aligned + num_rows * sum(widths), np.int32)
        fields_FB, settings_BN, offsets_GB, pages_P = Lists.of(numbers, size, len(widths))
        fields_FB[:, :num_rows], settings_BN[:num_rows] = step.fields_FR, step.settings_RN
        if num_rows < size:
            fields_FB[0, num_rows:], fields_FB[2, num_rows:] = NO_LINE, PENDING
        step.list_pages(widths, offsets_GB, pages_P)
        return numbers

    def _work(self, lists: Lists) -> None:
        """The step itself, over static tensors."""
        positions_B, ids_B, sources_B = lists.fields_FB
        size = len(positions_B)
        ids_B = torch.where(sources_B >= 0, self._drawn_S[sources_B.clamp(min=0)], ids_B)
        plan = self._backend.listed(positions_B, lists.offsets_GB, lists.pages_P, self._longest)
        attend = partial(self._backend.run, plan)
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
        num_tokens, num_keys = plan.num_decoding, 0
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

    def find(self, step: DecodeStep) -> "Callable[[], Replayed] | None":
        """A function that replays this step; None where no graph fits."""
        size = next((size for size in self.sizes if len(step) <= size in self._replays), 0)
        num_blocks = len(step) * pages_for(step.num_keys, self._layout.page_size)
        is_too_large = size > max(MOST_PADDED, self.sizes[0], 2 * len(step))
        if not size or is_too_large or step.num_keys > self._longest or num_blocks > MOST_BLOCKS:
            return None
        words = self._device.for_upload(torch.from_numpy(self._pack(step, size)))
        return partial(self._replay, words, *self._replays[size], len(step))

    def _replay(
        self, numbers: Tensor, replay: Callable[[], None], lists: Lists, num_rows: int
    ) -> Replayed:
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
        replay()
        logits_SV = self._logits_BV[:num_rows]
        if self._draws is None:
            return Replayed(logits_SV, self._finite_B[:num_rows], None)
        return Replayed(logits_SV, None, Captured(self._draws, lists.settings_BN))
