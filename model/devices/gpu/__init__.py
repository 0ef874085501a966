"""The GPU: our Triton kernels for attention, norms, gates, draws and products of quantized weights; with engine.deterministic
batch-invariant ones for attention and for all products, which are else cuBLAS's; streams, graphs and memory.

Triton is imported by the modules that launch kernels, never from here.
"""

import torch
from torch import Tensor

from model.batch import Numbers

EXACT = {"enable_fp_fusion": False}
"""Option of every launch: products and sums become one instruction where a kernel says so, not where the compiler chooses to."""


DEPENDENT_LAUNCHES = False
"""Whether kernels of small steps begin while the launch before them ends (programmatic dependent launch), and products of 2 to 32 rows are
ours, which gain by that alone. Off until `bench.gpu --only check` has passed with it on a GPU: no interpreter runs it.
"""
DEPENDENT_CAPABILITY = 9, 0


def dependent(device: torch.device) -> dict[str, bool]:
    """Options of a launch of a kernel that waits itself, in each of its programs, for the launch before it."""
    if not DEPENDENT_LAUNCHES or device.type != "cuda" or torch.cuda.get_device_capability(device) < DEPENDENT_CAPABILITY:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A non-blocking copy on the device. torch keeps the pinned memory until it has been read."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
