"""The GPU: our Triton kernels, each batch-invariant, for attention, draws and products of fp8 weights, and with engine.deterministic for
all products and norms, which are else cuBLAS's and torch's; streams, graphs and memory.

Triton is imported by the modules that launch kernels, never from here.
"""

import torch
from torch import Tensor

from model.batch import Numbers

EXACT = {"enable_fp_fusion": False}
"""Option of every launch: products and sums become one instruction where a kernel says so, not where the compiler chooses to."""


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A non-blocking copy on the device. torch keeps the pinned memory until it has been read."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
