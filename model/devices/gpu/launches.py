"""The kernels' launches, as functions of tensors. Where torch's device is a CPU they run under Triton's interpreter or not at all.

Invariant: one shape of weights has one compiled kernel, whatever rows come. Triton compiles another one for an address that is no multiple
of 16, and its sums may go in another order; so rows that do not begin at one are copied to where they do.

Shape letters: T rows, G groups, I input and O output columns, S rows of logits, V vocabulary.
"""

from functools import cache

import torch
from torch import Tensor

from model.devices.gpu import EXACT
from model.devices.gpu.products import product
from model.devices.gpu.rows import normalise, summarise
from model.devices.gpu.tiles import choose

ADDRESS_MULTIPLE = 16
PROGRAMS_PER_PROCESSOR = 2
"""One computes while the other begins a tile."""
INTERPRETED_PROGRAMS = 3
SUMMARY_BLOCK = 4096


def multiply(
    x_TGI: Tensor,
    weight_GOI: Tensor,
    bias_O: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    *,
    scale_O: Tensor | None = None,
) -> Tensor:
    """activation(x W^T * scale + b) of every group; gated, of the first half of W's rows, times what the second half gives. -> y_TGO"""
    num_rows, num_groups, num_inputs = x_TGI.shape
    num_outputs = weight_GOI.shape[1] // 2 if gated else weight_GOI.shape[1]
    x_TGI = _in_place(x_TGI)
    y_TGO = x_TGI.new_empty(num_rows, num_groups, num_outputs)
    if not num_rows:
        return y_TGO
    tile = choose(num_outputs, x_TGI.element_size())
    num_tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.columns)
    # The interpreter multiplies bfloat16's bit patterns as if they were integers.
    upcast = x_TGI.device.type == "cpu" and x_TGI.dtype is torch.bfloat16
    product[(min(num_tiles, _num_programs(x_TGI.device)), num_groups)](
        x_TGI, weight_GOI, scale_O, bias_O, y_TGO, num_rows,
        num_groups, num_inputs, num_outputs, *weight_GOI.stride(), activation, gated, upcast,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    return y_TGO


def multiply_float8(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As devices/quantization.float8_product, converting as it reads."""
    return multiply(x_TI[:, None], weight_OI[None], bias_O, scale_O=scale_O)[:, 0]


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, epsilon: float, offset: float, *, centred: bool) -> Tensor:
    """LayerNorm (centred) or RMSNorm of the last axis, whose weights are those given and `offset`."""
    x = _in_place(x)
    y, columns = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    if x.numel():
        block = 1 << (columns - 1).bit_length()
        rows = x.numel() // columns
        normalise[(rows,)](x, weight_D, bias_D, y, epsilon, offset, columns, block, centred, num_warps=_warps(block), **EXACT)
    return y


def summary(logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normaliser_S, largest_S, tokens_S) of logits in float32, as model.sampling has them."""
    assert logits_SV.dtype is torch.float32
    logits_SV = _in_place(logits_SV)
    normaliser_S, largest_S = (logits_SV.new_empty(len(logits_SV)) for _ in range(2))  # Each at an address of its own: see above.
    tokens_S = torch.empty(len(logits_SV), dtype=torch.long, device=logits_SV.device)
    columns = logits_SV.shape[1]
    if len(logits_SV):
        block = min(SUMMARY_BLOCK, 1 << (columns - 1).bit_length())
        summarise[(len(logits_SV),)](logits_SV, normaliser_S, largest_S, tokens_S, columns, block, num_warps=_warps(block), **EXACT)
    return normaliser_S, largest_S, tokens_S


def softmax(x_TE: Tensor) -> Tensor:
    """Of each row."""
    return (x_TE - summary(x_TE)[0][:, None]).exp()


def _warps(block: int) -> int:
    return 8 if block > 2048 else 4


def _in_place(x: Tensor) -> Tensor:
    """x with its rows end to end, from a multiple of 16 on."""
    x = x.contiguous()
    return x if x.data_ptr() % ADDRESS_MULTIPLE == 0 else x.clone(memory_format=torch.contiguous_format)


@cache
def _num_programs(device: torch.device) -> int:
    """As many as keep the device busy. Which of them computes a tile changes nothing in it."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
