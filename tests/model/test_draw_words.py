"""What draws on a device read of samples: each number where the kernels look for it."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.draw_words import (
    ALIGNMENT,
    IN_PROMPT,
    History,
    banned,
    is_adjusted,
    is_filtered,
    is_typical,
    pack_redraw,
    settings_SN,
)
from model.step import Sample, Sampling

VOCABULARY = 70


def test_settings_are_numbers_of_32_bits() -> None:
    samples = [
        Sample(
            Sampling(temperature=0.5, min_p=0.25, seed=2**63 + 5, choice=3),
            (),
            [1, 2],
            num_unseen=1,
        ),
        Sample(Sampling(temperature=1e-6, seed=-1), (), ()),
        Sample(Sampling(temperature=1e300), (), ()),
    ]
    words_SN = settings_SN(samples)
    numbers_SN = words_SN[:, :2].copy().view(np.float32)
    assert numbers_SN[0].tolist() == [2.0, np.float32(math.log(0.25))] and numbers_SN[
        1
    ].tolist() == [0.0, -math.inf]
    assert 0 < numbers_SN[2, 0] < 1e-30, "0 would be greedy"
    assert words_SN[:, 2:4].copy().view(np.uint64).ravel().tolist() == [2**63 + 5, 2**64 - 1, 0]
    assert words_SN[:, 4:].tolist() == [[3, 3], [0, 0], [0, 0]]


def test_bad_words_ban_their_last_token_where_the_others_stand() -> None:
    sampling = Sampling(bad_words=[[4], [1, 2, 5], [2, 6], [9, 2, 7], [0, 1, 2, 8]])
    assert banned(Sample(sampling, [0], [1, 2], forbidden=[3])) == [3, 4, 5, 6]
    assert banned(Sample(sampling, [1, 2], [])) == [4]


def test_greedy_rows_have_no_filters() -> None:
    assert not is_filtered(Sample(Sampling(temperature=0.0, top_p=0.5, typical_p=0.5), (), ()))
    assert (
        is_filtered(sample := Sample(Sampling(top_k=3), (), ()))
        and not is_typical(sample)
        and not is_adjusted(sample)
    )
    assert is_typical(Sample(Sampling(typical_p=0.5), (), ()))
    assert is_adjusted(Sample(Sampling(), (), (), forbidden=[1])) and is_adjusted(
        Sample(Sampling(), (), (), mask=b"\xff")
    )


def test_filtered_rows_name_their_logits_and_settings() -> None:
    samplings = [
        Sampling(0.8, 5, 0.9),
        Sampling(top_k=7, typical_p=0.5),
        Sampling(0.0, presence_penalty=0.5),
        Sampling(top_p=0.5),
        Sampling(top_k=10**9),
    ]
    samples, rows = [Sample(sampling, (), ()) for sampling in samplings], [9, 4, 0, 2, 3]
    for is_copied, places in ((True, [0, 3, 4]), (False, [9, 2, 3])):
        words, limits, shares, top_k = pack_redraw(rows, samples, VOCABULARY, is_copied)
        assert words[:5].tolist() == rows and top_k == 5
        assert words[limits].reshape(-1, 4).tolist() == [
            [row, place, k, 0] for row, place, k in zip([9, 2, 3], places, [5, 0, 70], strict=True)
        ]
        assert words[shares].view(np.float64).tolist() == [0.9, 0.5, 1.0]
        assert limits.start % ALIGNMENT == shares.start % ALIGNMENT == 0


@given(st.lists(st.integers(0, 9)), st.lists(st.lists(st.integers(0, 9))))
def test_a_history_counts_what_the_output_has_got_since(
    prompt: list[int], pieces: list[list[int]]
) -> None:
    output: list[int] = []
    history = History(prompt, output)
    for piece in pieces:
        output += piece
        counts = {id: IN_PROMPT for id in prompt}
        for token in output:
            counts[token] = counts.get(token, 0) + 1
        pairs = history.pairs().tolist()
        assert len(pairs) == len(counts) and dict(map(tuple, pairs)) == counts
