"""Every formulation of attention against every other, and incremental against batched: one matrix over shapes, masks and dtypes."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from commands.reference import shazeer
from commands.reference.convert import Module, Projections, from_projections, to_projections
from commands.reference.fused import BroadcastAttention, FusedAttention
from commands.reference.heads import HeadListAttention, HeadwiseAttention
from commands.reference.masking import attention_weights, causal_mask, padding_mask
from model.attention import MultiQueryAttention

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
KINDS: tuple[type[Module], ...] = (HeadwiseAttention, HeadListAttention, BroadcastAttention, FusedAttention, MultiQueryAttention)
SHAPES = [(1, 1, 8, 1), (2, 5, 16, 4), (3, 7, 24, 3), (1, 33, 64, 8), (2, 20, 48, 1), (1, 64, 40, 5)]


def assert_close(actual: Tensor, expected: Tensor, context: object) -> None:
    """Within the tolerance of its dtype, relative to the largest output."""
    largest = max(expected.abs().max().item(), 1e-30)
    assert (actual - expected).abs().max().item() <= TOLERANCE[expected.dtype] * largest, context


def draw_projections(generator: torch.Generator, d: int, h: int, dtype: torch.dtype) -> Projections:
    """Weights at 1/sqrt(d), and the scale that the paper's programs leave out folded into P_q."""
    k = d // h

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype) * d**-0.5

    return Projections(draw(h, d, k) * k**-0.5, draw(d, k), draw(d, k), draw(h, d, k))


def serve(module: MultiQueryAttention, x_bnd: Tensor, mask: Tensor | None) -> Tensor:
    """The serving layer over a batch: its `attend` sees all sequences end to end and keeps them apart."""
    batch, count, _ = x_bnd.shape

    def attend(layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor, rotation: None) -> Tensor:
        q_bnhk = q_THd.view(batch, count, *q_THd.shape[1:])
        k_bmk, v_bmk = (x.view(batch, count, -1) for x in (k_Td, v_Td))
        logits_bhnm = torch.einsum("bnhk,bmk->bhnm", q_bnhk, k_bmk) * module.head_dim**-0.5
        return torch.einsum("bhnm,bmk->bnhk", attention_weights(logits_bhnm, mask), v_bmk).flatten(0, 1)

    return module(x_bnd.flatten(0, 1), 0, attend).view_as(x_bnd)


