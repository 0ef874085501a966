"""The noise that random draws are made with, on the device: a pure function of (seed, choice, index, token), and of nothing else.

Philox (Salmon et al. 2011) with the seed as its key; the counter holds token, index and choice. It knows nothing of probabilities.

Shape letters: S rows that draw, V vocabulary, B tokens of a program.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.transfer import upload

BLOCK = 1024


@triton.jit
def _exponentials(keys_ptr, times_ptr, num_tokens, BLOCK_B: tl.constexpr):
    """Program (s, i): the numbers of BLOCK_B tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    token_B = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    seed, choice, index = tl.load(keys_ptr + row * 3), tl.load(keys_ptr + row * 3 + 1), tl.load(keys_ptr + row * 3 + 2)
    zero_B = token_B * 0
    a_B, b_B, _, _ = tl.philox(seed, token_B, zero_B + index.to(tl.int32), zero_B + choice.to(tl.int32), zero_B)
    # 53 bits, and 1 is among them where 0 is not: no number is infinite.
    bits_B = (a_B.to(tl.uint64) << 21) ^ (b_B.to(tl.uint64) >> 11)
    uniform_B = (bits_B + 1).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(times_ptr + row * num_tokens + token_B, -tl.log(uniform_B), mask=token_B < num_tokens)


def exponentials_SV(keys: Sequence[tuple[int, int, int]], num_tokens: int, device: torch.device) -> Tensor:
    """Numbers of the exponential distribution (mean 1) for each (seed, choice, index), as float64."""
    wrapped = [
        (seed - 2**64 if seed >= 2**63 else seed, choice, index) for seed, choice, index in ((s & (2**64 - 1), c, i) for s, c, i in keys)
    ]
    times_SV = torch.empty(len(keys), num_tokens, dtype=torch.float64, device=device)
    _exponentials[(len(keys), triton.cdiv(num_tokens, BLOCK))](upload(torch.tensor(wrapped), device), times_SV, num_tokens, BLOCK)
    return times_SV
