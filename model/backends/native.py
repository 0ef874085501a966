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
        *((name, ctypes.c_void_p) for name in ("queries", "outputs", "keys", "values", "pages")),
        *((name, ctypes.c_int64) for name in ("query_stride", "num_heads", "key_dim", "value_dim", "page_size")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What the layers of one group share. `spans_N6` are the kernel's Spans."""

    slots_sT: Tensor
    pages: Tensor
    spans_N6: Tensor


def supports(pool: KVPool) -> bool:
    """Whether there is a kernel for this processor and these pages."""
    sizes = pool.page_size, pool.keys_LPSd.shape[-1], pool.values_LPSv.shape[-1]
    fits = pool.keys_LPSd.dtype == torch.float32 and not pool.value_in_key and all(size % MULTIPLE == 0 for size in sizes)
    return fits and library() is not None


class NativeBackend:
    """Writes the step's keys and values, then attends."""

    def __init__(self, pool: KVPool, scale: float) -> None:
        found = library()
        assert found is not None and supports(pool)
        self.pool, self.scale, self._library = pool, scale, found

    @property
    def name(self) -> str:
        return name_of(self._library)

    def plan(self, batch: Batch) -> tuple[GroupPlan, ...]:
        return tuple(_plan(group) for group in batch.groups)

    def run(self, plan: tuple[GroupPlan, ...], layer: int, q_THd: Tensor, k_Td: Tensor, v_Tv: Tensor) -> Tensor:
        assert q_THd.dtype is k_Td.dtype is v_Tv.dtype is torch.float32
        place = self.pool.layout.places[layer]
        group = plan[place.group]
        keys_PSd, values_PSv = self.pool.layer(layer)
        num_tokens, num_heads, key_dim = q_THd.shape
        value_dim, page_size = v_Tv.shape[-1], self.pool.page_size
        q_THd, k_Td, v_Tv = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (q_THd.flatten(1).unflatten(1, (num_heads, -1)), k_Td, v_Tv)
        )
        slots_T = group.slots_sT[place.stack]
        self._library.write_kv(
            *(ctypes.c_void_p(x.data_ptr()) for x in (keys_PSd, values_PSv, k_Td, v_Tv)),
            *(ctypes.c_int64(x) for x in (k_Td.stride(0), v_Tv.stride(0))),
            ctypes.c_void_p(slots_T.data_ptr()),
            *(ctypes.c_int64(x) for x in (num_tokens, key_dim, value_dim, page_size)),
        )
        o_THv = q_THd.new_empty(num_tokens, num_heads, value_dim)
        pages = group.pages[place.stack :]
        step = Step(
            *(x.data_ptr() for x in (q_THd, o_THv, keys_PSd, values_PSv, pages)),
            q_THd.stride(0), num_heads, key_dim, value_dim, page_size, self.scale,
        )  # fmt: skip
        spans = ctypes.c_void_p(group.spans_N6.data_ptr())
        self._library.attend(ctypes.byref(step), spans, ctypes.c_int64(len(group.spans_N6)), ctypes.c_int64(torch.get_num_threads()))
        return o_THv


def _plan(group: GroupBatch) -> GroupPlan:
    pages: list[int] = []
    spans = []
    for row in group.rows:
        spans.append((row.first, row.num_tokens, row.num_keys, row.window or 0, len(pages), group.num_stacks))
        pages += row.pages
    return GroupPlan(group.slots_nT, torch.tensor(pages), torch.tensor(spans))


def create(pool: KVPool, scale: float) -> NativeBackend:
    return NativeBackend(pool, scale)
