"""FastBackend: attention on a GPU where a token's bits may depend on its company: single tokens and
chunks have kernels of their own.

Single tokens take one launch a layer, the decode kernel's. Rows of several tokens take the kernels
of TritonBackend, in tiles that are not split where there are enough of them. A token's bits depend
on its own sequence and on the class of its step: whether it is computed alone in its row, and how
many rows or tiles there are of its kind, in a few classes. CPU tensors work under Triton's
interpreter only.

Shape letters: T tokens of the step, B rows of one token, H query heads, d columns of a key, v of a
value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.layout import pages_for
from cache.pool import KVPool
from model.batch import Batch
from model.decode import DecodeTable
from model.devices.gpu import upload
from model.devices.gpu.attention import sizes_of_pool
from model.devices.gpu.attention.backend import (
    Columns,
    GroupPlan,
    TritonBackend,
    block_of,
    column_sizes,
    in_rows,
    laid_out,
)
from model.devices.gpu.attention.configurations import (
    LEAST_TILES,
    Configuration,
    DecodeConfiguration,
    choose,
    choose_chunks,
    choose_decode,
)
from model.devices.gpu.attention.decode import decode
from model.devices.gpu.attention.plan import joined
from model.devices.gpu.attention.singles import Shape, Singles, packed, shape_of, unpacked
from model.layers import Rotation
from model.step import PENDING, Row

MOST_SPLITS = 64
"""Splits of a single token, which one program adds up."""


@dataclass(frozen=True, slots=True)
class StepLists:
    """A step's lists on the device, by kind of row."""

    chunks: tuple[GroupPlan, ...]
    """Empty where no row has several tokens."""
    singles: Singles | None


