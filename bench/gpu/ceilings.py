"""What this machine reaches at most: bytes per second of a copy and of a read, operations per second of a matrix product."""

import torch

from bench.gpu.common import Part, median_seconds

WARMING_SECONDS = 0.5
"""All shares are shares of these figures: clocks are to be as high as they get."""


def measure(part: Part) -> None:
    num_bytes, size, repeats = (2**22, 128, 5) if part.small else (2**30, 8192, 20)
    a = torch.randn(num_bytes // 4, device=part.device)
    b = torch.empty_like(a)
    part.note("copy", 2 * num_bytes / median_seconds(lambda: b.copy_(a), part.device, repeats, WARMING_SECONDS))
    part.note("read", num_bytes / median_seconds(lambda: a.sum(), part.device, repeats, WARMING_SECONDS))
    x, y = torch.randn(2, size, size, device=part.device, dtype=part.dtype)
    part.note("matmul", 2 * size**3 / median_seconds(lambda: x @ y, part.device, repeats, WARMING_SECONDS))
