"""KVPool: the memory behind the pages. K and V are each one tensor [layer, page, slot, head_dim]: one head, so no head axis.

Invariant: bytes per token are exactly 2 * layers * head_dim * itemsize. It knows nothing of who owns a page.

Shape letters: L layers, P pages, S slots of a page, d head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPool:
    """The K and V tensors. `page_size` is S, `num_pages` is P."""

    keys_LPSd: Tensor
    values_LPSd: Tensor

    @classmethod
    def allocate(cls, num_layers: int, num_pages: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> "KVPool":
        """A zeroed pool (a slot that was never written must not hold a NaN: attention multiplies masked slots by 0)."""
        shape = (num_layers, num_pages, page_size, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @property
    def num_pages(self) -> int:
        return self.keys_LPSd.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys_LPSd.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return 2 * self.keys_LPSd.nbytes

    def clear(self, pages: list[int]) -> None:
        """Zeroes these pages in every layer."""
        self.keys_LPSd[:, pages] = 0
        self.values_LPSd[:, pages] = 0

    def write(self, layer: int, slots_T: Tensor, k_Td: Tensor, v_Td: Tensor) -> None:
        """Stores one K and one V per token at slot = page * page_size + offset."""
        self.keys_LPSd[layer].flatten(0, 1).index_copy_(0, slots_T, k_Td)
        self.values_LPSd[layer].flatten(0, 1).index_copy_(0, slots_T, v_Td)
