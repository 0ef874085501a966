"""MultiQueryAttention: many query heads, one key head, one value head (Shazeer 2019, arXiv
1911.02150, section 3).

The layer projects; which tokens attend to which is up to the `attend` callable it is given, which
owns the KV cache (in serving) or the causal mask (in training). It knows nothing of pages and
sequences; it passes the rotation of positions on.

Shape letters: T tokens of the step, D hidden size, H query heads, d head size, E = H * d columns of
all queries, c columns of the latent, p columns of a head that are not rotated, r that are, v
columns of a head's value.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.layers import Linear, RMSNorm, Rotation, norm
from model.spec import Latent, ModelSpec

Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, Rotation | None], Tensor]
"""(layer, q_THd, k_Td, v_Td, rotation) -> o_THd. K and V have no head axis: there is one KV head.
Without them the layer reads those that another one has stored. With a rotation, queries and keys
still have to be rotated: a backend that stores keys can do that in the same kernel, others call
`rotation.both`.
"""
LATENT_EPSILON = 1e-6
"""Epsilon of the RMSNorm layers of latents, for which checkpoint configs have no key."""


class MultiQueryAttention(nn.Module):
    """softmax(q_h K^T * scale) V for every query head h, over one shared K and V; then the output
    projection.

    `qkv` is one matrix whose rows are the H query heads, then K, then V: of its (H + 2) * d rows
    only 2 * d feed the cache. In a layer that reads what another stores it has queries alone.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.num_query_heads = spec.num_query_heads
        self.head_dim = head_dim = spec.head_dim_of(layer)
        self.stores = layer < spec.num_storing_layers
        query_size = spec.num_query_heads * head_dim
        stored_size = 2 * head_dim if self.stores else 0
        self.qkv = Linear(spec.hidden_size, query_size + stored_size, bias=spec.qkv_bias)
        self.out = Linear(query_size, spec.hidden_size, bias=spec.out_bias)
        normed = spec.query_key_norm
        self.query_norm = norm(spec, head_dim) if normed else None
        self.key_norm = norm(spec, head_dim) if normed and self.stores else None
        self.value_norm = (
            RMSNorm(head_dim, spec.norm_epsilon, weighted=False)
            if spec.value_norm and self.stores
            else None
        )
        self.norm_heads = norm_heads
        """Replaced by devices with a kernel for it."""

    def forward(
        self, x_TD: Tensor, layer: int, attend: Attend, rotation: Rotation | None = None
    ) -> Tensor:
        """x_TD -> y_TD, for tokens of any number of sequences, concatenated."""
        query_size = self.num_query_heads * self.head_dim
        sizes = [query_size, self.head_dim, self.head_dim] if self.stores else [query_size]
        q_TE, *stored = torch.split_with_sizes(self.qkv(x_TD), sizes, dim=-1)
        q_THd = q_TE.view(*q_TE.shape[:-1], self.num_query_heads, self.head_dim)
        k_Td, v_Td = stored or (None, None)
        if self.query_norm is not None:
            q_THd, k_Td = self.norm_heads(q_THd, k_Td, self.query_norm, self.key_norm)
        if self.value_norm is not None:
            v_Td = self.value_norm(v_Td)
        o_THd = attend(layer, q_THd, k_Td, v_Td, rotation)
        y_TD: Tensor = self.out(o_THd.flatten(-2))
        return y_TD


def norm_heads(
    q_THd: Tensor, k_Td: Tensor | None, query_norm: nn.Module, key_norm: nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    """Normalises each query head and the key, if there is one."""
    return query_norm(q_THd), None if key_norm is None else key_norm(k_Td)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) in its absorbed
    form, which is multi-query attention.

    Head h scores a key by q_h^p (W_h^K c) + q_h^r k^r = (q_h^p W_h^K) c + q_h^r k^r: one key [c,
    k^r] for all heads, whose first columns, the latent c, are the one value. Attention yields a
    weighted sum of latents, from which W_h^V makes the head's output.
    """

    def __init__(self, spec: ModelSpec, latent: Latent) -> None:
        super().__init__()
        self.num_query_heads, self.latent = spec.num_query_heads, latent
        query_size = spec.num_query_heads * latent.head_dim
        self.query_down = self.query_norm = None
        if latent.query_rank is not None:
            self.query_down = Linear(spec.hidden_size, latent.query_rank, bias=spec.qkv_bias)
            self.query_norm = RMSNorm(latent.query_rank, LATENT_EPSILON)
        self.query = Linear(latent.query_rank or spec.hidden_size, query_size, bias=False)
        self.key_value_down = Linear(
            spec.hidden_size, latent.rank + latent.rotary_dim, bias=spec.qkv_bias
        )
        self.latent_norm = RMSNorm(latent.rank, LATENT_EPSILON)
        self.key_value_up = HeadProjections(spec.num_query_heads, latent)
        self.out = Linear(
            spec.num_query_heads * latent.value_dim, spec.hidden_size, bias=spec.out_bias
        )

    def forward(
        self, x_TD: Tensor, layer: int, attend: Attend, rotation: Rotation | None = None
    ) -> Tensor:
        """x_TD -> y_TD, for tokens of any number of sequences, concatenated."""
        latent = self.latent
        narrow = (
            x_TD
            if self.query_down is None or self.query_norm is None
            else self.query_norm(self.query_down(x_TD))
        )
        q_THd = self.query(narrow).unflatten(-1, (self.num_query_heads, -1))
        q_THp, q_THr = q_THd.split([latent.plain_dim, latent.rotary_dim], dim=-1)
        c_Tc, k_Tr = self.key_value_down(x_TD).split([latent.rank, latent.rotary_dim], dim=-1)
        c_Tc = self.latent_norm(c_Tc)
        if rotation is not None:
            q_THr, k_Tr = rotation.both(q_THr, k_Tr)
        q_THc = self.key_value_up.keys(q_THp)
        k_Td = torch.cat([c_Tc, k_Tr], dim=-1)
        o_THc = attend(layer, torch.cat([q_THc, q_THr], dim=-1), k_Td, c_Tc, None)
        y_TD: Tensor = self.out(self.key_value_up.values(o_THc).flatten(-2))
        return y_TD


class HeadProjections(nn.Module):
    """Latent attention's second projection: each head has its own rows, first for keys, then for
    values, and applies them separately.
    """

    def __init__(self, num_heads: int, latent: Latent) -> None:
        super().__init__()
        self.num_heads, self.latent = num_heads, latent
        self.weight = nn.Parameter(
            torch.empty(num_heads * (latent.plain_dim + latent.value_dim), latent.rank)
        )

    def parts(self) -> tuple[Tensor, Tensor]:
        """-> key_up_Hpc, value_up_Hvc"""
        key_up_Hpc, value_up_Hvc = self.weight.unflatten(0, (self.num_heads, -1)).split(
            [self.latent.plain_dim, self.latent.value_dim], dim=1
        )
        return key_up_Hpc, value_up_Hvc

    def keys(self, q_THp: Tensor) -> Tensor:
        """Projects each head's query to the latent. -> q_THc"""
        return torch.einsum("thp,hpc->thc", q_THp, self.parts()[0])

    def values(self, o_THc: Tensor) -> Tensor:
        """Projects each head's weighted sum of latents to its value. -> o_THv"""
        return torch.einsum("thc,hvc->thv", o_THc, self.parts()[1])
