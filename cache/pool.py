"""KVPool: the memory behind the pages. K and V are each one tensor [layer of the page, page, slot, columns]: one head, so no head axis.

Where the value is the beginning of the key (latent attention), V is a view of K and takes no memory. Invariant: a page takes
`bytes_per_page` and nothing else is allocated. It knows nothing of who owns a page. A backend that does not `write` may order the numbers
within a page as it likes.

Shape letters: L layers of a page, P pages, S slots of a page, d columns of a key, v of a value.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from cache.layout import CacheLayout


def bytes_per_page(layout: CacheLayout, key_dim: int, value_dim: int, value_in_key: bool, itemsize: int) -> int:
    """Bytes of one page."""
    return layout.layers_per_page * layout.page_size * (key_dim + (0 if value_in_key else value_dim)) * itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """The K and V tensors. `page_size` is S, `num_pages` is P."""

    layout: CacheLayout
    keys_LPSd: Tensor
    values_LPSv: Tensor

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
    ) -> "KVPool":
        """A zeroed pool (a slot that was never written must not hold a NaN: attention multiplies masked slots by 0)."""
        shape = (layout.layers_per_page, num_pages, layout.page_size)
        keys_LPSd = _zeros((*shape, key_dim), dtype, device)
        if value_in_key:
            return cls(layout, keys_LPSd, keys_LPSd[..., :value_dim])
        return cls(layout, keys_LPSd, _zeros((*shape, value_dim), dtype, device))

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
    def num_bytes(self) -> int:
        """Bytes of all that is allocated; on a CPU they are taken from memory page by page, when they are first written to."""
        return self.keys_LPSd.nbytes + (0 if self.value_in_key else self.values_LPSv.nbytes)

    def clear(self, pages: list[int]) -> None:
        """Zeroes these pages in every layer."""
        self.keys_LPSd[:, pages] = 0
        self.values_LPSv[:, pages] = 0

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys_PSd, values_PSv) of a layer of the model, of which its stack's pages are its own."""
        index = self.layout.places[layer].layer
        return self.keys_LPSd[index], self.values_LPSv[index]

    def write(self, layer: int, slots_T: Tensor, k_Td: Tensor, v_Tv: Tensor) -> None:
        """Stores one K and one V per token at slot = page * page_size + offset."""
        keys_PSd, values_PSv = self.layer(layer)
        keys_PSd.flatten(0, 1).index_copy_(0, slots_T, k_Td)
        if not self.value_in_key:
            values_PSv.flatten(0, 1).index_copy_(0, slots_T, v_Tv)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is there when it is first written to: torch writes its zeros, and a pool would take all of its room at once."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    except (MemoryError, ValueError) as error:  # numpy's ways of saying that it is too much.
        raise MemoryError(f"{prod(shape) * dtype.itemsize} bytes cannot be had") from error
