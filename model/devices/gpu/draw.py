"""Random draws on the device: noise that is a pure function of (seed, choice, index, token), and the Gumbel-max draw.

Philox (Salmon et al. 2011) with the seed as its key; the counter holds token, index and choice. A draw reads a row's logits once, where
torch's operations read and write them a dozen times as float64. It knows nothing of top-k and other filters, which need probabilities.

Shape letters: S rows that draw, V vocabulary, B tokens of a program, C programs of a row.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.devices.gpu import upload

BLOCK = 1024
LEAST_NOISE = tl.constexpr(1e-300)
"""The least noise, as in model/sampling.py."""

Key = tuple[int, int, int]
"""Seed, choice and output index."""


@triton.jit
def _noise(draw_ptr, token_B):
    """Exponentially distributed numbers, mean 1."""
    seed, choice, index = tl.load(draw_ptr), tl.load(draw_ptr + 1), tl.load(draw_ptr + 2)
    zero_B = token_B * 0
    a_B, b_B, _, _ = tl.philox(seed, token_B, zero_B + index.to(tl.int32), zero_B + choice.to(tl.int32), zero_B)
    # 53 bits; 1 is possible and 0 is not, so that no number is infinite.
    bits_B = (a_B.to(tl.uint64) << 21) ^ (b_B.to(tl.uint64) >> 11)
    return -tl.log((bits_B + 1).to(tl.float64) * (1.0 / 9007199254740992.0))


@triton.jit
def exponential_noise(draws_ptr, noise_ptr, num_tokens, BLOCK_B: tl.constexpr):
    """Program (s, i): the noise of BLOCK_B tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    token_B = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    tl.store(noise_ptr + row * num_tokens + token_B, _noise(draws_ptr + row * 3, token_B), mask=token_B < num_tokens)


@triton.jit
def gumbel_max(logits_ptr, largest_ptr, rows_ptr, draws_ptr, settings_ptr, scores_ptr, winners_ptr, num_tokens, BLOCK_B: tl.constexpr):
    """Program (s, i): the winning token among BLOCK_B tokens of a row, and its score."""
    draw, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, inverse, least = tl.load(rows_ptr + draw), tl.load(settings_ptr + draw * 2), tl.load(settings_ptr + draw * 2 + 1)
    token_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    x_B = tl.load(logits_ptr + row * num_tokens + token_B, mask=token_B < num_tokens, other=float("-inf"))
    share_B = (x_B.to(tl.float64) - tl.load(largest_ptr + row).to(tl.float64)) * inverse
    # The logarithm of p / noise takes no division and no exponential.
    score_B = tl.where(share_B < least, float("-inf"), share_B) - tl.log(tl.maximum(_noise(draws_ptr + draw * 3, token_B), LEAST_NOISE))
    largest = tl.max(score_B, 0)
    # With NaN there is no largest score; the row fails, but its token must still be a valid id.
    winner = tl.min(tl.where(score_B == largest, token_B, num_tokens - 1), 0)
    tl.store(scores_ptr + draw * num_blocks + block, largest)
    tl.store(winners_ptr + draw * num_blocks + block, tl.minimum(winner, num_tokens - 1).to(tl.int64))


def _wrapped(keys: Sequence[Key], device: torch.device) -> Tensor:
    seeds = ((seed & (2**64 - 1), choice, index) for seed, choice, index in keys)
    return upload([(seed - 2**64 if seed >= 2**63 else seed, choice, index) for seed, choice, index in seeds], device, torch.long)


def exponential_noise_SV(keys: Sequence[Key], num_tokens: int, device: torch.device) -> Tensor:
    """Exponentially distributed numbers (mean 1) for each key, as float64."""
    noise_SV = torch.empty(len(keys), num_tokens, dtype=torch.float64, device=device)
    exponential_noise[(len(keys), triton.cdiv(num_tokens, BLOCK))](_wrapped(keys, device), noise_SV, num_tokens, BLOCK)
    return noise_SV


def gumbel_max_S(
    logits: Tensor, largest: Tensor, rows: Sequence[int], keys: Sequence[Key], settings: Sequence[tuple[float, float]]
) -> Tensor:
    """Draws a token for each of these rows of float32 logits, whose largest logits are given: the largest p_v / noise_v. `settings`:
    temperature and min_p of each row.
    """
    device, num_tokens = logits.device, logits.shape[-1]
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    shares = [(1.0 / temperature, math.log(min_p) if min_p > 0.0 else -math.inf) for temperature, min_p in settings]
    scores_SC = torch.empty(len(rows), num_blocks, dtype=torch.float64, device=device)
    winners_SC = torch.empty(len(rows), num_blocks, dtype=torch.long, device=device)
    gumbel_max[(len(rows), num_blocks)](
        logits.contiguous(), largest, upload(rows, device, torch.long), _wrapped(keys, device), upload(shares, device, torch.float64),
        scores_SC, winners_SC, num_tokens, BLOCK,
    )  # fmt: skip
    return winners_SC.gather(1, scores_SC.argmax(dim=-1, keepdim=True))[:, 0]
