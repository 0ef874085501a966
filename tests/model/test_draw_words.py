"""What draws on a device read of samples: each number where the kernels look for it."""

import math
from dataclasses import replace

import numpy as np
import pytest
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
from model.step import Sample, Sampling, bitmap

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


def test_every_row_names_what_is_its_own() -> None:
    penalised = Sampling(
        0.8,
        5,
        0.9,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        logit_bias={7: 2.5, 9: 1.0},
        bad_words=[[9]],
    )
    samples = [
        Sample(penalised, [1, 2, 3], [4, 5]),
        Sample(Sampling(top_p=0.5), (), ()),
        Sample(
            Sampling(0.0, presence_penalty=0.5, allowed_tokens=bitmap([0, 69, 33])),
            [1],
            [6, 6],
            mask=bitmap([33, 32]),
        ),
        Sample(Sampling(0.0, allowed_tokens=bitmap([2])), (), ()),
    ]
    packed = pack_redraw([9, 4, 0, 2], samples, VOCABULARY)
    words, changes = packed.words, packed.words[:48].reshape(4, 12)
    assert changes[:, 0].tolist() == [9, 4, 0, 2] and packed.is_copied and not packed.typical
    assert [words[begin:end].tolist() for _, begin, end, *_ in changes.tolist()] == [
        [1, IN_PROMPT, 2, IN_PROMPT, 3, IN_PROMPT, 4, 1, 5, 1],
        [],
        [6, 2],
        [],
    ]
    begin, count = changes[0, 4:6]
    pairs = words[begin : begin + 2 * count].reshape(-1, 2)
    assert dict(
        zip(pairs[:, 0].tolist(), pairs[:, 1].copy().view(np.float32).tolist(), strict=True)
    ) == {7: 2.5, 9: -math.inf}
    assert not changes[1:, 5].any() and changes[[0, 1], 6].tolist() == [-1, -1]
    masks = [
        np.unpackbits(words[at : at + 3].view(np.uint8), bitorder="little").nonzero()[0].tolist()
        for at in changes[2:, 6]
    ]
    assert masks == [[33], [2]]
    assert changes[:, 8:11].copy().view(np.float32).tolist() == [
        [1.5, 0.25, 0.0],
        [0.0] * 3,
        [1.0, 0.0, 0.5],
        [1.0, 0.0, 0.0],
    ]
    assert words[packed.limits].reshape(-1, 4).tolist() == [[9, 0, 5, 0], [4, 1, 0, 0]]
    assert words[packed.shares].view(np.float64).tolist() == [0.9, 0.5] and packed.top_k == 5
    assert all(
        at % ALIGNMENT == 0
        for at in (
            *changes[:, 1],
            *changes[:, 4],
            *changes[2:, 6],
            packed.limits.start,
            packed.shares.start,
        )
    )


def test_rows_with_filters_alone_draw_from_the_models_logits() -> None:
    packed = pack_redraw(
        [3, 8], [Sample(Sampling(top_k=2, seed=seed), (), ()) for seed in range(2)], VOCABULARY
    )
    assert not packed.is_copied and packed.words[packed.limits].reshape(-1, 4).tolist() == [
        [3, 3, 2, 0],
        [8, 8, 2, 0],
    ]
    typical = pack_redraw(
        [3, 8],
        [Sample(Sampling(top_k=2), (), ()), Sample(Sampling(top_k=2, typical_p=0.5), (), ())],
        VOCABULARY,
    )
    assert (
        typical.is_copied
        and typical.typical == [1]
        and typical.words[typical.limits].tolist() == [3, 0, 2, 0]
    )


def test_a_mask_is_shared_by_the_rows_that_have_it() -> None:
    mask = bitmap(range(0, 70, 2))
    samples = [Sample(replace(Sampling(), seed=seed), (), (), mask=mask) for seed in range(3)]
    assert len(set(pack_redraw(range(3), samples, VOCABULARY).words[:36].reshape(3, 12)[:, 6])) == 1


def test_an_id_beyond_32_bits_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_redraw([0], [Sample(Sampling(logit_bias={2**40: 1.0}), (), ())], VOCABULARY)


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
