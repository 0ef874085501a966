"""The yardstick itself: the n-gram is a distribution and learns, and windows score every token once, with context."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench import bits_per_byte
from bench.bits_per_byte import COUNTS, DISCOUNTS, NGram, count, packed, token_nats, windows
from commands.causal_attention import CausalAttention
from commands.train.train import initialise
from model.decoder import Decoder
from model.spec import ModelSpec, Rotary

TEXTS = [b"def f(x):\n    return x\n" * 20, b"for x in f(3):\n    print(x)\n" * 20, b"ab", b""]


def witten_bell(texts: list[bytes], context: bytes, byte: int) -> float:
    """The definition, by counting: interpolated, all occurrences at every length."""
    p = 1 / 256
    for length in range(len(context) + 1):
        suffix = context[len(context) - length :]
        seen = [text[i] for text in (bytes(4) + t for t in texts) for i in range(4, len(text)) if text[i - length : i] == suffix]
        if seen:
            p = (seen.count(byte) + len(set(seen)) * p) / (len(seen) + len(set(seen)))
    return p


def key(context: bytes, byte: int) -> int:
    return int.from_bytes(context + bytes([byte]), "big")


def test_packed() -> None:
    assert packed([b"ab", b"", b"c"]).tolist() == [key(bytes(4), ord("a")), key(b"\0\0\0a", ord("b")), key(bytes(4), ord("c"))]


@pytest.mark.parametrize("lower_counts", COUNTS)
@pytest.mark.parametrize("discount", DISCOUNTS)
def test_ngram_is_a_distribution_and_beats_uniform(discount: str, lower_counts: str) -> None:
    ngram = NGram(*count(packed(TEXTS)), discount, lower_counts)
    keys = packed([b"def g(x):\n    print(x)\n"])
    rng = np.random.default_rng(0)
    contexts = np.r_[keys >> np.uint64(8), packed(TEXTS) >> np.uint64(8), rng.integers(0, 2**32, 50, dtype=np.uint64), np.uint64(0)]
    ngram.check(contexts)
    assert -np.log2(ngram.probabilities(keys)).mean() < 4
    with pytest.raises(ValueError, match="sum to 1"):
        ngram.levels[2].direct[0] += 1e-6
        ngram.check(packed(TEXTS) >> np.uint64(8))


def test_ngram_agrees_with_the_definition() -> None:
    ngram = NGram(*count(packed(TEXTS)), "witten-bell", "all")
    asked = [(bytes(4), b"d"), (b"\0\0\0a", b"b"), (b"urn ", b"x"), (b"urn ", b"q"), (b"zzzz", b"x"), (b"zz(x", b")"), (b"zzzz", b"\xff")]
    probabilities = ngram.probabilities(np.array([key(context, byte[0]) for context, byte in asked], dtype=np.uint64))
    assert probabilities == pytest.approx([witten_bell(TEXTS, context, byte[0]) for context, byte in asked])


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_windows_score_every_token_once(size: int) -> None:
    for length in range(1, 40):
        spans = list(windows(length, size))
        assert [token for _, first, end in spans for token in range(first, end)] == list(range(length))
        assert all(0 <= begin <= first < end <= begin + size for begin, first, end in spans)
        assert all(first - begin >= size // 2 for begin, first, _ in spans[1:])


def nats_at_once(decoder: Decoder, inputs: list[int], targets: list[int]) -> torch.Tensor:
    attend = CausalAttention(len(inputs), decoder.spec)
    hidden = decoder(torch.tensor(inputs), torch.arange(len(inputs)), attend)
    return F.cross_entropy(decoder.logits(hidden), torch.tensor(targets), reduction="none")


@torch.inference_mode()
def test_scoring_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_per_byte, "LOGIT_ROWS", 5)
    spec = ModelSpec("gpt_bigcode", 50, 16, 2, 2, 8, 32, 16, 1e-5, "gelu_tanh", 8**-0.5, True, (0,))
    decoder = Decoder(spec)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        parameter.mul_(10)  # So that context makes a difference.
    ids = torch.randint(50, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in (1, 7, 16):
        assert torch.allclose(
            token_nats(decoder, ids[:length], 0, 16), nats_at_once(decoder, [0, *ids[: length - 1]], ids[:length]), atol=1e-4
        )
    scored = token_nats(decoder, ids, 0, 16)
    inputs = [0, *ids[:-1]]
    for begin, first, end in windows(len(ids), 16):
        for token in range(first, end):
            alone = nats_at_once(decoder, inputs[begin : token + 1], ids[begin : token + 1])[-1]
            assert scored[token] == pytest.approx(alone.item(), abs=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("rotary", [None, Rotary((1.0, 0.1, 0.01, 0.001))])
def test_a_float8_cache_costs_a_little(rotary: Rotary | None) -> None:
    spec = ModelSpec("gpt_bigcode", 50, 16, 2, 2, 8, 32, 16, 1e-5, "gelu_tanh", 8**-0.5, True, (0,), rotary=rotary)
    decoder = Decoder(spec)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        parameter.mul_(10)
    ids = torch.randint(50, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, stored = (token_nats(decoder, ids, 0, 16, float8_cache) for float8_cache in (False, True))
    assert not torch.equal(exact, stored) and torch.allclose(exact, stored, rtol=0.5, atol=0.5)
