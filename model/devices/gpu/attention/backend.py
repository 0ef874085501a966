"""TritonBackend: launches of the attention kernels, and their scratch memory. CPU tensors work
under Triton's interpreter only.

Shape letters: T tokens of the step, H query heads, d columns of a key, v of a value, B tokens of
the decode kernel, or rows of a captured step, G groups of layers,
P pages of all rows.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cache.layout import Columns, LayerGroup, Place, pages_for
from cache.pool import KVPool
from model.batch import Batch
from model.devices.gpu import EXACT, upload
from model.devices.gpu.attention.chunks import attend
from model.devices.gpu.attention.configurations import (
    INVARIANT_SPLITS,
    MOST_SPLITS,
    Configuration,
    Sizes,
    Splits,
    choose_chunks,
    choose_decode,
    choose_splits,
)
from model.devices.gpu.attention.decode import decode
from model.devices.gpu.attention.plan import TILE_FIELDS, StepLists, copied, plan_step
from model.devices.gpu.attention.write import scatter
from model.layers import Rotation

SCRATCH_BYTES = 64 * 2**20
"""Memory for the partial outputs of splits; more only if one token could need it."""
ROTATED_AT_ONCE = 2048
"""Query columns of a token that one program rotates."""
LEAST_BLOCK = 16
"""The smallest block of a tensor core instruction."""
Widths = tuple[int, int, int]
"""First columns of a key, its tail's, of a value."""
Plan = StepLists[Tensor]


