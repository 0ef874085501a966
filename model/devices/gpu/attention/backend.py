"""TritonBackend: launches of the attention kernels, and their scratch memory. CPU tensors work under Triton's interpreter only.

Shape letters: T tokens of the step, H query heads, d columns of a key, v of a value.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch
from model.devices.gpu import EXACT, upload
from model.devices.gpu.attention.configurations import Configuration
from model.devices.gpu.attention.kernels import attend, join
from model.devices.gpu.attention.plan import (
    SPAN_FIELDS,
    TILE_FIELDS,
    GroupLists,
    Numbers,
    Shape,
    classes,
    filled_up,
    joined,
    most_splits,
    padding_of,
    plan_groups,
    shape_of,
)
from model.devices.gpu.attention.write import scatter
from model.layers import Rotation
from model.step import Row

SCRATCH_BYTES = 64 * 2**20
"""Memory for the partial outputs of splits; more only if one sequence could need it. A step that needs more is computed in waves."""
JOINED_AT_ONCE = 16
"""Splits whose partial outputs are summed at once."""
ROTATED_AT_ONCE = 2048
"""Query columns of a token that one program rotates."""
LEAST_BLOCK = 16
"""The smallest block of a tensor core instruction."""
JOIN_SIZES = ("HEADS", "NUM_V", "BLOCK_V", "BLOCK_M", "SPANS", "TILES")


GroupPlan = GroupLists[Tensor]
"""What the layers of one group share, on the device."""


class TritonBackend:
    """Three launches for each layer: rotation and storing of keys and values; attention; with splits, the reduction of partial outputs."""

    name = "triton"
    batch_invariant = True

    def __init__(self, pool: KVPool, scale: float, num_heads: int, configuration: Configuration) -> None:
        self.pool, self.num_heads, self.configuration = pool, num_heads, configuration
        self._factor = scale / math.log(2)
        key_dim, value_dim = pool.keys_LPSd.shape[-1], pool.values_LPSv.shape[-1]
        self._value_dim = value_dim
        first_columns = value_dim if pool.value_in_key else key_dim
        device = pool.keys_LPSd.device
        self._sizes = sizes_of(num_heads, first_columns, key_dim - first_columns, value_dim, configuration)
        self._join_sizes = {name: self._sizes[name] for name in JOIN_SIZES} | EXACT
        self._sizes |= {"PAGE": pool.page_size, "VALUE_IN_KEY": pool.value_in_key}
        # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
        self._sizes["UPCAST"] = device.type == "cpu" and pool.compute_dtype == torch.bfloat16
        self._sizes |= configuration.options | EXACT
        self._write_sizes = write_sizes_of(num_heads, key_dim, value_dim) | {"VALUE_IN_KEY": pool.value_in_key} | EXACT
        part_bytes = configuration.rows * value_dim * 4
        longest = most_splits(pool.num_pages * pool.page_size, None, configuration)
        self.capacity = max(SCRATCH_BYTES // part_bytes, longest + 1)
        self._partial = torch.empty(self.capacity * configuration.rows * value_dim, dtype=torch.float32, device=device)
        self._peaks, self._sums = torch.empty(2, self.capacity * configuration.rows, dtype=torch.float32, device=device)

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        """Uploads all lists of the step in one copy."""
        lists = self._lists(batch.rows, batch.firsts)
        return _laid_out(lists, upload(torch.from_numpy(joined(lists)), self.pool.keys_LPSd.device))

    def _lists(self, rows: Sequence[Row], firsts: ArrayLike) -> list[GroupLists[Numbers]]:
        return plan_groups(rows, firsts, self.pool.layout, self.num_heads, self.configuration, self.capacity)

    def contexts(self, longest: int) -> list[int]:
        """The longest context of each class."""
        return [min(num_keys, longest) for num_keys in classes(self.pool.page_size, longest)]

    def pack(self, rows: Sequence[Row], num_rows: int) -> tuple[Numbers, Shape] | None:
        """The lists of a step of single tokens, padded to `num_rows` rows and to its class of contexts, in one array. None if they take
        several waves, or would be mostly padding.
        """
        shape = shape_of(rows, num_rows, self.pool.page_size)
        if shape is None:
            return None
        lists = self._lists(rows, np.arange(len(rows)))
        return None if any(len(group.waves) > 1 for group in lists) else (filled_up(lists, self._padding(shape)), shape)

    def unpack(self, words: Tensor, shape: Shape) -> tuple[GroupPlan, ...]:
        """The plan for packed lists that are on the device."""
        return _laid_out(self._padding(shape), words)

    def _padding(self, shape: Shape) -> list[GroupLists[Numbers]]:
        layout = self.pool.layout
        return [padding_of(shape, group, layout.page_size, self.num_heads, self.configuration) for group in layout.groups]

    def run(
        self, plan: tuple[GroupPlan, ...], layer: int, q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor, rotation: Rotation | None = None
    ) -> Tensor:
        place = self.pool.layout.places[layer]
        keys, values = self.pool.layer(layer)
        q_THd = self._store(keys, values, plan[place.group].slots[place.stack], q_THd, k_Td, v_Tv, rotation)
        return self.attend(plan, layer, q_THd)

    def attend(self, plan: tuple[GroupPlan, ...], layer: int, q_THd: Tensor) -> Tensor:
        """The second part of `run`: attention of rotated queries, contiguous in each token, over stored keys and values."""
        place = self.pool.layout.places[layer]
        group, layer_group = plan[place.group], self.pool.layout.groups[place.group]
        keys, values = self.pool.layer(layer)
        o_THv = q_THd.new_empty(len(q_THd), self.num_heads, self._value_dim)
        for wave in group.waves:
            attend[(wave.num_tiles, wave.most_splits)](
                q_THd, keys, values, o_THv, group.spans, group.tiles, group.tables, self._partial, self._peaks, self._sums,
                wave.first_tile, q_THd.stride(0), group.tables.shape[1], place.stack, layer_group.num_stacks, self._factor,
                WINDOW=layer_group.window or 0, **self._sizes,
            )  # fmt: skip
            if wave.most_splits > 1:
                join[(wave.num_tiles, self.configuration.rows)](
                    o_THv, group.spans, group.tiles, self._partial, self._peaks, self._sums, wave.first_tile,
                    BLOCK_C=JOINED_AT_ONCE, num_warps=1, **self._join_sizes,
                )  # fmt: skip
        return o_THv

    def _store(
        self, keys: Tensor, values: Tensor, slots: Tensor, q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor, rotation: Rotation | None
    ) -> Tensor:
        """Stores keys and values. -> q_THd, rotated; rows of padding are undefined."""
        key_dim = q_THd.shape[-1]
        if q_THd.stride()[1:] != (key_dim, 1):
            q_THd = q_THd.contiguous()
        if k_Td.stride(1) != 1 or v_Tv.stride(1) != 1:
            k_Td, v_Tv = k_Td.contiguous(), v_Tv.contiguous()
        turned_THd, cosine_Tr, sine_Tr, programs, warps = q_THd, None, None, 1, 1
        if rotation is not None:
            assert 2 * rotation.cosine_Tr.shape[1] == key_dim
            turned_THd, cosine_Tr, sine_Tr = q_THd.new_empty(q_THd.shape), rotation.cosine_Tr, rotation.sine_Tr
            programs, warps = 1 + -(-self.num_heads // self._write_sizes["BLOCK_HEADS"]), 4
        scatter[(len(slots), programs)](
            q_THd, k_Td, v_Tv, cosine_Tr, sine_Tr, turned_THd, keys, values, slots, q_THd.stride(0), k_Td.stride(0), v_Tv.stride(0),
            INTERLEAVED=rotation is not None and rotation.interleaved, num_warps=warps, **self._write_sizes,
        )  # fmt: skip
        return turned_THd


def sizes_of(num_heads: int, first_columns: int, tail_columns: int, value_dim: int, configuration: Configuration) -> dict[str, Any]:
    """Compile-time constants of the attention kernels."""
    return {
        "HEADS": num_heads,
        "NUM_D": first_columns,
        "NUM_R": tail_columns,
        "NUM_V": value_dim,
        "BLOCK_D": _block(first_columns),
        "BLOCK_R": _block(tail_columns),
        "BLOCK_V": _block(value_dim),
        "BLOCK_M": configuration.rows,
        "BLOCK_N": configuration.keys,
        "SPANS": SPAN_FIELDS,
        "TILES": TILE_FIELDS,
    }


def write_sizes_of(num_heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that stores keys and values."""
    block_key = _block(key_dim)
    sizes = {"HEADS": num_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_KEY": block_key, "BLOCK_VALUE": _block(value_dim)}
    return sizes | {"BLOCK_HEADS": min(_block(num_heads), max(1, ROTATED_AT_ONCE // block_key))}


def _block(num: int) -> int:
    """Columns of the block for `num` columns: a power of two."""
    return max(LEAST_BLOCK, 1 << (num - 1).bit_length()) if num else 0


def _laid_out(lists: list[GroupLists[Numbers]], words: Tensor) -> tuple[GroupPlan, ...]:
    """Plans of lists of these sizes, from their concatenated numbers on the device."""
    parts = [part for group in lists for part in group.parts]
    tensors = (x.view(part.shape) for x, part in zip(words.split([part.size for part in parts]), parts, strict=True))
    return tuple(GroupPlan(next(tensors), next(tensors), next(tensors), next(tensors), group.waves) for group in lists)
