"""Weights from one formulation of multi-query attention to another, the serving layer included.

`Projections`, the paper's four tensors with 1/sqrt(k) folded into P_q, is the hub: each formulation converts to it and from it, so any
two are one hop through it apart. The paper's tensors have no biases; a layer whose biases are not zero has no such form.

Shape letters: d model size, h heads, k head size (of queries, key and value here).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commands.reference.fused import BroadcastAttention, FusedAttention
from commands.reference.heads import HeadListAttention, HeadwiseAttention
from model.attention import MultiQueryAttention
from model.spec import ModelSpec

Module = HeadwiseAttention | HeadListAttention | BroadcastAttention | FusedAttention | MultiQueryAttention


@dataclass(frozen=True, slots=True)
class Projections:
    """P_q [h, d, k] (scaled by 1/sqrt(k)), P_k [d, k], P_v [d, k], P_o [h, d, k]."""

    q_hdk: Tensor
    k_dk: Tensor
    v_dk: Tensor
    o_hdk: Tensor

    @property
    def scale(self) -> float:
        """1/sqrt(k), the factor that P_q holds."""
        return 1 / math.sqrt(self.k_dk.shape[-1])


def _matrices(module: Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query [h * k, d], key [k, d], value [k, d], out [d, h * k]) as nn.Linear keeps them."""
    if isinstance(module, HeadwiseAttention | HeadListAttention):
        query = torch.cat([linear.weight for linear in module.queries])  # type: ignore[misc]
        return query, module.key.weight, module.value.weight, module.out.weight
    if isinstance(module, BroadcastAttention):
        return module.query.weight, module.key.weight, module.value.weight, module.out.weight
    if isinstance(module, FusedAttention):
        key, value = module.key_value.weight.chunk(2)
        return module.query.weight, key, value, module.out.weight
    size = module.head_dim
    query, key, value = module.qkv.weight.split([module.num_query_heads * size, size, size])
    return query, key, value, module.out.weight


def to_projections(module: Module) -> Projections:
    """The paper's tensors of any of our layers. Raises ValueError where it has biases other than zero."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias") and bool(parameter.detach().any()):
            raise ValueError(f"{type(module).__name__}.{name} is not zero; the paper's projections have no biases")
    query, key, value, out = (matrix.detach() for matrix in _matrices(module))
    size = key.shape[0]
    num_heads = query.shape[0] // size
    q_hdk = query.unflatten(0, (num_heads, size)).transpose(1, 2) * size**-0.5
    o_hdk = out.unflatten(1, (num_heads, size)).transpose(0, 1)
    return Projections(q_hdk, key.T, value.T, o_hdk)


def from_projections(projections: Projections, kind: type[Module], causal: bool = False) -> Module:
    """A layer of this kind with these weights, biases zero. `causal` is for the kinds that are built causal or not."""
    num_heads, model_size, size = projections.q_hdk.shape
    module: Module
    if kind is MultiQueryAttention:
        module = MultiQueryAttention(_spec(num_heads, model_size, size))
    elif kind in (HeadListAttention, FusedAttention):
        module = kind(model_size, num_heads, causal=causal)
    else:
        module = kind(model_size, num_heads)  # type: ignore[call-arg,arg-type]
    module = module.to(projections.q_hdk.dtype).requires_grad_(False)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    query = (projections.q_hdk / projections.scale).transpose(1, 2).flatten(0, 1)
    _fill(module, query, projections.k_dk.T, projections.v_dk.T, projections.o_hdk.transpose(0, 1).flatten(1))
    return module


def _fill(module: Module, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Copies the four matrices to where this kind of layer keeps them."""
    module.out.weight.copy_(out)
    if isinstance(module, HeadwiseAttention | HeadListAttention):
        for linear, rows in zip(module.queries, query.split(key.shape[0]), strict=True):
            linear.weight.copy_(rows)  # type: ignore[operator]
    elif isinstance(module, BroadcastAttention | FusedAttention):
        module.query.weight.copy_(query)
    if isinstance(module, MultiQueryAttention):
        module.qkv.weight.copy_(torch.cat([query, key, value]))
    elif isinstance(module, FusedAttention):
        module.key_value.weight.copy_(torch.cat([key, value]))
    else:
        module.key.weight.copy_(key)
        module.value.weight.copy_(value)


def _spec(num_heads: int, model_size: int, size: int) -> ModelSpec:
    """The least of a spec that an attention layer reads."""
    return ModelSpec(
        model_type="reference",
        vocab_size=1,
        hidden_size=model_size,
        num_layers=1,
        num_query_heads=num_heads,
        head_dim=size,
        intermediate_size=1,
        max_positions=1,
        norm_epsilon=1e-5,
        activation="gelu",
        attention_scale=size**-0.5,
        tied_embeddings=True,
        end_token_ids=(),
    )
