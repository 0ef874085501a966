"""KernelDraws: draws of a step's rows by the kernels of gpu/draw.py.

The draw of all rows can be captured. Rows whose sampling needs more are drawn again, all at once:
one launch draws from adjusted logits, one applies top-k and top-p. Invariant: counters are 0
between launches.

Shape letters: S rows of a step, F rows drawn again, V vocabulary, D hidden size, N settings of a
row, R results of a row, W words.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from model.devices.gpu import EXACT, upload
from model.devices.gpu.draw import BLOCK, PART_FIELDS, RESULTS, confine, draw
from model.draw_words import NUM_LIMITS, pack_redraw
from model.step import Sample

DRAW_WARPS, FILTER_WARPS, FILTER_SIZE = 4, 16, 4096


class KernelDraws:
    """A RowDraws."""

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device) -> None:
        self._num_tokens, self._device = num_tokens, device
        self._num_blocks = triton.cdiv(num_tokens, BLOCK.value)
        self._num_parts = triton.next_power_of_2(self._num_blocks)
        self.results_SR = torch.empty(num_rows, RESULTS.value, dtype=torch.int32, device=device)
        self._parts = torch.empty(
            num_rows * PART_FIELDS.value * self._num_parts, dtype=torch.int32, device=device
        )
        self._counters_S = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """Whether there is room for so many rows of logits of so many tokens."""
        return num_rows <= len(self.results_SR) and num_tokens == self._num_tokens

    def draw(
        self,
        logits_SV: Tensor,
        settings_SN: Tensor,
        drawn_S: Tensor | None,
        states_SD: Tensor | None = None,
        model_SV: Tensor | None = None,
        rows_F: Tensor | None = None,
    ) -> None:
        """With `rows_F` the logits are adjusted ones of these rows of the model's."""
        model_SV = logits_SV if model_SV is None else model_SV
        depth, states_stride = (
            (1, 0) if states_SD is None else (states_SD.shape[1], states_SD.stride(0))
        )
        piece = triton.next_power_of_2(triton.cdiv(depth, self._num_blocks))
        draw[(self._num_blocks, len(logits_SV))](
            logits_SV, model_SV, rows_F, settings_SN, states_SD, self._parts, self._counters_S,
            drawn_S, self.results_SR,
            logits_SV.stride(0), model_SV.stride(0), states_stride, self._num_tokens, depth, piece,
            self._num_parts,
            num_warps=DRAW_WARPS, **EXACT,
        )  # fmt: skip

    def redraw(
        self,
        logits_SV: Tensor,
        settings_SN: Tensor,
        drawn_S: Tensor | None,
        rows: Sequence[int],
        samples: Sequence[Sample],
        adjusted_FV: Tensor | None,
    ) -> None:
        packed = pack_redraw(rows, samples, self._num_tokens, adjusted_FV is not None)
        words_W = upload(torch.from_numpy(packed.words), self._device)
        source_SV = logits_SV
        if adjusted_FV is not None:
            source_SV = adjusted_FV
            self.draw(source_SV, settings_SN, drawn_S, None, logits_SV, words_W)
        limits, shares = words_W[packed.limits], words_W[packed.shares]
        if len(limits):
            unit = 2.0 ** (62 - self._num_tokens.bit_length())
            likeliest_FK = source_SV[:0]
            if packed.top_k:
                places_F = limits.view(-1, NUM_LIMITS)[:, 1]
                likeliest_FK = source_SV.index_select(0, places_F).topk(packed.top_k).values
            confine[(len(limits) // NUM_LIMITS,)](
                source_SV, likeliest_FK, logits_SV, limits, shares.view(torch.float64), settings_SN,
                drawn_S, self.results_SR, source_SV.stride(0), likeliest_FK.stride(0),
                logits_SV.stride(0), unit, self._num_tokens, FILTER_SIZE,
                num_warps=FILTER_WARPS, **EXACT,
            )  # fmt: skip
