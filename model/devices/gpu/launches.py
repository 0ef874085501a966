"""Launches of the kernels besides attention, as functions of tensors. CPU tensors work under Triton's interpreter only.

Invariant: weights of one shape use one compiled kernel for any rows. Triton compiles another kernel, which may sum in another order, for
an address that is no multiple of 16; rows at such an address are copied first.

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
"""One computes while the other loads its next tile."""
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
    """activation(x W^T * scale + b) of every group; gated, activation(first half of the outputs) * second half. -> y_TGO"""
    num_rows, num_groups, num_inputs = x_TGI.shape
    num_outputs = weight_GOI.shape[1] // 2 if gated else weight_GOI.shape[1]
    x_TGI = _in_place(x_TGI)
    y_TGO = x_TGI.new_empty(num_rows, num_groups, num_outputs)
    if not num_rows:
        return y_TGO
    tile = choose(num_outputs, x_TGI.element_size())
    num_tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.columns)
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
    upcast = x_TGI.device.type == "cpu" and x_TGI.dtype is torch.bfloat16
    product[(min(num_tiles, _num_programs(x_TGI.device)), num_groups)](
        x_TGI, weight_GOI, scale_O, bias_O, y_TGO, num_rows,
        num_groups, num_inputs, num_outputs, *weight_GOI.stride(), activation, gated, upcast,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    return y_TGO


def multiply_float8(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """devices.quantization.float8_product by our kernel, which converts weights as it reads them."""
    return multiply(x_TI[:, None], weight_OI[None], bias_O, scale_O=scale_O)[:, 0]


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, epsilon: float, offset: float, *, centred: bool) -> Tensor:
    """LayerNorm (centred) or RMSNorm of the last axis, with weights weight_D + offset."""
    x = _in_place(x)
    y, columns = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    if x.numel():
        block = 1 << (columns - 1).bit_length()
        rows = x.numel() // columns
        normalise[(rows,)](x, weight_D, bias_D, y, epsilon, offset, columns, block, centred, num_warps=_warps(block), **EXACT)
    return y


def summary(logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normaliser_S, largest_S, tokens_S) of float32 logits, see Device.summary."""
    assert logits_SV.dtype is torch.float32
    logits_SV = _in_place(logits_SV)
    # Two allocations, so that both addresses are aligned.
    normaliser_S, largest_S = (logits_SV.new_empty(len(logits_SV)) for _ in range(2))
    tokens_S = torch.empty(len(logits_SV), dtype=torch.long, device=logits_SV.device)
    columns = logits_SV.shape[1]
    if len(logits_SV):
        block = min(SUMMARY_BLOCK, 1 << (columns - 1).bit_length())
        summarise[(len(logits_SV),)](logits_SV, normaliser_S, largest_S, tokens_S, columns, block, num_warps=_warps(block), **EXACT)
    return normaliser_S, largest_S, tokens_S


def softmax(x_TE: Tensor) -> Tensor:
    """The softmax of each row."""
    return (x_TE - summary(x_TE)[0][:, None]).exp()


def _warps(block: int) -> int:
    return 8 if block > 2048 else 4


def _in_place(x: Tensor) -> Tensor:
    """x in contiguous memory at an address that is a multiple of 16."""
    x = x.contiguous()
    return x if x.data_ptr() % ADDRESS_MULTIPLE == 0 else x.clone(memory_format=torch.contiguous_format)


@cache
def _num_programs(device: torch.device) -> int:
    """Enough programs to occupy the device. Their number does not affect results."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