def run(kind: type[Module], projections: Projections, x_bnd: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    module = from_projections(projections, kind, causal=causal)
    if isinstance(module, MultiQueryAttention):
        return serve(module, x_bnd, mask)
    if isinstance(module, HeadListAttention | FusedAttention):
        return module(x_bnd)  # type: ignore[no-any-return]
    result = module(x_bnd, mask)
    return result[0] if isinstance(module, BroadcastAttention) else result  # type: ignore[no-any-return]


def masks(b: int, h: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Every mask shape of the sources, boolean and additive; the full one hides everything from some queries."""
    full = torch.rand(b, h, n, n, generator=generator) < 0.6
    full[:, :, n // 2] = False
    lengths = torch.randint(1, n + 1, (b,), generator=generator)
    additive = torch.zeros(1, 1, n, n, dtype=dtype).masked_fill(~causal_mask(n, n), -torch.inf)
    soft = torch.randn(b, h, n, n, generator=generator, dtype=dtype)
    return {
        "none": None,
        "causal": causal_mask(n, n),
        "padding": padding_mask(lengths, n),
        "full": full,
        "additive": additive,
        "soft": soft,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_formulations_agrees(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, n, d, h = shape
    generator = torch.Generator().manual_seed(sum(shape))
    for name, mask in masks(b, h, n, generator, dtype).items():
        projections = draw_projections(generator, d, h, dtype)
        x_bnd = torch.randn(b, n, d, generator=generator, dtype=dtype)
        outputs = {"multi-query einsum": shazeer.multi_query_attention_batched(x_bnd, x_bnd, mask, *parts(projections))}
        outputs["multi-head einsum"] = shazeer.multi_head_attention_batched(x_bnd, x_bnd, mask, *parts(spread(projections)))
        for kind in KINDS:
            fixed = kind in (HeadListAttention, FusedAttention)  # Built causal or not; they take no other mask.
            if not fixed or name in ("none", "causal", "additive"):
                outputs[kind.__name__] = run(kind, projections, x_bnd, mask, causal=name != "none")
        for (left, a), (right, c) in itertools.combinations(outputs.items(), 2):
            assert_close(a, c, (left, right, name))
        if name == "full":
            assert all(output[:, n // 2].abs().max() == 0.0 for output in outputs.values()), "a query that sees nothing gives zero"


def parts(projections: Projections) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return projections.q_hdk, projections.k_dk, projections.v_dk, projections.o_hdk


def spread(projections: Projections) -> Projections:
    """The same function as multi-head attention: every head has its own copy of K and V."""
    h = projections.q_hdk.shape[0]
    k_hdk, v_hdk = (x.expand(h, *x.shape) for x in (projections.k_dk, projections.v_dk))
    return Projections(projections.q_hdk, k_hdk, v_hdk, projections.o_hdk)


@dataclass
class Cross:
    """Attention to a memory of another length, with a value size that differs from the key size."""

    b: int
    n: int
    m: int
    d: int
    h: int
    k: int
    v: int

    def draw(self, dtype: torch.dtype, shared: bool) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.m)
        heads = () if shared else (self.h,)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype) * self.d**-0.5

        weights = draw(self.h, self.d, self.k), draw(*heads, self.d, self.k), draw(*heads, self.d, self.v), draw(self.h, self.d, self.v)
        x_bnd, m_bmd = draw(self.b, self.n, self.d) * self.d**0.5, draw(self.b, self.m, self.d) * self.d**0.5
        return x_bnd, m_bmd, weights


CROSSES = [Cross(1, 1, 1, 4, 2, 3, 5), Cross(2, 3, 9, 16, 4, 8, 2), Cross(3, 11, 6, 12, 3, 5, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cross", CROSSES, ids=str)
def test_one_query_equals_the_batch_and_heads_of_their_own_equal_shared_ones(cross: Cross, dtype: torch.dtype) -> None:
    x_bnd, m_bmd, weights = cross.draw(dtype, shared=False)
    batched = shazeer.multi_head_attention_batched(x_bnd, m_bmd, None, *weights)
    for i, j in itertools.product(range(cross.b), range(cross.n)):
        assert_close(shazeer.multi_head_attention(x_bnd[i, j], m_bmd[i], *weights), batched[i, j], (i, j))
    _, _, (q, k, v, o) = cross.draw(dtype, shared=True)
    own = shazeer.multi_head_attention_batched(x_bnd, m_bmd, None, q, k.expand(cross.h, *k.shape), v.expand(cross.h, *v.shape), o)
    assert_close(shazeer.multi_query_attention_batched(x_bnd, m_bmd, None, q, k, v, o), own, cross)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cross", CROSSES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["multi-query", "multi-head"])
def test_incremental_equals_batched_for_every_prefix(cross: Cross, dtype: torch.dtype, shared: bool) -> None:
    x_bnd, _, weights = cross.draw(dtype, shared)
    step: Callable[..., tuple[Tensor, Tensor, Tensor]]
    step = shazeer.multi_query_self_attention_incremental if shared else shazeer.multi_head_self_attention_incremental
    whole = shazeer.multi_query_attention_batched if shared else shazeer.multi_head_attention_batched
    heads = () if shared else (cross.h,)
    prev_K, prev_V = (torch.zeros(cross.b, *heads, 0, size, dtype=dtype) for size in (cross.k, cross.v))
    for length in range(1, cross.n + 1):
        y_bd, prev_K, prev_V = step(x_bnd[:, length - 1], prev_K, prev_V, *weights)
        prefix = x_bnd[:, :length]
        assert_close(y_bd, whole(prefix, prefix, causal_mask(length, length), *weights)[:, -1], length)
    assert prev_K.shape == (cross.b, *heads, cross.n, cross.k) and prev_V.shape == (cross.b, *heads, cross.n, cross.v)


def test_the_returned_weights_are_the_softmax() -> None:
    projections = draw_projections(torch.Generator().manual_seed(0), 16, 4, torch.float64)
    x_bnd = torch.randn(2, 6, 16, dtype=torch.float64)
    module = from_projections(projections, BroadcastAttention)
    assert isinstance(module, BroadcastAttention)
    _, weights_bhnm = module(x_bnd, causal_mask(6, 6))
    logits_bhnm = torch.einsum("bnd,hdk,bme,ek->bhnm", x_bnd, projections.q_hdk, x_bnd, projections.k_dk)
    assert_close(weights_bhnm, logits_bhnm.masked_fill(~causal_mask(6, 6), -torch.inf).softmax(-1), "weights")
    assert_close(weights_bhnm.sum(-1), torch.ones(2, 4, 6, dtype=torch.float64), "sums")


def test_weights_survive_every_chain_of_conversions() -> None:
    projections = draw_projections(torch.Generator().manual_seed(1), 24, 4, torch.float64)
    rng = random.Random(0)
    current = projections
    for kind in rng.sample([*KINDS, *KINDS], 10):
        current = to_projections(from_projections(current, kind))
    for before, after in zip(parts(projections), parts(current), strict=True):
        assert_close(after, before, "chain")


def test_biases_have_no_form_in_the_paper() -> None:
    with pytest.raises(ValueError, match=r"HeadwiseAttention\.[a-z0-9.]*bias is not zero"):
        to_projections(HeadwiseAttention(8, 2))


@pytest.mark.parametrize("kind", [HeadwiseAttention, HeadListAttention, BroadcastAttention, FusedAttention])
def test_dropout_only_in_training_and_without_bias(kind: type[HeadwiseAttention]) -> None:
    torch.manual_seed(0)
    module, x_bnd = kind(16, 4, dropout=0.5), torch.randn(1, 5, 16)

    def output() -> Tensor:
        result = module(x_bnd)
        return result[0] if isinstance(result, tuple) else result

    assert not torch.equal(output(), output())
    mean = torch.stack([output() for _ in range(3000)]).mean(0)
    module.eval()
    assert torch.equal(output(), output())
    assert (mean - output()).abs().max() < 0.15
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1.5"):
        kind(16, 4, dropout=1.5).train()(x_bnd)


@pytest.mark.parametrize("kind", [HeadwiseAttention, HeadListAttention, BroadcastAttention, FusedAttention])
@pytest.mark.parametrize(("model_size", "num_heads"), [(10, 3), (8, 0)])
def test_sizes_that_do_not_divide_are_named(kind: type[HeadwiseAttention], model_size: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match=f"model size {model_size} is not a multiple of the number of heads {num_heads}"):
        kind(model_size, num_heads)


def test_wrong_shapes_and_masks_name_the_numbers() -> None:
    x_bnd, m_bmd, weights = CROSSES[1].draw(torch.float32, shared=True)
    with pytest.raises(ValueError, match=r"P_k must have shape \[d=16, k=8\], found \[16, 7\]"):
        shazeer.multi_query_attention_batched(x_bnd, m_bmd, None, weights[0], weights[1][:, :7], *weights[2:])
    with pytest.raises(ValueError, match=r"M must have shape \[b=2, m, d=16\], found \[1, 9, 16\]"):
        shazeer.multi_query_attention_batched(x_bnd, m_bmd[:1], None, *weights)
    for bad in (torch.ones(3, 1, 1, 9, dtype=torch.bool), torch.ones(5, 2, 4, 3, 9)):
        with pytest.raises(ValueError, match=r"does not broadcast to the logits' \[b, h, n, m\] = \[2, 4, 3, 9\]"):
            shazeer.multi_query_attention_batched(x_bnd, m_bmd, bad, *weights)
    with pytest.raises(ValueError, match="4 queries cannot be the last of 3 keys"):
        causal_mask(4, 3)
    with pytest.raises(ValueError, match=r"prev_V must have shape \[b=2, m=0, v=2\]"):
        shazeer.multi_query_self_attention_incremental(x_bnd[:, 0], torch.zeros(2, 0, 8), torch.zeros(2, 0, 3), *weights)
