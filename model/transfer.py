"""Copies between the host and a device that nobody waits for.

Invariant: a copy is behind whatever the device was told before, and ahead of what it is told next; what the host has downloaded may be
read when an event behind it has passed. On a CPU nothing needs to be waited for.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[tuple[float, ...]]


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """These numbers on the device. The host's copy may be changed at once: torch keeps pinned memory until it has been read."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def download(x: Tensor) -> Tensor:
    """A copy of x as it is when the device gets there."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
    return host.copy_(x, non_blocking=True)
