"""Attention on a CPU by the native kernel (native/attention.cpp): pages are read in place, once for
all query heads.

Keys are stored transposed within their page: [d, S]. Pages may be in bfloat16 or float16; all
arithmetic is in float32. Invariant: a token's output depends on its own sequence alone, bit for
bit.

Shape letters: T tokens of the step, H query heads, d columns of a key, v of a value, S slots of a
page, N rows of the step.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import LayerGroup
from cache.pool import KVPool
from model.batch import Batch
from model.devices.cpu import native
from model.devices.cpu.native import NUMBER_TYPES, integers, library
from model.layers import Rotation

MULTIPLE = 16
"""Page size and the columns of keys and values must be multiples of it."""


class Attention(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *integers(
            "queries",
            "new_keys",
            "new_values",
            "outputs",
            "keys",
            "values",
            "spans",
            "query_stride",
            "key_stride",
            "value_stride",
            "num_tokens",
            "num_spans",
            "stack",
            "num_heads",
            "key_dim",
            "value_dim",
            "page_size",
            "page_numbers",
            "number_type",
        ),
        ("scale", ctypes.c_float),
        ("sums", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What the layers of one group share: the kernel's Spans, and the page lists to which they
    point.
    """

    spans: "array[int]"
    pages: "list[array[int]]"
    address: int


def supports(pool: KVPool) -> bool:
    """Whether the kernels take these pages."""
    sizes = [size for group in pool.layout.groups for size in group.columns[:2]]
    return pool.dtype in NUMBER_TYPES and not any(n % MULTIPLE for n in (pool.page_size, *sizes))


class NativeBackend:
    """Writes the step's keys and values and attends, in one call for each layer."""

    batch_invariant = True

    def __init__(self, pool: KVPool, scale: float) -> None:
        assert supports(pool)
        self.name = native.name()
        self.pool, self.library = pool, library()
        self._structs = []
        for layer, place in enumerate(pool.layout.places):
            keys, values = (x.data_ptr() for x in pool.layer(layer))
            columns = pool.columns(layer)
            struct = Attention(
                keys=keys,
                values=0 if columns.value_in_key else values,
                stack=place.stack,
                key_dim=columns.key,
                value_dim=columns.value,
                page_size=pool.page_size,
                page_numbers=pool.numbers_PN.shape[1],
                number_type=NUMBER_TYPES[pool.dtype],
                scale=scale,
                sums=0 if pool.sums_P is None else pool.sums_P.data_ptr(),
            )
            self._structs.append((struct, place.group))

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        return tuple(
            _plan(batch, number, group) for number, group in enumerate(batch.layout.groups)
        )

    def struct(self, layer: int, num_heads: int) -> tuple[Attention, int]:
        """The kernel's arguments for a layer that do not depend on the step, and the number of its
        group.
        """
        struct, number = self._structs[layer]
        copy = Attention.from_buffer_copy(struct)
        copy.num_heads = num_heads
        return copy, number

    def are_whole(self, pages: Sequence[int]) -> list[bool]:
        assert self.pool.sums_P is not None
        pages_N = torch.tensor(pages)
        sums_N = torch.empty_like(pages_N)
        numbers_PN = self.pool.numbers_PN
        self.library.sum_pages(
            numbers_PN.data_ptr(),
            numbers_PN.itemsize,
            numbers_PN.shape[1],
            pages_N.data_ptr(),
            len(pages),
            sums_N.data_ptr(),
            torch.get_num_threads(),
        )
        return (sums_N == self.pool.sums_P[pages_N]).tolist()

    def run(
        self,
        plan: tuple[GroupPlan, ...],
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Tv: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        assert q_THd.dtype is torch.float32
        struct, number = self._structs[layer]
        num_tokens, num_heads, key_dim = q_THd.shape
        query_stride, *within = q_THd.stride()
        if within != [key_dim, 1]:
            q_THd, query_stride = q_THd.contiguous(), num_heads * key_dim
        o_THv = q_THd.new_empty(num_tokens, num_heads, struct.value_dim)
        group = plan[number]
        struct.queries, struct.query_stride = q_THd.data_ptr(), query_stride
        struct.new_keys = struct.new_values = 0
        if k_Td is not None and v_Tv is not None:
            assert k_Td.dtype is v_Tv.dtype is torch.float32
            if k_Td.stride(1) != 1 or v_Tv.stride(1) != 1:
                k_Td, v_Tv = k_Td.contiguous(), v_Tv.contiguous()
            struct.new_keys, struct.new_values = k_Td.data_ptr(), v_Tv.data_ptr()
            struct.key_stride, struct.value_stride = k_Td.stride(0), v_Tv.stride(0)
        struct.outputs, struct.spans, struct.num_spans = (
            o_THv.data_ptr(),
            group.address,
            len(group.pages),
        )
        struct.num_tokens, struct.num_heads = num_tokens, num_heads
        self.library.attend(ctypes.addressof(struct), torch.get_num_threads())
        return o_THv


def _plan(batch: Batch, number: int, group: LayerGroup) -> GroupPlan:
    """The kernel's lists. The time this takes does not grow with the sequences."""
    spans, all_pages = array("q"), []
    stacks, page_size, window = group.num_stacks, batch.layout.page_size, group.window
    for row, first in zip(batch.rows, batch.firsts, strict=True):
        pages = row.pages[number]
        all_pages.append(pages)
        num_tokens = len(row.tokens)
        unseen = 0 if window is None else group.first_seen(row.start) // page_size
        num_keys = row.start + num_tokens - unseen * page_size
        spans.extend(
            (
                first,
                num_tokens,
                num_keys,
                window or 0,
                (window - 1 if window else num_keys) if batch.bidirectional else 0,
                pages.buffer_info()[0] + unseen * stacks * 8,
                stacks,
            )
        )
    return GroupPlan(spans, all_pages, spans.buffer_info()[0])


def create(pool: KVPool, scale: float, num_heads: int) -> NativeBackend:
    return NativeBackend(pool, scale)
