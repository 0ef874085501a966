"""The GPU: our Triton kernels for attention, norms, gates, draws and products of quantized weights;
other products by cuBLAS, in slabs of one size with engine.deterministic, which makes all of it
batch-invariant; streams, graphs and memory.

Triton is imported by the modules that launch kernels, never from here.
"""

import torch
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
"""Option of every launch: products and sums become one instruction where a kernel says so, not
where the compiler chooses to."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A non-blocking copy on the device. torch keeps the pinned memory until it has been read."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
