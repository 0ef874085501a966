"""Shazeer's programs (arXiv 1911.02150, sections 2.2 to 3.1), einsum by einsum, in torch and in the paper's letters.

As in the paper no logit is scaled: the factor 1/sqrt(k) belongs to P_q. Masks, dropout and shape checks are ours (see `masking`).

b batch, n queries, m memory, d model size, h heads, k key size, v value size. P_q [h, d, k]; P_k and P_v have an axis h in the
multi-head programs and none in the multi-query ones; P_o [h, d, v].
"""

import torch
from torch import Tensor

from commands.reference.masking import attention_weights, check_shape, dropped


def multi_head_attention(x: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Tensor:
    """Multi-head attention of one query x [d] to a memory M [m, d] (section 2.2). -> y [d]"""
    _h, d, _k = P_q.shape
    check_shape("x", x, "d", d=d)
    check_shape("M", M, "md", d=d)
    _check_weights(P_q, P_k, P_v, P_o, "h")
    q = torch.einsum("d,hdk->hk", x, P_q)
    K = torch.einsum("md,hdk->hmk", M, P_k)
    V = torch.einsum("md,hdv->hmv", M, P_v)
    logits = torch.einsum("hk,hmk->hm", q, K)
    weights = logits.softmax(dim=-1)
    o = torch.einsum("hm,hmv->hv", weights, V)
    return torch.einsum("hv,hdv->d", o, P_o)


def multi_head_attention_batched(
    X: Tensor,
    M: Tensor,
    mask: Tensor | None,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Multi-head attention of X [b, n, d] to M [b, m, d] (section 2.3). -> Y [b, n, d]"""
    _check_batch(X, M, P_q)
    _check_weights(P_q, P_k, P_v, P_o, "h")
    Q = torch.einsum("bnd,hdk->bhnk", X, P_q)
    K = torch.einsum("bmd,hdk->bhmk", M, P_k)
    V = torch.einsum("bmd,hdv->bhmv", M, P_v)
    logits = torch.einsum("bhnk,bhmk->bhnm", Q, K)
    weights = dropped(attention_weights(logits, mask), dropout, training)
    O = torch.einsum("bhnm,bhmv->bhnv", weights, V)  # noqa: E741
    return torch.einsum("bhnv,hdv->bnd", O, P_o)


def multi_head_self_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of multi-head self-attention (section 2.4): x [b, d] after prev_K [b, h, m, k] and prev_V [b, h, m, v].
    -> y [b, d], K [b, h, m + 1, k], V [b, h, m + 1, v]
    """
    _check_weights(P_q, P_k, P_v, P_o, "h")
    (b, _d), (h, _, k), v = x.shape, P_q.shape, P_v.shape[-1]
    check_shape("x", x, "bd", d=P_q.shape[1])
    check_shape("prev_K", prev_K, "bhmk", b=b, h=h, k=k)
    check_shape("prev_V", prev_V, "bhmv", b=b, h=h, v=v, m=prev_K.shape[2])
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
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Multi-query attention of X [b, n, d] to M [b, m, d] (section 3): the letter h is gone from K and V. -> Y [b, n, d]"""
    _check_batch(X, M, P_q)
    _check_weights(P_q, P_k, P_v, P_o, "")
    Q = torch.einsum("bnd,hdk->bhnk", X, P_q)
    K = torch.einsum("bmd,dk->bmk", M, P_k)
    V = torch.einsum("bmd,dv->bmv", M, P_v)
    logits = torch.einsum("bhnk,bmk->bhnm", Q, K)
    weights = dropped(attention_weights(logits, mask), dropout, training)
    O = torch.einsum("bhnm,bmv->bhnv", weights, V)  # noqa: E741
    return torch.einsum("bhnv,hdv->bnd", O, P_o)


def multi_query_self_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of multi-query self-attention (section 3.1): x [b, d] after prev_K [b, m, k] and prev_V [b, m, v].
    -> y [b, d], K [b, m + 1, k], V [b, m + 1, v]
    """
    _check_weights(P_q, P_k, P_v, P_o, "")
    b, k, v = x.shape[0], P_q.shape[-1], P_v.shape[-1]
    check_shape("x", x, "bd", d=P_q.shape[1])
    check_shape("prev_K", prev_K, "bmk", b=b, k=k)
    check_shape("prev_V", prev_V, "bmv", b=b, v=v, m=prev_K.shape[1])
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    K = torch.cat([prev_K, torch.einsum("bd,dk->bk", x, P_k).unsqueeze(1)], dim=1)
    V = torch.cat([prev_V, torch.einsum("bd,dv->bv", x, P_v).unsqueeze(1)], dim=1)
    logits = torch.einsum("bhk,bmk->bhm", q, K)
    weights = logits.softmax(dim=-1)
    o = torch.einsum("bhm,bmv->bhv", weights, V)
    return torch.einsum("bhv,hdv->bd", o, P_o), K, V


def _check_batch(X: Tensor, M: Tensor, P_q: Tensor) -> None:
    check_shape("X", X, "bnd", d=P_q.shape[1])
    check_shape("M", M, "bmd", b=X.shape[0], d=P_q.shape[1])


def _check_weights(P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, heads: str) -> None:
    """`heads` is "h" where keys and values have a head axis, "" where they are shared."""
    check_shape("P_q", P_q, "hdk")
    h, d, k = P_q.shape
    check_shape("P_k", P_k, heads + "dk", h=h, d=d, k=k)
    check_shape("P_v", P_v, heads + "dv", h=h, d=d)
    check_shape("P_o", P_o, "hdv", h=h, d=d, v=P_v.shape[-1])
