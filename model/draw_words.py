"""What draws on a device read of samples, packed into 32-bit words on the host: settings of every
row, and the filters of some rows. It knows no device; model/devices/gpu/draw.py has the kernels
that read these words.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import inf, log
from struct import pack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.step import Sample, Sampling

Words = NDArray[np.int32]

GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token: dividing by them would overflow."""
LARGEST_TEMPERATURE = 1e37
"""Its inverse is the smallest that float32 has all digits of; 0 means greedy."""
NUM_SETTINGS = 6
"""Of a row: 1 / temperature (0: greedy) and log(min_p) as float32, both halves of the seed, choice,
output index."""
NUM_LIMITS = 4
"""Of a filtered row: its index in the results, its index in the logits that are filtered, top-k (0:
none), nothing."""
ALIGNMENT = 4
"""Lists of numbers on a device begin at multiples of it, 16 bytes: for other addresses Triton
compiles another kernel."""
IN_PROMPT = 1 << 30
"""Added to the number of times that a token occurs in the output, if it occurs in the prompt."""
LEAST_ROOM = 64


def aligned(count: int) -> int:
    """The length of a list of numbers whose next one begins at a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=8192)
def _settings(temperature: float, min_p: float, seed: int, choice: int) -> bytes:
    """A row's settings without the output index, which alone changes from step to step."""
    inverse = 1.0 / min(temperature, LARGEST_TEMPERATURE) if temperature >= GREEDY_BELOW else 0.0
    return pack("=ffQI", inverse, log(min_p) if min_p > 0.0 else -inf, seed & (2**64 - 1), choice)


def settings_SN(samples: Sequence[Sample]) -> Words:
    """The settings of every row."""
    words_SN = np.empty((len(samples), NUM_SETTINGS), np.int32)
    samplings = [sample.sampling for sample in samples]
    unchanging = np.frombuffer(
        b"".join([_settings(s.temperature, s.min_p, s.seed, s.choice) for s in samplings]), np.int32
    )
    words_SN[:, :-1] = unchanging.reshape(-1, NUM_SETTINGS - 1)
    words_SN[:, -1] = [sample.index for sample in samples]
    return words_SN


def is_adjusted(sample: Sample) -> bool:
    """Whether it draws from other logits than the model's."""
    return sample.sampling.adjusts or bool(sample.forbidden) or sample.mask is not None


def is_filtered(sample: Sample) -> bool:
    """Whether top-k, top-p or typical-p exclude tokens."""
    return sample.sampling.filters and sample.sampling.temperature >= GREEDY_BELOW


def is_typical(sample: Sample) -> bool:
    """Whether typical-p does, which has no kernel."""
    return sample.sampling.typical_p < 1.0 and is_filtered(sample)


def needs_more(sample: Sample) -> bool:
    """Whether a draw needs more than a row's settings: other logits, or what else was likely."""
    return (
        is_adjusted(sample)
        or is_filtered(sample)
        or bool(sample.num_top or sample.sampling.logprob_token_ids)
    )


def banned(sample: Sample) -> list[int]:
    """Forbidden tokens, and the last ones of bad words whose others stand at the end of the
    output.
    """
    return [
        *sample.forbidden,
        *(word[-1] for word in sample.sampling.bad_words if _stands_before(sample.output, word)),
    ]


class History:
    """How often each id occurs in a prompt and in an output that grows at its end.

    What is kept from step to step grows by the new tokens alone: a server penalises all tokens of
    long prompts at every step.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int32))
        self._output = output
        self._num_counted = 0
        self._lines = {id: line for line, id in enumerate(ids.tolist())}
        self._pairs = np.zeros((len(ids) + LEAST_ROOM, 2), np.int32)
        self._pairs[: len(ids), 0], self._pairs[: len(ids), 1] = ids, IN_PROMPT

    def pairs(self) -> NDArray[np.int32]:
        """Each id with its number of times in the output, plus IN_PROMPT. [N, 2]"""
        lines = self._lines
        for token in islice(self._output, self._num_counted, None):
            line = lines.setdefault(token, len(lines))
            if line == len(self._pairs):
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)])
            self._pairs[line, 0] = token
            self._pairs[line, 1] += 1
        self._num_counted = len(self._output)
        return self._pairs[: len(lines)]


def history_for(sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> History | None:
    """What its penalties read, if it has any: of the prompt only if one reads that."""
    if not sampling.penalises:
        return None
    return History(prompt if sampling.repetition_penalty != 1.0 else (), output)


def history_of(sample: Sample) -> History | None:
    """What its penalties read."""
    return sample.history or history_for(sample.sampling, sample.prompt, sample.output)


def _stands_before(output: Sequence[int], word: Sequence[int]) -> bool:
    """Whether `output` ends with all of `word` but its last token."""
    length = len(word) - 1
    if not 0 < length <= len(output):
        return length == 0
    # The last token alone decides almost always, without a copy of the output's end.
    return output[-1] == word[-2] and list(output[-length:]) == list(word[:-1])


class Redraw(NamedTuple):
    """Rows that are drawn again."""

    words: Words
    """Their numbers, and all that limits and shares name."""
    limits: slice
    """Where in it the limits of the filtered rows lie."""
    shares: slice
    """Where their top-p lies, as float64."""
    top_k: int
    """The largest top-k of theirs that excludes tokens; 0 where none does."""


def pack_redraw(
    rows: Sequence[int], samples: Sequence[Sample], num_tokens: int, is_copied: bool
) -> Redraw:
    """Packs these rows of a step, whose samples are given. `num_tokens`: of the vocabulary;
    `is_copied`: whether they draw from copies of their logits, as they do where penalties, bias,
    masks or typical-p change some of them.
    """
    filtered = [
        i for i, sample in enumerate(samples) if is_filtered(sample) and not is_typical(sample)
    ]
    settings = [samples[i].sampling for i in filtered]
    limits = np.zeros((len(filtered), NUM_LIMITS), np.int32)
    limits[:, 0] = [rows[i] for i in filtered]
    limits[:, 1] = filtered if is_copied else limits[:, 0]
    limits[:, 2] = [min(s.top_k, num_tokens) for s in settings]
    shares = np.array([s.top_p for s in settings], np.float64).view(np.int32)
    begin = aligned(len(rows))
    end = begin + limits.size
    words = np.zeros(end + len(shares), np.int32)
    words[: len(rows)], words[begin:end], words[end:] = rows, limits.ravel(), shares
    top_k = max((k for k in limits[:, 2].tolist() if k < num_tokens), default=0)
    return Redraw(words, slice(begin, end), slice(end, len(words)), top_k)
