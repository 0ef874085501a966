"""Attention for training, checked against the formula in float64: values and gradients, blocks that
do not divide the length, windows.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from commands import causal_attention
from commands.causal_attention import CausalAttention
from model.checkpoint.families import read_spec
from model.spec import ModelSpec
from server.config import EMBEDDED_MODEL

NUM_SEQUENCES, NUM_HEADS, KEY, VALUE = 2, 3, 8, 6
SPEC = read_spec(EMBEDDED_MODEL)


def formula(
    q_NHk: Tensor, k_Nk: Tensor, v_Nv: Tensor, length: int, scale: float, window: int | None
) -> Tensor:
    """softmax(q K^T * scale) V of each sequence by itself, over the tokens that a token sees."""
    seen_TT = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen_TT = seen_TT.triu(1 - window)
    outputs = []
    for q_THk, k_Tk, v_Tv in zip(
        q_NHk.split(length), k_Nk.split(length), v_Nv.split(length), strict=True
    ):
        scores_HTT = (q_THk.transpose(0, 1) @ k_Tk.T * scale).masked_fill(~seen_TT, -torch.inf)
        outputs.append((scores_HTT.softmax(-1) @ v_Tv).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 8, 19])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_values_and_gradients_are_the_formulas(
    dtype: torch.dtype,
    tolerance: float,
    length: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(causal_attention, "BLOCK", 8)
    monkeypatch.setattr(ModelSpec, "window", lambda _, layer: window)
    spec = replace(SPEC, attention_scale=0.3)
    generator = torch.Generator().manual_seed(length)
    num_tokens = NUM_SEQUENCES * length
    shapes = (num_tokens, NUM_HEADS, KEY), (num_tokens, KEY), (num_tokens, VALUE)
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradient = torch.randn(num_tokens, NUM_HEADS, VALUE, generator=generator)
    ours = CausalAttention(length, spec)(0, inputs[0], inputs[1], inputs[2], None)
    theirs = formula(exact[0], exact[1], exact[2], length, 0.3, window)
    ours.backward(gradient.to(dtype))
    theirs.backward(gradient.double())
    pairs = [
        (ours, theirs),
        *((one.grad, other.grad) for one, other in zip(inputs, exact, strict=True)),
    ]
    for one, other in pairs:
        assert one is not None and other is not None and one.dtype == dtype
        assert (
            one.double() - other
        ).detach().abs().max() <= tolerance * other.detach().abs().max().clamp(min=1.0)


def test_under_autocast_what_is_float32_is_multiplied_in_bfloat16() -> None:
    q_NHk, k_Nk, v_Nv = torch.randn(4, 2, 8), torch.randn(4, 8), torch.randn(4, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert CausalAttention(4, SPEC)(0, q_NHk, k_Nk, v_Nv, None).dtype == torch.bfloat16
