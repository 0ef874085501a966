"""The serving layer's attention against the paper's programs, and these against each other."""

import dataclasses

import pytest
import torch
from torch import Tensor

from model.attention import MultiQueryAttention
from model.checkpoint.families import read_spec
from tests.support import shazeer
from tests.support.paths import MODELS

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
SHAPES = [
    (1, 1, 8, 1),
    (2, 5, 16, 4),
    (3, 7, 24, 3),
    (1, 33, 64, 8),
    (2, 20, 48, 1),
    (1, 64, 40, 5),
]
"""b sequences, n tokens, d model size, h heads."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of its dtype, relative to the largest output."""
    largest = max(expected.abs().max().item(), 1e-30)
    assert (actual - expected).abs().max().item() <= TOLERANCE[expected.dtype] * largest


def weights_of(d: int, h: int, dtype: torch.dtype) -> Weights:
    """P_q, P_k, P_v, P_o, with the scale that the paper's programs leave out folded into P_q."""
    k = d // h

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype) * d**-0.5

    torch.manual_seed(d + h)
    return draw(h, d, k) * k**-0.5, draw(d, k), draw(d, k), draw(h, d, k)


def of_their_own(weights: Weights) -> Weights:
    """The same function as multi-head attention: every head has its own copy of K and V."""
    q_hdk, k_dk, v_dk, o_hdk = weights
    return q_hdk, k_dk.expand(q_hdk.shape), v_dk.expand(q_hdk.shape), o_hdk


def causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def served(weights: Weights, x_bnd: Tensor) -> Tensor:
    """Causal attention by the serving layer with these weights."""
    (q_hdk, k_dk, v_dk, o_hdk), (b, n, d) = weights, x_bnd.shape
    h, _, k = q_hdk.shape
    spec = read_spec(MODELS / "tiny_starcoder_py")
    spec = dataclasses.replace(spec, hidden_size=d, num_query_heads=h, head_dim=k)
    module = MultiQueryAttention(spec, 0).to(x_bnd.dtype)
    query = (q_hdk * k**0.5).transpose(1, 2).flatten(0, 1)
    with torch.no_grad():
        module.qkv.weight.copy_(torch.cat([query, k_dk.T, v_dk.T]))
        module.out.weight.copy_(o_hdk.transpose(0, 1).flatten(1))
        for bias in (module.qkv.bias, module.out.bias):
            bias.zero_()

    def attend(layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor, rotation: None) -> Tensor:
        q_bnhk = q_THd.view(b, n, h, k)
        logits_bhnm = torch.einsum("bnhk,bmk->bhnm", q_bnhk, k_Td.view(b, n, k)) * k**-0.5
        weights_bhnm = logits_bhnm.masked_fill(~causal(n), -torch.inf).softmax(-1)
        return torch.einsum("bhnm,bmk->bnhk", weights_bhnm, v_Td.view(b, n, k)).flatten(0, 1)

    with torch.no_grad():
        return module(x_bnd.flatten(0, 1), 0, attend).view_as(x_bnd)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_serving_layer_is_the_paper_s(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    b, n, d, h = shape
    weights = weights_of(d, h, dtype)
    x_bnd = torch.randn(b, n, d, dtype=dtype)
    expected = shazeer.multi_query_attention_batched(x_bnd, x_bnd, causal(n), *weights)
    assert_close(served(weights, x_bnd), expected)
    many = of_their_own(weights)
    assert_close(shazeer.multi_head_attention_batched(x_bnd, x_bnd, causal(n), *many), expected)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_incremental_equals_batched_for_every_prefix(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    b, n, d, h = shape
    weights = weights_of(d, h, dtype)
    x_bnd = torch.randn(b, n, d, dtype=dtype)
    whole = shazeer.multi_query_attention_batched(x_bnd, x_bnd, causal(n), *weights)
    step = shazeer.multi_query_self_attention_incremental
    steps = shazeer.multi_head_self_attention_incremental
    prev_K = prev_V = torch.zeros(b, 0, d // h, dtype=dtype)
    many_K = many_V = torch.zeros(b, h, 0, d // h, dtype=dtype)
    for number in range(n):
        x_bd = x_bnd[:, number]
        y_bd, prev_K, prev_V = step(x_bd, prev_K, prev_V, *weights)
        assert_close(y_bd, whole[:, number])
        y_bd, many_K, many_V = steps(x_bd, many_K, many_V, *of_their_own(weights))
        assert_close(y_bd, whole[:, number])
