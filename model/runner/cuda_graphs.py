"""CudaGraphs: CUDA graphs of decode-only steps, by bucket of batch size and of context length.

Most steps of a server compute one token for each row and draw after it, in about a hundred small launches. Such a step is captured once
for each bucket over static tensors; a step replays the smallest graph that it fits in, and fills it up with padding. Invariant: nothing is
captured while requests are served; what a replay reads was copied into place by the same step, after the replay before it. It knows
nothing of requests and of how tokens are drawn.

Shape letters: B rows of a captured step, S rows of a step, D hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.decoder import Decoder
from model.devices.backend import Backend
from model.devices.device import Device, Stream, lack_of_memory
from model.step import PENDING, Row

log = logging.getLogger("onehead.engine")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
ALIGNMENT = 4
"""Lists begin at multiples of it, as a backend's own do."""
FIELDS = 3
"""Number of int32 lists, one number for each row, that precede the backend's: token ids, positions, and for a token that the previous step
draws its index in drawn_S (else PENDING).
"""

Numbers = NDArray[np.int32]


@runtime_checkable
class ListedBackend(Backend, Protocol):
    """A Backend whose plan is made of numbers on the device, so that a graph can be replayed with others."""

    def contexts(self, longest: int) -> Sequence[int]:
        """Upper ends of the buckets of context lengths, up to the bucket of the longest context."""

    def pack(self, rows: Sequence[Row], num_rows: int) -> tuple[Numbers, Hashable] | None:
        """The numbers of a step of single tokens, padded to `num_rows` rows, and what besides them its launches depend on. None where it
        is too long for one wave, or mostly padding.
        """

    def unpack(self, words: Tensor, shape: Any) -> Any:
        """The plan that `pack` has packed into these numbers, which are on the device."""


class CudaGraphs:
    """The graphs of one decoder. `drawn_S` holds the tokens drawn by the previous step."""

    def __init__(self, decoder: Decoder, backend: ListedBackend, device: Device, stream: Stream, drawn_S: Tensor, most_rows: int) -> None:
        self._decoder, self._backend, self._device, self._stream, self._drawn_S = decoder, backend, device, stream, drawn_S
        self.sizes = [*(size for size in SIZES if size < most_rows), most_rows]
        self._words = torch.zeros(0, dtype=torch.int32, device=drawn_S.device)
        self._logits_BV = torch.zeros(0, 0)
        """Allocated by the first capture, which knows the dtype."""
        self._finite_B = torch.zeros(most_rows, dtype=torch.bool, device=drawn_S.device)
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def capture(self, steps: Iterable[Sequence[Row]]) -> None:
        """Captures the steps of which these rows are examples, each in every batch size that it fits in. The largest come first: the
        others reuse their memory.
        """
        packed = [found for rows in steps for size in self.sizes if size >= len(rows) if (found := self._pack(rows, size))]
        packed.sort(key=lambda found: -len(found[0]))
        if packed:
            self._words = torch.zeros(len(packed[0][0]), dtype=torch.int32, device=self._drawn_S.device)
        for words, size, shape in packed:
            if (size, shape) not in self._replays:
                self._words[: len(words)].copy_(self._device.upload(torch.from_numpy(words)))
                try:
                    self._replays[size, shape] = self._stream.capture(partial(self._work, size, len(words), shape))
                except RuntimeError as error:
                    lack_of_memory(error)
                    log.warning("memory is short: %d CUDA graphs, other steps are launched kernel by kernel", self.num_captured)
                    return

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def _pack(self, rows: Sequence[Row], size: int, sources: Sequence[int] = ()) -> tuple[Numbers, int, Hashable] | None:
        packed = self._backend.pack(rows, size)
        if packed is None:
            return None
        lists, shape = packed
        fields = np.zeros((FIELDS, -(-size // ALIGNMENT) * ALIGNMENT), np.int32)
        fields[2] = PENDING
        for line, numbers in zip(fields, ([row.tokens[0] for row in rows], [row.start for row in rows], sources), strict=True):
            line[: len(numbers)] = numbers
        return np.concatenate([fields.ravel(), lists]), size, shape

    def _work(self, size: int, num_words: int, shape: Any) -> None:
        """The step itself, over static tensors."""
        words = self._words[:num_words]
        width = -(-size // ALIGNMENT) * ALIGNMENT
        ids_B, positions_B, sources_B = words[: FIELDS * width].view(FIELDS, width)[:, :size]
        ids_B = torch.where(sources_B >= 0, self._drawn_S[sources_B.clamp(min=0)], ids_B)
        attend = partial(self._backend.run, self._backend.unpack(words[FIELDS * width :], shape))
        x_BD = self._decoder(ids_B, positions_B, attend)
        logits_BV = self._decoder.logits(x_BD)
        if not len(self._logits_BV):
            self._logits_BV = logits_BV.new_zeros(self.sizes[-1], logits_BV.shape[-1])
        self._logits_BV[:size].copy_(logits_BV)
        self._finite_B[:size].copy_(x_BD.isfinite().all(dim=-1))

    def find(self, rows: Sequence[Row], sources: Sequence[int]) -> "Callable[[], tuple[Tensor, Tensor]] | None":
        """A function that replays this step and returns its logits_SV and finite_S, which the next replay overwrites; None where no graph
        fits. `sources`: for each row whose token is PENDING its index in drawn_S, and -1 for the others.
        """
        others = [row for row in rows if len(row.tokens) != 1 or row.sample is None or row.scoring is not None]
        if others or len(rows) > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= len(rows))
        packed = self._pack(rows, size, sources)
        if packed is None or packed[1:] not in self._replays:
            return None
        words = self._device.upload(torch.from_numpy(packed[0]))
        return partial(self._replay, words, self._replays[packed[1:]], len(rows))

    def _replay(self, words: Tensor, replay: Callable[[], None], num_rows: int) -> tuple[Tensor, Tensor]:
        self._words[: len(words)].copy_(words)
        replay()
        return self._logits_BV[:num_rows], self._finite_B[:num_rows]
