"""What this machine reaches at most: bytes per second of a copy and of a read, operations per
second of a matrix product.
"""

import torch

from bench.gpu.common import Part, timed
from tests.support.checks import Found

WARMING_SECONDS = 0.5
"""All shares are shares of these figures: clocks are to be as high as they get."""


def rate(amount: float, found: Found) -> Found:
    """So much a second, by the median of the rounds, and its spread."""
    least, most = found["spread"]
    return {"rate": amount / found["seconds"], "spread": [amount / most, amount / least]}


def measure(part: Part) -> None:
    num_bytes, size = (2**22, 128) if part.small else (2**30, 8192)
    a = torch.randn(num_bytes // 4, device=part.device)
    b = torch.empty_like(a)
    part.note("copy", rate(2 * num_bytes, timed(lambda: b.copy_(a), part, WARMING_SECONDS)))
    part.note("read", rate(num_bytes, timed(lambda: a.sum(), part, WARMING_SECONDS)))
    x, y = torch.randn(2, size, size, device=part.device, dtype=part.dtype)
    part.note("matmul", rate(2 * size**3, timed(lambda: x @ y, part, WARMING_SECONDS)))
