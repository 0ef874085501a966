"""Zeroed memory for weights, in huge pages where the system has them.

A product reads weights as a few long streams, and the processor's prefetcher stops at page ends:
with pages of 4 KiB, every 64 cache lines. Invariant: memory is never handed out twice; a chunk
lives as long as any tensor in it. It knows nothing of its contents.
"""

import mmap
from contextlib import suppress
from math import prod
from threading import Lock

import torch
from torch import Tensor

HUGE, LINE = 2**21, 64
"""Bytes of a huge page and of a cache line on the supported processors."""
CHUNK = 32 * HUGE
"""Bytes that are mapped at once. The unused rest takes no memory, except for the rest of a huge
page."""


class HugePages:
    """Allocates tensors one after another from large mappings."""

    def __init__(self) -> None:
        self._free: Tensor = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to a cache line. Raises MemoryError."""
        num_bytes = prod(shape) * dtype.itemsize
        rounded = -(-num_bytes // LINE) * LINE
        with self._lock:
            if rounded > len(self._free):
                self._free = _map(max(CHUNK, -(-rounded // HUGE) * HUGE))
            taken, self._free = self._free[:num_bytes], self._free[rounded:]
        return taken.view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for weights cannot be had") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # Linux without huge pages rejects the advice.
            mapped.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(mapped, dtype=torch.uint8)
    return numbers[-numbers.data_ptr() % HUGE :][:num_bytes]
