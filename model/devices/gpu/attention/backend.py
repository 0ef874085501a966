"""TritonBackend: launches of the attention kernels, and their scratch memory. CPU tensors work
under Triton's interpreter only.

Shape letters: T tokens of the step, H query heads, d columns of a key, v of a value.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from cache.layout import pages_for
from cache.pool import KVPool
from model.batch import Batch
from model.decode import Numbers
from model.devices.gpu import EXACT, upload
from model.devices.gpu.attention.configurations import Configuration
from model.devices.gpu.attention.kernels import attend, join
from model.devices.gpu.attention.plan import (
    SPAN_FIELDS,
    TILE_FIELDS,
    GroupLists,
    Wave,
    joined,
    most_splits,
    plan_groups,
)
from model.devices.gpu.attention.singles import Shape, Singles, classes, shape_of
from model.devices.gpu.attention.write import scatter
from model.layers import Rotation
from model.step import Row

SCRATCH_BYTES = 64 * 2**20
"""Memory for the partial outputs of splits; more only if one sequence could need it. A step that
needs more is computed in waves."""
JOINED_AT_ONCE = 16
"""Splits whose partial outputs are summed at once."""
ROTATED_AT_ONCE = 2048
"""Query columns of a token that one program rotates."""
LEAST_BLOCK = 16
"""The smallest block of a tensor core instruction."""
JOIN_SIZES = ("HEADS", "NUM_V", "BLOCK_V", "BLOCK_M", "SPANS", "TILES")


Columns = tuple[int, int, int]
"""First columns of a key, its tail's, of a value."""
GroupPlan = GroupLists[Tensor]
"""What the layers of one group share, on the device."""
Plan = tuple[GroupPlan, ...] | Singles
"""Lists for any rows, or the positions and tables of single tokens."""


