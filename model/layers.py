"""The layers of a decoder other than attention. Pure functions of their input; they know nothing of
sequences and caches.

Shape letters: T tokens of the step, D hidden size, F intermediate size, V vocabulary, E experts, k
chosen experts, g groups of experts, h heads (1 for the key), d rotated columns, r = d / 2 pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.spec import Experts, ModelSpec, Rotary

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Linear(nn.Linear):
    """x W^T + b."""

    def reset_parameters(self) -> None:
        # On the meta device there is nothing to fill, and trying takes most of the time to build a
        # decoder.
        if not self.weight.is_meta:
            super().reset_parameters()


class Router(Linear):
    """A linear layer in float32, whatever dtype its weights are stored in: rounding could change
    which experts are chosen.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class MLP(nn.Module):
    """x_TD -> activation(x W_up + b) W_down + b. If gated, `up` is two matrices stacked: the gate's
    rows, then the rows whose product the activated gate multiplies.
    """

    def __init__(self, spec: ModelSpec, size: int) -> None:
        super().__init__()
        self.up = Linear(spec.hidden_size, 2 * size if spec.gated_mlp else size, bias=spec.mlp_bias)
        self.down = Linear(size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = spec.activation
        self.gated = spec.gated_mlp
        self.between: Callable[[Tensor], Tensor] | None = self._activated
        """The activation; None if `up` applies it itself, as some devices' modules do."""

    def forward(self, x_TD: Tensor, factor_TF: Tensor | None = None) -> Tensor:
        """x_TD -> y_TD. `factor_TF` multiplies what the activation gives."""
        hidden_TF = self.up(x_TD)
        hidden_TF = hidden_TF if self.between is None else self.between(hidden_TF)
        if factor_TF is not None:
            hidden_TF = torch.mul(hidden_TF, factor_TF)
        y_TD: Tensor = self.down(hidden_TF)
        return y_TD

    def _activated(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return ACTIVATIONS[self.activation](gate) * up
        return ACTIVATIONS[self.activation](x)


class MixtureOfExperts(nn.Module):
    """Each token passes the experts that the router chooses for it, weighted, and the shared MLP
    (DeepSeekMoE).
    """

    def __init__(self, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.options = experts
        self.router = Router(spec.hidden_size, experts.num_experts, bias=False)
        self.choice_bias = (
            nn.Parameter(torch.empty(experts.num_experts)) if experts.scoring == "sigmoid" else None
        )
        self.experts = nn.ModuleList(
            MLP(spec, experts.intermediate_size) for _ in range(experts.num_experts)
        )
        self.shared = (
            MLP(spec, experts.shared_intermediate_size)
            if experts.shared_intermediate_size
            else None
        )
        self.softmax: Callable[[Tensor], Tensor] = _softmax

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_Tk, chosen_Tk = self.route(x_TD)
        y_TD = torch.zeros_like(x_TD) if self.shared is None else self.shared(x_TD)
        for number in chosen_Tk.unique().tolist():
            token_n, place_n = torch.where(chosen_Tk == number)
            y_nD = self.experts[number](x_TD[token_n]) * weights_Tk[token_n, place_n, None]
            y_TD[token_n] += y_nD.to(
                y_TD.dtype
                # Each token occurs once per expert: no sum depends on an order that the device
                # chooses.
            )
        return y_TD

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of each token's experts. A group is ranked by its best expert or,
        with a choice bias, its best two.
        """
        options = self.options
        logits_TE = self.router(x_TD)
        scores_TE = self.softmax(logits_TE) if self.choice_bias is None else _sigmoid(logits_TE)
        choice_TE = scores_TE if self.choice_bias is None else scores_TE + self.choice_bias.float()
        if options.num_groups > 1:
            grouped_Tge = choice_TE.unflatten(-1, (options.num_groups, -1))
            best_Tg = grouped_Tge.topk(1 if self.choice_bias is None else 2, dim=-1).values.sum(
                dim=-1
            )
            groups_Tc = _largest(best_Tg, options.num_chosen_groups)
            hidden_Tg = torch.ones_like(best_Tg, dtype=torch.bool).scatter(-1, groups_Tc, False)
            choice_TE = grouped_Tge.masked_fill(hidden_Tg[..., None], -torch.inf).flatten(-2)
        chosen_Tk = _largest(choice_TE, options.num_chosen)
        weights_Tk = scores_TE.gather(-1, chosen_Tk)
        if options.normalised:
            # In a fixed order: how torch sums a row may depend on the number of rows.
            weights_Tk = weights_Tk / (
                reduce(torch.add, weights_Tk.unbind(dim=-1))[:, None] + 1e-20
            )
        return weights_Tk * options.scale, chosen_Tk


def _largest(x_TE: Tensor, count: int) -> Tensor:
    """Indices of each row's largest numbers; of equal ones the first, where torch.topk leaves the
    choice to the device.
    """
    return x_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _softmax(x: Tensor) -> Tensor:
    """In float64, where differences of processors almost never show in the float32 result."""
    return x.softmax(-1, torch.float64).float()


def _sigmoid(x: Tensor) -> Tensor:
    """Instead of torch.sigmoid, which computes the last numbers of a tensor differently: a token's
    score would depend on its place. In float64, as _softmax.
    """
    return (1.0 / (1.0 + (-x.double()).exp())).float()


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with the attributes of RMSNorm."""

    centred, offset = True, 0.0

    @property
    def epsilon(self) -> float:
        return self.eps


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset), in float32 (Zhang and Sennrich 2019, arXiv
    1910.07467).
    """

    centred, bias = False, None

    def __init__(
        self, size: int, epsilon: float, offset: float = 0.0, weighted: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset)) if weighted else None
        self.size, self.epsilon, self.offset = size, epsilon, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float() + self.offset
        return F.rms_norm(x.float(), (self.size,), weight, self.epsilon).to(x.dtype)


def norm(spec: ModelSpec, size: int | None = None) -> nn.Module:
    """The normalisation of this spec, over D unless told otherwise."""
    size = size or spec.hidden_size
    if spec.norm == "rms_norm":
        return RMSNorm(size, spec.norm_epsilon, spec.norm_offset)
    return LayerNorm(size, eps=spec.norm_epsilon)


Branch = tuple[Tensor, Any]
"""The output of attention or an MLP, and the norm of it, if there is one."""


def add(x_TD: Tensor, branch: Branch, scale: float) -> Tensor:
    """Adds a scaled branch to the residual stream."""
    branch_TD, branch_norm = branch
    return torch.add(
        x_TD, branch_TD if branch_norm is None else branch_norm(branch_TD), alpha=scale
    )


def add_norm(
    x_TD: Tensor, branches: Sequence[Branch], scale: float, next_norm: nn.Module
) -> tuple[Tensor, Tensor]:
    """Adds scaled branches to the residual stream, one after another. -> the stream, and its
    `next_norm`
    """
    for branch in branches:
        x_TD = add(x_TD, branch, scale)
    return x_TD, next_norm(x_TD)


class Embedding(nn.Embedding):
    """An embedding table."""

    def reset_parameters(self) -> None:
        # On the meta device there is nothing to fill, and trying imports torch's compiler: 1.4 s
        # and 150 MB.
        if not self.weight.is_meta:
            super().reset_parameters()

    def logits(self, x_SD: Tensor) -> Tensor:
        """The output head of a tied model. x_SD -> logits_SV"""
        return F.linear(x_SD, self.weight)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a step's tokens: cosine and sine for each token and pair of
    columns.
    """

    cosine_Tr: Tensor
    sine_Tr: Tensor
    interleaved: bool

    def __call__(self, x_Thd: Tensor) -> Tensor:
        """Rotates pair i of each head's columns. Interleaved pairs come out as halves, which leaves
        every dot product the same.
        """
        cosine_T1r, sine_T1r = self.cosine_Tr[:, None], self.sine_Tr[:, None]
        a_Thr, b_Thr = (
            (x_Thd[..., 0::2], x_Thd[..., 1::2]) if self.interleaved else x_Thd.chunk(2, dim=-1)
        )
        return torch.cat(
            [a_Thr * cosine_T1r - b_Thr * sine_T1r, b_Thr * cosine_T1r + a_Thr * sine_T1r], dim=-1
        )

    def of(self, rows_K: Tensor) -> "Rotation":
        """Of these tokens."""
        return Rotation(self.cosine_Tr[rows_K], self.sine_Tr[rows_K], self.interleaved)

    def both(self, q_Thd: Tensor, k_Td: Tensor | None) -> tuple[Tensor, Any]:
        """Rotates queries and the one key, if there is one, for backends that do not fuse this. ->
        q_Thd, k_Td
        """
        return self(q_Thd), None if k_Td is None else self(k_Td[:, None])[:, 0]


class RotaryTable:
    """Computes the Rotation of positions. The frequencies stay on the device of the last step."""

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        self._frequencies_r = torch.tensor(rotary.inverse_frequencies, device="cpu")

    def __call__(self, position_ids_T: Tensor, dtype: torch.dtype) -> Rotation:
        self._frequencies_r = self._frequencies_r.to(position_ids_T.device)
        # In float64: there differences of processors almost never show in the rounded result.
        angle_Tr = (position_ids_T[:, None].float() * self._frequencies_r).double()
        cosine_Tr, sine_Tr = angle_Tr.cos() * self.rotary.scale, angle_Tr.sin() * self.rotary.scale
        return Rotation(cosine_Tr.to(dtype), sine_Tr.to(dtype), self.rotary.interleaved)
