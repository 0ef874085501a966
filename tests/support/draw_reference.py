"""The GPU's draws in numpy: the race of model/devices/gpu/draw.py by its definition, in float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.step import Sampling

BLOCK = 2048
Reals = NDArray[np.float64]


def philox(
    seed: NDArray[np.uint64], counter: Sequence[NDArray[np.uint64]]
) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al. 2011) -> four 32-bit words for each counter of four."""
    mask, low = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = [seed & mask, seed >> low]
    a, b, c, d = counter
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a = (right >> low) ^ b ^ key[0]
        b = right & mask
        c = (left >> low) ^ d ^ key[1]
        d = left & mask
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return [a, b, c, d]


def words(
    seeds: Sequence[int], choices: Sequence[int], indices: Sequence[int], tokens: Sequence[int]
) -> NDArray[np.uint64]:
    """The random word of each of these tokens (columns) for each key (rows)."""
    key_S1 = np.array([seed & (2**64 - 1) for seed in seeds], np.uint64)[:, None]
    place_V, block_V = np.divmod(np.asarray(tokens), BLOCK)[::-1]
    quarter_V, offset_V = np.divmod(place_V, BLOCK // 4)
    counter_V = (block_V * (BLOCK // 4) + offset_V).astype(np.uint64)
    counters = (
        counter_V,
        np.array(indices, np.uint64)[:, None],
        np.array(choices, np.uint64)[:, None],
        np.uint64(0),
    )
    of_quarter = philox(
        key_S1, [np.broadcast_to(part, (len(seeds), len(counter_V))) for part in counters]
    )
    return np.choose(quarter_V, of_quarter)


def times(random_words: NDArray[np.uint64]) -> Reals:
    """Exponentially distributed, mean 1."""
    return -np.log1p(-np.minimum((random_words + 0.5) / 2.0**32, 1 - 2.0**-24))


def speeds(
    logits_V: Reals, sampling: Sampling, index: int, kept_V: NDArray[np.bool_] | None = None
) -> Reals:
    """The logarithm of p / t of each token that takes part; -inf of the others."""
    logits_V = np.asarray(logits_V, np.float64)
    if sampling.temperature < 1e-5:
        return logits_V
    kept_V = np.ones(len(logits_V), bool) if kept_V is None else kept_V
    share_V = (logits_V - logits_V[kept_V].max()) / sampling.temperature
    if sampling.min_p > 0.0:
        kept_V = kept_V & (share_V >= np.log(sampling.min_p))
    words_V = words([sampling.seed], [sampling.choice], [index], range(len(logits_V)))[0]
    return np.where(kept_V, share_V - np.log(times(words_V)), -np.inf)


def is_clear(speed_V: Reals) -> bool:
    """Whether float32 cannot choose another token than float64 does."""
    best = np.sort(speed_V)[-2:]
    return len(best) < 2 or best[0] == best[1] or bool(best[1] - best[0] > 1e-4)
