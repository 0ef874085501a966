"""Attention by our own CPU kernel (model/native/attention.cpp): float32 pages are read where they lie, once for all query heads.

Keys are stored transposed within their page: [d, S]. Invariant: a token's output depends on its own sequence alone, bit for bit.

Shape letters: T tokens of the step, H query heads, d columns of a key, v of a value, S slots of a page, N rows of the step.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch, GroupBatch
from model.native import library, name_of

MULTIPLE = 16
"""What sizes of pages, keys and values must be multiples of."""


class Step(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "new_keys", "new_values", "outputs", "keys", "values", "slots", "pages", "spans")
        ),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride", "num_tokens", "num_spans")),
        *((name, ctypes.c_int64) for name in ("num_heads", "key_dim", "value_dim", "page_size")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What the layers of one group share. `spans_N6` are the kernel's Spans; the addresses are of these tensors."""

    slots_nT: Tensor
    pages: Tensor
    spans_N6: Tensor
    addresses: tuple[int, int, int]


def supports(pool: KVPool) -> bool:
    """Whether there is a kernel for this processor and these pages."""
    sizes = pool.page_size, pool.keys_LPSd.shape[-1], pool.values_LPSv.shape[-1]
    return pool.keys_LPSd.dtype == torch.float32 and all(size % MULTIPLE == 0 for size in sizes) and library() is not None


class NativeBackend:
    """Writes the step's keys and values and attends, in one call for each layer."""

    def __init__(self, pool: KVPool, scale: float) -> None:
        found = library()
        assert found is not None and supports(pool)
        self.pool, self.scale, self._library = pool, scale, found
        self._sizes = pool.keys_LPSd.shape[-1], pool.values_LPSv.shape[-1], pool.page_size
        layers = (pool.layer(layer) for layer in range(len(pool.layout.places)))
        self._addresses = [(keys.data_ptr(), None if pool.value_in_key else values.data_ptr()) for keys, values in layers]

    @property
    def name(self) -> str:
        return name_of(self._library)

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        return tuple(_plan(group) for group in batch.groups)

    def run(self, plan: tuple[GroupPlan, ...], layer: int, q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor) -> Tensor:
        assert q_THd.dtype is k_Td.dtype is v_Tv.dtype is torch.float32
        place = self.pool.layout.places[layer]
        group = plan[place.group]
        num_tokens, num_heads, key_dim = q_THd.shape
        if q_THd.stride()[1:] != (key_dim, 1):
            q_THd = q_THd.contiguous()
        k_Td, v_Tv = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_Td, v_Tv))
        o_THv = q_THd.new_empty(num_tokens, num_heads, self._sizes[1])
        slots, pages, spans = group.addresses
        step = Step(
            q_THd.data_ptr(), k_Td.data_ptr(), v_Tv.data_ptr(), o_THv.data_ptr(), *self._addresses[layer],
            slots + place.stack * num_tokens * 8, pages + place.stack * 8, spans,
            q_THd.stride(0), k_Td.stride(0), v_Tv.stride(0), num_tokens, len(group.spans_N6), num_heads, *self._sizes, self.scale,
        )  # fmt: skip
        self._library.attend(ctypes.byref(step), ctypes.c_int64(torch.get_num_threads()))
        return o_THv


def _plan(group: GroupBatch) -> GroupPlan:
    pages: list[int] = []
    spans = []
    for row in group.rows:
        spans.append((row.first, row.num_tokens, row.num_keys, row.window or 0, len(pages), group.num_stacks))
        pages += row.pages
    tensors = group.slots_nT, torch.tensor(pages), torch.tensor(spans)
    return GroupPlan(*tensors, (tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()))


def create(pool: KVPool, scale: float) -> NativeBackend:
    return NativeBackend(pool, scale)
