"""Shazeer's programs (arXiv 1911.02150, sections 2.3 to 3.1), einsum by einsum, in torch and in the
paper's letters.

As in the paper no logit is scaled: the factor 1/sqrt(k) belongs to P_q. A mask is boolean, True
where a query may attend, and broadcasts to [b, h, n, m].

b batch, n queries, m memory, d model size, h heads, k key size, v value size.
P_q [h, d, k]; P_k and P_v have an axis h in the multi-head programs and none in the multi-query
ones; P_o [h, d, v].
"""

import torch
from torch import Tensor


def multi_head_attention_batched(
    X: Tensor,
    M: Tensor,
    mask: Tensor | None,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
) -> Tensor:
    """Multi-head attention of X [b, n, d] to M [b, m, d] (section 2.3). -> Y [b, n, d]"""
    Q = torch.einsum("bnd,hdk->bhnk", X, P_q)
    K = torch.einsum("bmd,hdk->bhmk", M, P_k)
    V = torch.einsum("bmd,hdv->bhmv", M, P_v)
    logits = torch.einsum("bhnk,bhmk->bhnm", Q, K)
    weights = _masked(logits, mask).softmax(dim=-1)
    O = torch.einsum("bhnm,bhmv->bhnv", weights, V)  # noqa: E741
    return torch.einsum("bhnv,hdv->bnd", O, P_o)


def multi_head_self_attention_incremental(
    x: Tensor,
    prev_K: Tensor,
    prev_V: Tensor,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of multi-head self-attention (section 2.4): x [b, d] after
    prev_K [b, h, m, k] and prev_V [b, h, m, v]. -> y [b, d], K [b, h, m + 1, k], V [b, h, m + 1, v]
    """
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    K = torch.cat([prev_K, torch.einsum("bd,hdk->bhk", x, P_k).unsqueeze(2)], dim=2)
    V = torch.cat([prev_V, torch.einsum("bd,hdv->bhv", x, P_v).unsqueeze(2)], dim=2)
    logits = torch.einsum("bhk,bhmk->bhm", q, K)
    weights = logits.softmax(dim=-1)
    o = torch.einsum("bhm,bhmv->bhv", weights, V)
    return torch.einsum("bhv,hdv->bd", o, P_o), K, V


def multi_query_attention_batched(
    X: Tensor,
    M: Tensor,
    mask: Tensor | None,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
) -> Tensor:
    """Multi-query attention of X [b, n, d] to M [b, m, d] (section 3): K and V have no h. -> Y"""
    Q = torch.einsum("bnd,hdk->bhnk", X, P_q)
    K = torch.einsum("bmd,dk->bmk", M, P_k)
    V = torch.einsum("bmd,dv->bmv", M, P_v)
    logits = torch.einsum("bhnk,bmk->bhnm", Q, K)
    weights = _masked(logits, mask).softmax(dim=-1)
    O = torch.einsum("bhnm,bmv->bhnv", weights, V)  # noqa: E741
    return torch.einsum("bhnv,hdv->bnd", O, P_o)


def multi_query_self_attention_incremental(
    x: Tensor,
    prev_K: Tensor,
    prev_V: Tensor,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of multi-query self-attention (section 3.1): x [b, d] after
    prev_K [b, m, k] and prev_V [b, m, v]. -> y [b, d], K [b, m + 1, k], V [b, m + 1, v]
    """
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    K = torch.cat([prev_K, torch.einsum("bd,dk->bk", x, P_k).unsqueeze(1)], dim=1)
    V = torch.cat([prev_V, torch.einsum("bd,dv->bv", x, P_v).unsqueeze(1)], dim=1)
    logits = torch.einsum("bhk,bmk->bhm", q, K)
    weights = logits.softmax(dim=-1)
    o = torch.einsum("bhm,bmv->bhv", weights, V)
    return torch.einsum("bhv,hdv->bd", o, P_o), K, V


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)
