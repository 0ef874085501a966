"""KVPool: the memory of the pages. K and V are each one tensor [layer of the page, page, slot,
columns]: one head, so no head axis.

Where the value is the first columns of the key (latent attention), V is a view of K and takes no
memory. Invariant: a page takes `bytes_per_page` and nothing else is allocated. It knows nothing of
page ownership. A backend that does not use `write` may lay out a page's numbers in its own way.
float8_e4m3fn is stored without a scale: its range is wider than that of keys and values
(docs/why.md#fp8).

Shape letters: L layers of a page, P pages, S slots of a page, N slots of all pages, d columns of a
key, v of a value, T tokens.
"""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from cache.layout import CacheLayout

FLOAT8 = torch.float8_e4m3fn


def bytes_per_page(
    layout: CacheLayout, key_dim: int, value_dim: int, value_in_key: bool, itemsize: int
) -> int:
    """Bytes of one page."""
    return (
        layout.layers_per_page
        * layout.page_size
        * (key_dim + (0 if value_in_key else value_dim))
        * itemsize
    )


@dataclass(frozen=True, slots=True)
class KVPool:
    """The K and V tensors. `page_size` is S, `num_pages` is P."""

    layout: CacheLayout
    keys_LPSd: Tensor
    values_LPSv: Tensor
    compute_dtype: torch.dtype
    """The dtype of keys and values as they are written, and of queries; the stored dtype may be
    narrower."""
    sums_P: Tensor | None = None
    """Checksum of each page: the sum modulo 2^64 of its stored keys and values in all layers, their
    bits read as signed integers. Only the native attention kernel maintains it."""

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_pages: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        value_in_key: bool = False,
        stored_as: torch.dtype | None = None,
    ) -> "KVPool":
        """A zeroed pool for numbers of `dtype`, stored as `stored_as` if that is given. Zeroed
        because attention multiplies masked slots by 0, so a slot that was never written must not
        hold a NaN.
        """
        stored_as = stored_as or dtype
        shape = (layout.layers_per_page, num_pages, layout.page_size)
        keys_LPSd = _zeros((*shape, key_dim), stored_as, device)
        values_LPSv = keys_LPSd[..., :value_dim]
        if not value_in_key:
            values_LPSv = _zeros((*shape, value_dim), stored_as, device)
        sums_P = _zeros((num_pages,), torch.int64, device) if device.type == "cpu" else None
        return cls(layout, keys_LPSd, values_LPSv, dtype, sums_P)

    @property
    def num_pages(self) -> int:
        return self.keys_LPSd.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys_LPSd.shape[2]

    @property
    def value_in_key(self) -> bool:
        """V is a view of K."""
        return self.values_LPSv.data_ptr() == self.keys_LPSd.data_ptr()

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that take memory of their own."""
        return (self.keys_LPSd,) if self.value_in_key else (self.keys_LPSd, self.values_LPSv)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated. On a CPU the system provides each page of memory only when it is first
        written to.
        """
        return sum(x.nbytes for x in self.stored)

    def clear(self, pages: Tensor) -> None:
        """Zeroes these pages in every layer."""
        for x in self.stored:
            _whole(x).index_fill_(1, pages, 0)  # torch does not fill float8 by index.
        if self.sums_P is not None:
            self.sums_P.index_fill_(0, pages, 0)

    def parts(self, page: int) -> list[memoryview]:
        """The memory of a page in a pool on a CPU: its keys and values in each layer of the page,
        and its checksum.
        """
        assert self.sums_P is not None
        numbers = [layer[page] for x in self.stored for layer in x.view(torch.uint8).numpy()]
        return [memoryview(part) for part in (*numbers, self.sums_P.numpy()[page : page + 1])]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys_PSd, values_PSv) of a layer of the model; it uses the pages of its own stack."""
        index = self.layout.places[layer].layer
        return self.keys_LPSd[index], self.values_LPSv[index]

    def write(self, layer: int, slots_T: Tensor, k_Td: Tensor, v_Tv: Tensor) -> None:
        """Stores one K and one V per token at slot = page * page_size + offset."""
        keys_PSd, values_PSv = self.layer(layer)
        _put(keys_PSd, slots_T, k_Td)
        if not self.value_in_key:
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
    slots_Nd = pages_PSd.flatten(0, 1)
    if pages_PSd.dtype is FLOAT8:  # As bytes: torch does not copy rows of it everywhere.
        slots_Nd, x_Td = slots_Nd.view(torch.uint8), in_float8(x_Td).view(torch.uint8)
    slots_Nd.index_copy_(0, slots_T, x_Td.to(slots_Nd.dtype))


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
