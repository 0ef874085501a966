"""KVPool: the memory of the pages, [page, numbers]: one layer after another, and of each layer the
keys [slot, columns], then the values.

There is one key/value head, so no head axis. Where the value is the first columns of the key
(latent attention), V is a view of K and takes no memory. Groups of layers with other columns divide
the same page otherwise. Invariant: a page takes `bytes_per_page` and nothing else is allocated. It
knows nothing of page ownership. A backend that does not use `write` may lay out keys and values
within their memory in its own way. float8_e4m3fn is stored without a scale: its range is wider than
that of keys and values (docs/why.md#fp8).

Shape letters: P pages, N numbers of a page, S slots of a page, d columns of a key, v of a value, T
tokens.
"""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from cache.layout import CacheLayout, Columns

FLOAT8 = torch.float8_e4m3fn


def bytes_per_page(layout: CacheLayout, itemsize: int) -> int:
    """Bytes of one page."""
    return layout.page_size * layout.token_numbers * itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """The pages. `page_size` is S, `num_pages` is P."""

    layout: CacheLayout
    numbers_PN: Tensor
    compute_dtype: torch.dtype
    """The dtype of keys and values as they are written, and of queries; the stored dtype may be
    narrower."""
    sums_P: Tensor | None = None
    """Checksum of each page: the sum modulo 2^64 of its stored numbers, their bits read as signed
    integers. Only the native attention kernel maintains it."""

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored_as: torch.dtype | None = None,
    ) -> "KVPool":
        """A zeroed pool for numbers of `dtype`, stored as `stored_as` if that is given. Zeroed
        because attention multiplies masked slots by 0, so a slot that was never written must not
        hold a NaN.
        """
        shape = (num_pages, layout.page_size * layout.token_numbers)
        sums_P = _zeros((num_pages,), torch.int64, device) if device.type == "cpu" else None
        return cls(layout, _zeros(shape, stored_as or dtype, device), dtype, sums_P)

    @property
    def dtype(self) -> torch.dtype:
        """What numbers are stored as."""
        return self.numbers_PN.dtype

    @property
    def num_pages(self) -> int:
        return self.numbers_PN.shape[0]

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes allocated. On a CPU the system provides each page of memory only when it is first
        written to.
        """
        return self.numbers_PN.nbytes

    def columns(self, layer: int) -> Columns:
        """Columns of a key and a value in this layer of the model."""
        return self.layout.groups[self.layout.places[layer].group].columns

    def clear(self, pages: Tensor) -> None:
        """Zeroes these pages."""
        _whole(self.numbers_PN).index_fill_(0, pages, 0)  # torch does not fill float8 by index.
        if self.sums_P is not None:
            self.sums_P.index_fill_(0, pages, 0)

    def parts(self, page: int) -> list[memoryview]:
        """The memory of a page in a pool on a CPU: its numbers and its checksum."""
        assert self.sums_P is not None
        held = self.numbers_PN[page].view(torch.uint8), self.sums_P[page : page + 1]
        return [memoryview(cast(Any, x.numpy())) for x in held]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys_PSd, values_PSv) of a layer of the model, views of the pages; it uses those of its
        own stack.
        """
        columns, size = self.columns(layer), self.page_size
        first = self.layout.places[layer].layer * size * columns.stored
        keys_PN = self.numbers_PN[:, first : first + size * columns.key]
        keys_PSd = keys_PN.unflatten(1, (size, columns.key))
        if columns.value_in_key:
            return keys_PSd, keys_PSd[..., : columns.value]
        values_PN = self.numbers_PN[:, first + size * columns.key : first + size * columns.stored]
        return keys_PSd, values_PN.unflatten(1, (size, columns.value))

    def write(self, layer: int, slots_T: Tensor, k_Td: Tensor, v_Tv: Tensor) -> None:
        """Stores one K and one V per token at slot = page * page_size + offset."""
        keys_PSd, values_PSv = self.layer(layer)
        _put(keys_PSd, slots_T, k_Td)
        if not self.columns(layer).value_in_key:
            _put(values_PSv, slots_T, v_Tv)


def _whole(x: Tensor) -> Tensor:
    """The bits of numbers, as whole numbers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def in_float8(x: Tensor) -> Tensor:
    """x in float8_e4m3fn: saturated at its largest number, but infinities become NaN, so that a
    numerical error stays visible.
    """
    largest = torch.finfo(FLOAT8).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan).to(FLOAT8)


def _put(pages_PSd: Tensor, slots_T: Tensor, x_Td: Tensor) -> None:
    if pages_PSd.dtype is FLOAT8:  # As bytes: torch does not copy rows of it everywhere.
        pages_PSd, x_Td = pages_PSd.view(torch.uint8), in_float8(x_Td).view(torch.uint8)
    size = pages_PSd.shape[1]
    pages_PSd[slots_T // size, slots_T % size] = x_Td.to(pages_PSd.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU in memory that is provided when first written to, and that forks of this
    process share; torch.zeros would write, and so take, all of it at once.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = prod(shape) * dtype.itemsize
    try:
        shared = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had") from error
    with suppress(OSError, AttributeError):  # Where the system has huge pages for shared memory.
        shared.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(shared, dtype=torch.uint8).view(dtype).view(shape)
