"""Launches of the kernels besides attention, as functions of tensors. CPU tensors work under
Triton's interpreter only.

Invariant: weights of one shape use one compiled kernel for any rows. Triton compiles another
kernel, which may sum in another order, for an address that is no multiple of 16; rows at such an
address are copied first.

Shape letters: T tokens or rows, O output columns, D columns of a norm, H query heads, d columns of
a head, F intermediate size, E twice that, S rows of logits, V vocabulary, N settings of a
draw.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.devices.gpu import EXACT
from model.devices.gpu import rows as kernels
from model.devices.gpu.drawing import KernelDraws
from model.devices.gpu.products import join
from model.draw_words import NUM_SETTINGS
from model.layers import Branch

ADDRESS_MULTIPLE = 16
JOINED_AT_ONCE = 1024
GATE_BLOCK = 1024


def join_parts(sums: Tensor, bias_O: Tensor | None, y: Tensor, activation: str = "none") -> None:
    """Adds the sums [parts, T, O] of a product's parts in their order, and makes y [T, O] of
    them.
    """
    parts, _, num_outputs = sums.shape
    grid = (-(-y.numel() // JOINED_AT_ONCE),)
    join[grid](sums, bias_O, y, y.numel(), num_outputs, parts, activation, JOINED_AT_ONCE, **EXACT)


def norm(x: Tensor, module: Any) -> Tensor:
    """What a GpuNorm computes: LayerNorm (centred) or RMSNorm of the last axis, with weights to
    which its offset is added.
    """
    x = in_place(x)
    y, columns = torch.empty_like(x), x.shape[-1]
    if x.numel():
        kernels.add_norm[(x.numel() // columns,)](
            x, None, None, None, None, None, y, module.weight, module.bias, 1.0, module.epsilon,
            module.offset, columns, CENTRED=module.centred,
            **_block(columns),
        )  # fmt: skip
    return y


def add_norm(
    x_TD: Tensor, branches: Sequence[Branch], scale: float, next_norm: Any
) -> tuple[Tensor, Tensor]:
    """model.layers.add_norm in one launch, for GpuNorms of one kind; a second branch is normalised
    in a launch of its own.
    """
    (branch_TD, branch_norm), *others = branches
    weight_D, bias_D = (
        (None, None) if branch_norm is None else (branch_norm.weight, branch_norm.bias)
    )
    x_TD, branch_TD = in_place(x_TD), in_place(branch_TD)
    others_TD: list[Tensor | None] = [
        in_place(y_TD if norm is None else norm(y_TD)) for y_TD, norm in others
    ] or [None]
    sum_TD, y_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    if x_TD.numel():
        kernels.add_norm[(len(x_TD),)](
            x_TD, branch_TD, weight_D, bias_D, *others_TD, sum_TD, y_TD, next_norm.weight,
            next_norm.bias, scale,
            next_norm.epsilon, next_norm.offset, x_TD.shape[1], CENTRED=next_norm.centred,
            **_block(x_TD.shape[1]),
        )  # fmt: skip
    return sum_TD, y_TD


def norm_heads(
    q_THd: Tensor, k_Td: Tensor | None, query_norm: Any, key_norm: Any
) -> tuple[Tensor, Tensor | None]:
    """model.attention.norm_heads in one launch, for columns of one matrix and GpuNorms of one
    kind.
    """
    if k_Td is None:
        return query_norm(q_THd), None
    num_tokens, num_heads, columns = q_THd.shape
    y_THd = q_THd.new_empty(num_tokens, num_heads + 1, columns)
    if num_tokens:
        # The stride of a single query may be another number.
        kernels.norm_heads[(num_tokens, num_heads + 1)](
            q_THd, k_Td, query_norm.weight, query_norm.bias, key_norm.weight, key_norm.bias, y_THd,
            k_Td.stride(0), query_norm.epsilon,
            query_norm.offset, columns, CENTRED=query_norm.centred,
            **_block(columns) | {"num_warps": 1},
        )  # fmt: skip
    return y_THd[:, :num_heads], y_THd[:, num_heads]


def gate(x_TE: Tensor, activation: str) -> Tensor:
    """activation(first half of the columns) * second half, rounded once. -> y_TF"""
    x_TE, columns = in_place(x_TE), x_TE.shape[1] // 2
    y_TF = x_TE.new_empty(len(x_TE), columns)
    if y_TF.numel():
        kernels.gate[(len(x_TE), -(-columns // GATE_BLOCK))](
            x_TE, y_TF, columns, GATE_BLOCK, activation, **EXACT
        )
    return y_TF


def summary(logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normaliser_S, largest_S, tokens_S), see Device.summary: what a greedy draw tells."""
    (num_rows, num_tokens), place = logits_SV.shape, logits_SV.device
    draws = KernelDraws(num_rows, num_tokens, place)
    if num_rows:
        settings_SN = torch.zeros(num_rows, NUM_SETTINGS, dtype=torch.int32, device=place)
        draws.draw(in_place(logits_SV), settings_SN, None)
    numbers_SR = draws.results_SR.view(torch.float32)
    return numbers_SR[:, 2], numbers_SR[:, 3], draws.results_SR[:, 0].long()


def softmax(x_TE: Tensor) -> Tensor:
    """The softmax of each row."""
    return (x_TE - summary(x_TE)[0][:, None]).exp()


def _block(columns: int) -> dict[str, Any]:
    """Options of a kernel with one program for each row of so many columns."""
    block = 1 << (columns - 1).bit_length()
    return {"BLOCK": block, "num_warps": 8 if block > 2048 else 4, **EXACT}


def in_place(x: Tensor) -> Tensor:
    """x in contiguous memory at an address that is a multiple of 16."""
    x = x.contiguous()
    return x if x.data_ptr() % ADDRESS_MULTIPLE == 0 else x.clone()