class FastBackend:
    """One launch a layer for single tokens; for chunks rotation and storing, attention, and where
    there are few tiles the joining.
    """

    name = "triton-fast"
    batch_invariant = False

    def __init__(
        self, pool: KVPool, scale: float, num_heads: int, configuration: Configuration
    ) -> None:
        self.pool, self.num_heads = pool, num_heads
        self.tiles = TritonBackend(pool, scale, num_heads, configuration)
        self._sizes = sizes_of_pool(pool, num_heads)
        self.chunks = choose_chunks(self._sizes)
        self.counters = torch.zeros(
            self.tiles.capacity, dtype=torch.int32, device=pool.keys_LPSd.device
        )
        """How many splits of each tile are done; 0 between launches."""

    def plan(self, batch: Batch) -> StepLists:
        """Uploads all lists of the step in one copy."""
        layout, listed = self.pool.layout, batch.plan.listed
        firsts = batch.firsts[len(batch.firsts) - len(listed) :]
        chunks = [
            (row, first) for row, first in zip(listed, firsts, strict=True) if len(row.tokens) > 1
        ]
        singles = [
            (row, first) for row, first in zip(listed, firsts, strict=True) if len(row.tokens) == 1
        ]
        words, lists, shape = [], [], None
        if chunks:
            rows = [row for row, _ in chunks]
            lists = self.tiles.lists(
                rows,
                [first for _, first in chunks],
                len(batch.token_ids_T),
                self._configuration(rows),
            )
            words.append(joined(lists))
        step, num_decoding = batch.plan.decode, len(batch.firsts) - len(listed)
        if singles:
            # In a table, rows that draw come first.
            singles.sort(key=lambda pair: pair[0].sample is None)
            step = DecodeTable.of(
                layout, [row for row, _ in singles], [PENDING] * len(singles), step
            ).advance()
        if step is not None:
            shape = Shape(len(step), step.num_keys)
            # Sorting may have moved single tokens, so their own places are sent wherever some were
            # listed, with or without chunks.
            tokens = [*range(num_decoding), *(first for _, first in singles)] if listed else None
            words.append(packed(step, shape, layout, tokens))
        words_N = upload(torch.from_numpy(np.concatenate(words)), self.pool.keys_LPSd.device)
        num_listed = sum(part.size for group in lists for part in group.parts)
        return StepLists(
            laid_out(lists, words_N[:num_listed]),
            None if shape is None else unpacked(words_N[num_listed:], shape, layout, bool(listed)),
        )

    def _configuration(self, chunks: Sequence[Row]) -> Configuration:
        num_tiles = sum(
            pages_for(len(row.tokens) * self.num_heads, self.chunks.rows) for row in chunks
        )
        return self.chunks if num_tiles >= LEAST_TILES else self.tiles.configuration

    def contexts(self, longest: int) -> list[int]:
        """The longest context of each class."""
        return self.tiles.contexts(longest)

    def shape(self, num_keys: int, num_rows: int, several: bool = False) -> Shape | None:
        shape = shape_of(num_keys, num_rows, self.pool.page_size)
        return None if shape is None else replace(shape, several=several)

    def listed(self, positions_B: Tensor, tables_BW: Sequence[Tensor], shape: Shape) -> StepLists:
        """The plan of a step of single tokens whose numbers are on the device."""
        return StepLists(
            (), Singles(positions_B, tuple(tables_BW), shape.num_keys, several=shape.several)
        )

    def run(
        self,
        plan: StepLists,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor,
        v_Tv: Tensor,
        rotation: Rotation | None = None,
    ) -> Tensor:
        q_THd, k_Td, v_Tv = in_rows(q_THd, k_Td, v_Tv)
        if plan.chunks:
            o_THv = self.tiles.run(plan.chunks, layer, q_THd, k_Td, v_Tv, rotation)
        else:
            o_THv = q_THd.new_empty(len(q_THd), self.num_heads, self.tiles.columns[2])
        if plan.singles is not None:
            new: tuple[Tensor, Tensor] | None = k_Td, v_Tv
            if plan.singles.several:
                q_THd = self.tiles.store(plan.singles, layer, q_THd, k_Td, v_Tv, rotation)
                new = None
                rotation = None
            self._decode(plan.singles, layer, q_THd, new, rotation, o_THv)
        return o_THv

    def _decode(
        self,
        rows: Singles,
        layer: int,
        q_THd: Tensor,
        new: tuple[Tensor, Tensor] | None,
        rotation: Rotation | None,
        o_THv: Tensor,
    ) -> None:
        """`new`: keys and values to be stored; None where all are, and queries are rotated."""
        place, num_rows, tiles = self.pool.layout.places[layer], len(rows.positions_B), self.tiles
        group, tables_BW = self.pool.layout.groups[place.group], rows.tables_BW[place.group]
        keys, values = self.pool.layer(layer)
        configuration = choose_decode(tiles.configuration, self._sizes, num_rows)
        num_tiles = num_rows * pages_for(self.num_heads, configuration.rows)
        # Of a power of two, so that few numbers of rows differ in it.
        most_splits = max(
            1, min(MOST_SPLITS, tiles.capacity // (1 << (num_tiles - 1).bit_length()))
        )
        # A window may begin within a block.
        seen = min(
            rows.num_keys,
            (group.window or rows.num_keys) + configuration.groups * configuration.keys - 1,
        )
        cosine_Tr, sine_Tr = (
            (None, None) if rotation is None else (rotation.cosine_Tr, rotation.sine_Tr)
        )
        k_Td, v_Tv = new or (None, None)
        strides = [0 if x is None else x.stride(0) for x in (q_THd, k_Td, v_Tv)]
        decode[(num_tiles, min(most_splits, pages_for(seen, configuration.split)))](
            q_THd, k_Td, v_Tv, cosine_Tr, sine_Tr, keys, values, o_THv, rows.tokens_B,
            rows.positions_B, tables_BW,
            tiles.partial, tiles.peaks, tiles.sums, self.counters, *strides, tables_BW.stride(0),
            place.stack,
            group.num_stacks, configuration.split, most_splits, tiles.factor,
            WINDOW=group.window or 0, INTERLEAVED=rotation is not None and rotation.interleaved,
            **decode_sizes_of(self.num_heads, tiles.columns, configuration), **tiles.sizes,
            **configuration.options,
        )  # fmt: skip


@cache
def decode_sizes_of(
    num_heads: int, columns: Columns, configuration: DecodeConfiguration
) -> dict[str, Any]:
    """Compile-time constants of the decode kernel."""
    blocks = {
        "BLOCK_H": configuration.rows,
        "GROUPS": configuration.groups,
        "BLOCK_N": configuration.keys,
    }
    return (
        column_sizes(num_heads, columns) | blocks | {"BLOCK_KEY": block_of(columns[0] + columns[1])}
    )


def create(pool: KVPool, scale: float, num_heads: int) -> FastBackend:
    configuration = choose(sizes_of_pool(pool, num_heads))
    assert configuration is not None
    return FastBackend(pool, scale, num_heads, configuration)