class TritonBackend:
    """Two launches for each layer: rotation and storing of keys and values; attention. One more
    where a step has long chunks, and one for each further part of the single tokens whose splits
    the scratch memory has room for: with `invariant` 4,096 tokens behind 8,000 take 8 parts for
    16 heads of 128 columns and 32 for 48.

    Invariant: a token's output depends on its own sequence, and on the configuration and the splits
    of its kernel. With `invariant` these are the same for all tokens of all steps; else they depend
    on whether its row is a long chunk, and on the number of single tokens.
    """

    are_whole = None

    def __init__(
        self,
        pool: KVPool,
        scale: float,
        num_heads: int,
        columns: Columns,
        sizes: Sizes,
        *,
        invariant: bool = False,
    ) -> None:
        self.pool, self.num_heads, self.batch_invariant = pool, num_heads, invariant
        self._stored: list[tuple[Place, LayerGroup, Tensor, Tensor]] = [
            (place, pool.layout.groups[place.group], *pool.layer(layer))
            for layer, place in enumerate(pool.layout.places)
        ]
        """Where the keys and values of each layer are."""
        self.name = "triton" if invariant else "triton-fast"
        self.factor = scale / math.log(2)
        key_dim, value_dim, value_in_key = columns
        first_columns = value_dim if value_in_key else key_dim
        device = pool.numbers_PN.device
        self.columns = first_columns, key_dim - first_columns, value_dim
        chunks = choose_chunks(sizes)
        assert chunks is not None, "no kernels for these pages and heads"
        self.sizes, self.chunks = sizes, chunks
        # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
        upcast = device.type == "cpu" and pool.compute_dtype == torch.bfloat16
        stored = {"PAGE": pool.page_size, "NUMBERS": pool.numbers_PN.shape[1]}
        stored |= {"VALUE_IN_KEY": value_in_key} | EXACT
        self._options = stored | {"UPCAST": upcast}
        self._write_options = stored | write_sizes_of(num_heads, key_dim, value_dim)
        rows = choose_decode(sizes).rows
        self.capacity = max(
            SCRATCH_BYTES // (rows * value_dim * 4), pages_for(num_heads, rows) * MOST_SPLITS
        )
        """Partial outputs that the scratch memory holds."""
        self.partial = torch.empty(
            self.capacity * rows * value_dim, dtype=torch.float32, device=device
        )
        self.peaks, self.sums = torch.empty(
            2, self.capacity * rows, dtype=torch.float32, device=device
        )
        self.counters = torch.zeros(self.capacity, dtype=torch.int32, device=device)
        """How many splits of each tile are done; 0 between launches."""

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile of the kernel of long chunks; 0 where all tokens are single ones."""
        return 0 if self.batch_invariant else self.chunks.rows

    def plan(self, batch: Batch) -> Plan:
        """Uploads all lists of the step in one copy."""
        lists = plan_step(batch.plan, self.pool.layout, self.num_heads, self.tile_rows)
        device = self.pool.numbers_PN.device
        return copied(lists, lambda words_N: upload(torch.from_numpy(words_N), device))

    def listed(
        self, positions_B: Tensor, offsets_GB: Tensor, pages_P: Tensor, num_keys: int
    ) -> Plan:
        """See ListedBackend."""
        return StepLists(positions_B, offsets_GB, pages_P, num_keys)

    def decoding(self, num_rows: int) -> tuple[Configuration, Splits]:
        """How so many single tokens are computed."""
        if self.batch_invariant:
            return choose_decode(self.sizes), INVARIANT_SPLITS
        configuration = choose_decode(self.sizes, num_rows)
        splits = choose_splits(self.sizes.key_dim, num_rows)
        # Of a power of two, so that few numbers of rows differ in it.
        num_tiles = num_rows * pages_for(self.num_heads, configuration.rows)
        fit = self.capacity // (1 << (num_tiles - 1).bit_length())
        return configuration, Splits(splits.keys, max(1, min(splits.most, fit)))

    def run(
        self,
        plan: Plan,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Tv: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        return self.attend(plan, layer, self.store(plan, layer, q_THd, k_Td, v_Tv, rotation))

    def attend(self, plan: Plan, layer: int, q_THd: Tensor) -> Tensor:
        """The second part of `run`: attention of rotated queries, contiguous in each token, over
        stored keys and values. The outputs of padding are undefined.
        """
        o_THv = q_THd.new_empty(len(q_THd), self.num_heads, self.columns[2])
        if plan.tiles_M3 is not None:
            place, group, keys, values = self._stored[layer]
            attend[len(plan.tiles_M3),](
                q_THd, keys, values, o_THv, plan.tiles_M3, plan.positions_T,
                plan.offsets_GT[place.group], plan.pages_P,
                q_THd.stride(0), place.stack, group.num_stacks, self.factor,
                WINDOW=group.window or 0, TILES=TILE_FIELDS,
                **sizes_of(self.num_heads, self.columns, self.chunks), **self._options,
                **self.chunks.options,
            )  # fmt: skip
        num_single = len(q_THd) if plan.tokens_B is None else len(plan.tokens_B)
        if num_single:
            self._decode(plan, layer, num_single, q_THd, o_THv)
        return o_THv

    def _decode(
        self, plan: Plan, layer: int, num_single: int, q_THd: Tensor, o_THv: Tensor
    ) -> None:
        place, group, keys, values = self._stored[layer]
        configuration, splits = self.decoding(num_single)
        tiles_of_row = pages_for(self.num_heads, configuration.rows)
        # A window may begin within a block.
        before = configuration.warp_groups * configuration.keys - 1
        seen = min(plan.num_keys, (group.window or plan.num_keys) + before)
        num_splits = min(splits.most, pages_for(seen, splits.keys))
        at_once = self.capacity // (tiles_of_row * num_splits)
        for first in range(0, num_single, at_once):
            num_rows = min(at_once, num_single - first)
            decode[num_rows * tiles_of_row, num_splits](
                q_THd, keys, values, o_THv, plan.tokens_B, plan.positions_T,
                plan.offsets_GT[place.group], plan.pages_P,
                self.partial, self.peaks, self.sums, self.counters,
                first, q_THd.stride(0), place.stack, group.num_stacks, splits.keys, splits.most,
                self.factor,
                WINDOW=group.window or 0, GROUPS=configuration.warp_groups,
                **sizes_of(self.num_heads, self.columns, configuration), **self._options,
                **configuration.options,
            )  # fmt: skip

    def store(
        self,
        plan: Plan,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Tv: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """Stores keys and values, if there are any. -> q_THd, rotated; rows of padding are
        undefined.
        """
        q_THd = q_THd if q_THd.stride()[1:] == (q_THd.shape[-1], 1) else q_THd.contiguous()
        k_Td, v_Tv = (x if x is None or x.stride(1) == 1 else x.contiguous() for x in (k_Td, v_Tv))
        k_stride, v_stride = (0 if x is None else x.stride(0) for x in (k_Td, v_Tv))
        place, group, keys, values = self._stored[layer]
        turned_THd, cosine_Tr, sine_Tr, programs, warps = q_THd, None, None, 1, 1
        if rotation is not None:
            assert 2 * rotation.cosine_Tr.shape[1] == q_THd.shape[-1]
            turned_THd = q_THd.new_empty(q_THd.shape)
            cosine_Tr, sine_Tr = rotation.cosine_Tr, rotation.sine_Tr
            programs = 1 + pages_for(self.num_heads, self._write_options["BLOCK_HEADS"])
            warps = 4
        scatter[len(q_THd), programs](
            q_THd, k_Td, v_Tv, cosine_Tr, sine_Tr, turned_THd, keys, values, plan.positions_T,
            plan.offsets_GT[place.group], plan.pages_P,
            q_THd.stride(0), k_stride, v_stride, place.stack, group.num_stacks,
            INTERLEAVED=rotation is not None and rotation.interleaved, num_warps=warps,
            **self._write_options,
        )  # fmt: skip
        return turned_THd


class MixedBackend:
    """The TritonBackends of a model whose layers have keys of different widths in the same
    pages.
    """

    are_whole = None

    def __init__(self, pool: KVPool, backends: dict[Columns, TritonBackend]) -> None:
        self._pool, self._backends = pool, backends
        self._first = next(iter(backends.values()))
        self.name, self.batch_invariant = self._first.name, self._first.batch_invariant

    def plan(self, batch: Batch) -> dict[Columns, Plan]:
        plans = dict[int, Plan]()  # The same for backends with tiles of the same size.
        for backend in self._backends.values():
            if backend.tile_rows not in plans:
                plans[backend.tile_rows] = backend.plan(batch)
        return {columns: plans[each.tile_rows] for columns, each in self._backends.items()}

    def listed(
        self, positions_B: Tensor, offsets_GB: Tensor, pages_P: Tensor, num_keys: int
    ) -> dict[Columns, Plan]:
        """See ListedBackend."""
        plan = self._first.listed(positions_B, offsets_GB, pages_P, num_keys)
        return dict.fromkeys(self._backends, plan)

    def run(self, plan: dict[Columns, Plan], layer: int, *arguments: Any) -> Tensor:
        columns = self._pool.columns(layer)
        return self._backends[columns].run(plan[columns], layer, *arguments)


@cache
def sizes_of(num_heads: int, columns: Widths, configuration: Configuration) -> dict[str, Any]:
    """Compile-time constants of the attention kernels: heads and columns, and the blocks that hold
    these.
    """
    sizes = {"HEADS": num_heads, "BLOCK_M": configuration.rows, "BLOCK_N": configuration.keys}
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
