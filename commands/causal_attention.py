"""Attention without a cache, for training and for held-out losses: sequences of one length, each
causal within itself.

Invariant: the same function of q, k and v whichever implementation computes it, up to rounding.
Knows nothing of pages and of optimizers.

Shape letters: B sequences, T tokens of a sequence, N = B * T, H query heads, h heads of K and V as
given, k and v columns of a key and a value, R = T * H query rows of a sequence, r query rows of a
block, b tokens of a block, s keys that a block sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.layers import Rotation
from model.spec import ModelSpec

BLOCK = 128
"""Query tokens of a block. Measured on a CPU with AVX-512: 64 is as fast, 256 slower, since its
scores leave the processor's cache."""


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """`attend` without a cache: N tokens are sequences of `length`, each causal within itself and
    within the layer's window.
    """

    length: int
    spec: ModelSpec
    _shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values that later layers read, of the pass that is computed."""

    def __call__(
        self,
        layer: int,
        q_NHk: Tensor,
        k_Nk: Tensor | None,
        v_Nv: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        if rotation is not None:
            q_NHk, k_Nk = rotation.both(q_NHk, k_Nk)
        if k_Nk is None or v_Nv is None:
            k_Nk, v_Nv = self._shared[self.spec.kv_sources[layer]]
        elif self.spec.kv_sources.count(layer) > 1:
            self._shared[layer] = k_Nk, v_Nv
        window, seen_TT = self.spec.window(layer), None
        if window is not None and window < self.length:
            seen_TT = (
                torch.ones(self.length, self.length, dtype=torch.bool, device=q_NHk.device)
                .tril()
                .triu(1 - window)
            )
        elif k_Nk.ndim == 2 and q_NHk.device.type == "cpu":
            o_NHv: Tensor = OneHeadAttention.apply(
                q_NHk, k_Nk, v_Nv, self.length, self.spec.attention_scale
            )  # type: ignore[no-untyped-call]
            return o_NHv
        q_BHTk, k_BhTk, v_BhTv = (
            x.unflatten(0, (-1, self.length)).transpose(1, 2)
            for x in (q_NHk, _headed(k_Nk), _headed(v_Nv))
        )
        k_BHTk, v_BHTv = (x.expand(-1, q_BHTk.shape[1], -1, -1) for x in (k_BhTk, v_BhTv))
        o_BHTv = F.scaled_dot_product_attention(
            q_BHTk,
            k_BHTk,
            v_BHTv,
            attn_mask=seen_TT,
            is_causal=seen_TT is None,
            scale=self.spec.attention_scale,
        )
        return o_BHTv.transpose(1, 2).flatten(0, 1)


class OneHeadAttention(torch.autograd.Function):
    """Causal attention with one KV head on a CPU, block by block of query tokens.

    All query heads read the same keys, so that a block's scores are one matrix product a sequence
    over rows (token, head), in the order in which q lies in memory; PyTorch's kernel repeats K and
    V for each head. The blocks' probabilities are kept for the backward pass: N * H * T / 2 numbers
    a layer.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, q_NHk: Tensor, k_Nk: Tensor, v_Nv: Tensor, length: int, scale: float
    ) -> Tensor:
        num_heads = q_NHk.shape[1]
        q_BRk = (q_NHk * scale).view(-1, length * num_heads, q_NHk.shape[2])
        k_BTk, v_BTv = k_Nk.unflatten(0, (-1, length)), v_Nv.unflatten(0, (-1, length))
        o_BRv = q_BRk.new_empty(*q_BRk.shape[:2], v_Nv.shape[1])
        probabilities = []
        for first, end in _blocks(length):
            rows = slice(first * num_heads, end * num_heads)
            scores_Brs = q_BRk[:, rows] @ k_BTk[:, :end].mT
            future_bb = scores_Brs.new_full((end - first, end - first), -torch.inf).triu(1)
            scores_Brs[:, :, first:] += future_bb.repeat_interleave(num_heads, 0)
            probabilities.append(scores_Brs.softmax(-1))
            o_BRv[:, rows] = probabilities[-1] @ v_BTv[:, :end]
        ctx.save_for_backward(q_BRk, k_BTk, v_BTv, *probabilities)
        ctx.scale = scale
        return o_BRv.view(*q_NHk.shape[:2], -1)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BRk, k_BTk, v_BTv, *probabilities = ctx.saved_tensors
        length, (go_NHv,) = k_BTk.shape[1], gradients
        num_heads = go_NHv.shape[1]
        go_BRv = go_NHv.reshape(*q_BRk.shape[:2], -1)
        gq_BRk = torch.empty_like(q_BRk)
        # Sums over blocks, which bfloat16 would round one by one.
        gk_BTk, gv_BTv = (torch.zeros(x.shape) for x in (k_BTk, v_BTv))
        for (first, end), p_Brs in zip(_blocks(length), probabilities, strict=True):
            rows = slice(first * num_heads, end * num_heads)
            gv_BTv[:, :end] += p_Brs.mT @ go_BRv[:, rows]
            gp_Brs = go_BRv[:, rows] @ v_BTv[:, :end].mT
            gs_Brs = torch._softmax_backward_data(gp_Brs, p_Brs, -1, p_Brs.dtype)
            gq_BRk[:, rows] = gs_Brs @ k_BTk[:, :end]
            gk_BTk[:, :end] += gs_Brs.mT @ q_BRk[:, rows]
        gq_BRk *= ctx.scale
        return (
            gq_BRk.view(-1, num_heads, q_BRk.shape[2]),
            gk_BTk.flatten(0, 1).to(k_BTk),
            gv_BTv.flatten(0, 1).to(v_BTv),
            None,
            None,
        )


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """First and end token of each block of a sequence."""
    for first in range(0, length, BLOCK):
        yield first, min(first + BLOCK, length)


def _headed(x_Nd: Tensor) -> Tensor:
    """K or V with a head axis: of length 1, or what a multi-head decoder gave it."""
    return x_Nd.unsqueeze(1) if x_Nd.ndim == 2 else x_Nd
