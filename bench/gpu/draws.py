"""Whether tokens are drawn right on this device: the kernels of model/devices/gpu/draw.py at
published vocabularies, beside numpy's float64 and torch's operations on a CPU.

A check that fails is recorded, and the others run.
"""

from functools import partial

import torch

from bench.gpu.common import Part, at_once
from model.devices.gpu.device import GpuDevice
from tests.support.draw_cases import check_adjusted, check_filters, check_plain

VOCABULARIES, SMALL_VOCABULARIES = (49_152, 262_144), (2_050,)
PLAIN_ROWS, FILTERED_ROWS = 64, 20


def check(part: Part, num_tokens: int) -> None:
    """The draws of one vocabulary."""
    device = GpuDevice(part.device)
    for dtype in (torch.bfloat16, torch.float32):
        name = f"plain {str(dtype).removeprefix('torch.')}/{num_tokens}"
        with part.guarded(name):
            check_plain(device, 14 if part.small else PLAIN_ROWS, num_tokens, dtype)
            part.note(name, {"right": True})
    with part.guarded(f"filters/{num_tokens}"):
        check_filters(device, 10 if part.small else FILTERED_ROWS, num_tokens)
        part.note(f"filters/{num_tokens}", {"right": True})
    with part.guarded(f"adjusted/{num_tokens}"):
        check_adjusted(device, num_tokens)
        part.note(f"adjusted/{num_tokens}", {"right": True})


def measure(part: Part) -> None:
    vocabularies = SMALL_VOCABULARIES if part.small else VOCABULARIES
    at_once(part, [partial(check, num_tokens=number) for number in vocabularies])