class TritonBackend:
    """Three launches for each layer: rotation and storing of keys and values; attention; with
    splits, the reduction of partial outputs.
    """

    name = "triton"
    batch_invariant = True

    def __init__(
        self, pool: KVPool, scale: float, num_heads: int, configuration: Configuration
    ) -> None:
        self.pool, self.num_heads, self.configuration = pool, num_heads, configuration
        self.factor = scale / math.log(2)
        key_dim, value_dim = pool.keys_LPSd.shape[-1], pool.values_LPSv.shape[-1]
        first_columns = value_dim if pool.value_in_key else key_dim
        device = pool.keys_LPSd.device
        self.columns = first_columns, key_dim - first_columns, value_dim
        # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
        self.sizes = {"PAGE": pool.page_size, "VALUE_IN_KEY": pool.value_in_key} | EXACT
        self.sizes["UPCAST"] = device.type == "cpu" and pool.compute_dtype == torch.bfloat16
        self._write_sizes = (
            write_sizes_of(num_heads, key_dim, value_dim)
            | {"VALUE_IN_KEY": pool.value_in_key}
            | EXACT
        )
        part_bytes = configuration.rows * value_dim * 4
        longest = most_splits(pool.num_pages * pool.page_size, None, configuration)
        self.capacity = max(SCRATCH_BYTES // part_bytes, longest + 1)
        """Partial outputs that the scratch memory holds."""
        self.partial = torch.empty(
            self.capacity * configuration.rows * value_dim, dtype=torch.float32, device=device
        )
        self.peaks, self.sums = torch.empty(
            2, self.capacity * configuration.rows, dtype=torch.float32, device=device
        )

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        """Uploads all lists of the step in one copy."""
        lists = self.lists(batch.rows, batch.firsts, len(batch.token_ids_T), self.configuration)
        return laid_out(lists, upload(torch.from_numpy(joined(lists)), self.pool.keys_LPSd.device))

    def lists(
        self, rows: Sequence[Row], firsts: ArrayLike, num_tokens: int, configuration: Configuration
    ) -> list[GroupLists[Numbers]]:
        """The lists of some rows of a step of so many tokens."""
        return plan_groups(
            rows, firsts, num_tokens, self.pool.layout, self.num_heads, configuration, self.capacity
        )

    def contexts(self, longest: int) -> list[int]:
        """The longest context of each class."""
        return [min(num_keys, longest) for num_keys in classes(self.pool.page_size, longest)]

    def shape(self, num_keys: int, num_rows: int, several: bool = False) -> Shape | None:
        """See ListedBackend. Also None if the scratch memory is too small for one wave. Keys are
        stored before any is read in any case.
        """
        shape = shape_of(num_keys, num_rows, self.pool.page_size)
        if shape is None or any(
            self._num_tiles(num_rows) * splits > self.capacity
            for splits in self._splits(shape.num_keys)
        ):
            return None
        return shape

    def listed(self, positions_B: Tensor, tables_BW: Sequence[Tensor], shape: Shape) -> Singles:
        """The plan of a step of single tokens whose numbers are on the device."""
        return Singles(positions_B, tuple(tables_BW), shape.num_keys)

    def _num_tiles(self, num_rows: int) -> int:
        return num_rows * pages_for(self.num_heads, self.configuration.rows)

    def _splits(self, num_keys: int) -> list[int]:
        """The most splits of a token with so many keys, in each group of layers."""
        return [
            most_splits(num_keys, group.window, self.configuration)
            for group in self.pool.layout.groups
        ]

    def run(
        self,
        plan: Plan,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor,
        v_Tv: Tensor,
        rotation: Rotation | None = None,
    ) -> Tensor:
        return self.attend(
            plan, layer, self.store(plan, layer, *in_rows(q_THd, k_Td, v_Tv), rotation)
        )

    def attend(self, plan: Plan, layer: int, q_THd: Tensor) -> Tensor:
        """The second part of `run`: attention of rotated queries, contiguous in each token, over
        stored keys and values. The outputs of tokens that belong to no row of the plan are
        undefined.
        """
        place = self.pool.layout.places[layer]
        group, (keys, values) = self.pool.layout.groups[place.group], self.pool.layer(layer)
        o_THv = q_THd.new_empty(len(q_THd), self.num_heads, self.columns[2])
        if isinstance(plan, Singles):
            configuration = self.configuration
            spans = None
            tiles = None
            positions = plan.positions_B
            tables = plan.tables_BW[place.group]
            waves: tuple[Wave, ...] = (
                Wave(0, self._num_tiles(len(positions)), self._splits(plan.num_keys)[place.group]),
            )
        else:
            lists = plan[place.group]
            configuration = lists.configuration
            spans = lists.spans
            tiles = lists.tiles
            positions = None
            tables = lists.tables
            waves = lists.waves
        sizes = sizes_of(self.num_heads, self.columns, configuration)
        join_sizes = (
            {name: sizes[name] for name in JOIN_SIZES}
            | {"BLOCK_C": JOINED_AT_ONCE, "num_warps": 1}
            | EXACT
        )
        for wave in waves:
            splits = (
                configuration.split,
                configuration.short_split,
                configuration.num_short,
                wave.most_splits,
            )
            attend[(wave.num_tiles, wave.most_splits)](
                q_THd, keys, values, o_THv, spans, tiles, positions, tables, self.partial,
                self.peaks, self.sums,
                wave.first_tile, q_THd.stride(0), tables.stride(0), place.stack, group.num_stacks,
                *splits, self.factor,
                WINDOW=group.window or 0, **sizes, **self.sizes, **configuration.options,
            )  # fmt: skip
            if wave.most_splits > 1:
                join[(wave.num_tiles, configuration.rows)](
                    o_THv, spans, tiles, positions, self.partial, self.peaks, self.sums,
                    wave.first_tile, *splits,
                    WINDOW=group.window or 0, **join_sizes,
                )  # fmt: skip
        return o_THv

    def store(
        self,
        plan: Plan,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor,
        v_Tv: Tensor,
        rotation: Rotation | None,
    ) -> Tensor:
        """Stores keys and values. -> q_THd, rotated; rows of padding are undefined."""
        place = self.pool.layout.places[layer]
        group, (keys, values) = self.pool.layout.groups[place.group], self.pool.layer(layer)
        if isinstance(plan, Singles):
            slots = None
            positions = plan.positions_B
            tables = plan.tables_BW[place.group]
            num_tokens = len(plan.positions_B)
        else:
            slots = plan[place.group].slots[place.stack]
            positions = None
            tables = plan[place.group].tables
            num_tokens = len(slots)
        turned_THd, cosine_Tr, sine_Tr, programs, warps = q_THd, None, None, 1, 1
        if rotation is not None:
            assert 2 * rotation.cosine_Tr.shape[1] == q_THd.shape[-1]
            turned_THd = q_THd.new_empty(q_THd.shape)
            cosine_Tr = rotation.cosine_Tr
            sine_Tr = rotation.sine_Tr
            programs, warps = 1 + -(-self.num_heads // self._write_sizes["BLOCK_HEADS"]), 4
        scatter[(num_tokens, programs)](
            q_THd, k_Td, v_Tv, cosine_Tr, sine_Tr, turned_THd, keys, values, slots, positions,
            tables,
            q_THd.stride(0), k_Td.stride(0), v_Tv.stride(0), tables.stride(0), place.stack,
            group.num_stacks, self.pool.page_size,
            INTERLEAVED=rotation is not None and rotation.interleaved, num_warps=warps,
            **self._write_sizes,
        )  # fmt: skip
        return turned_THd


def in_rows(q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each contiguous in a token, as kernels read them."""
    q_THd = q_THd if q_THd.stride()[1:] == (q_THd.shape[-1], 1) else q_THd.contiguous()
    k_Td, v_Tv = (x if x.stride(1) == 1 else x.contiguous() for x in (k_Td, v_Tv))
    return q_THd, k_Td, v_Tv


@cache
def sizes_of(num_heads: int, columns: Columns, configuration: Configuration) -> dict[str, Any]:
    """Compile-time constants of the attention kernels."""
    blocks = {
        "BLOCK_M": configuration.rows,
        "BLOCK_N": configuration.keys,
        "AHEAD": configuration.ahead,
    }
    return column_sizes(num_heads, columns) | blocks | {"SPANS": SPAN_FIELDS, "TILES": TILE_FIELDS}


def column_sizes(num_heads: int, columns: Columns) -> dict[str, Any]:
    """Heads and columns, and the blocks that hold these."""
    sizes = {"HEADS": num_heads}
    for letter, num in zip("DRV", columns, strict=True):
        sizes |= {f"NUM_{letter}": num, f"BLOCK_{letter}": block_of(num)}
    return sizes


def write_sizes_of(num_heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that stores keys and values."""
    block_key = block_of(key_dim)
    sizes = {
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": block_key,
        "BLOCK_VALUE": block_of(value_dim),
    }
    return sizes | {"BLOCK_HEADS": min(block_of(num_heads), max(1, ROTATED_AT_ONCE // block_key))}


def block_of(num: int) -> int:
    """Columns of the block for `num` columns: a power of two."""
    return max(LEAST_BLOCK, 1 << (num - 1).bit_length()) if num else 0


def laid_out(lists: list[GroupLists[Numbers]], words: Tensor) -> tuple[GroupPlan, ...]:
    """Plans of lists of these sizes, from their concatenated numbers on the device."""
    parts = [part for group in lists for part in group.parts]
    tensors = (
        x.view(part.shape)
        for x, part in zip(words.split([part.size for part in parts]), parts, strict=True)
    )
    return tuple(
        GroupLists(
            next(tensors),
            next(tensors),
            next(tensors),
            next(tensors),
            group.waves,
            group.configuration,
        )
        for group in lists
    )
