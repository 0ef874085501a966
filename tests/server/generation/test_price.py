"""The price of a request: what it sends and holds grows with its sequences, and bounds name what
makes it.
"""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from server.errors import InvalidRequest
from server.generation.price import MAX_LOGPROBS, MAX_SENT_IDS, MAX_TOP, Price, price
from server.protocol import Sampling, Submit

SUBMIT = Submit(
    id=0,
    prompt=[1] * 10,
    output=[],
    max_new_tokens=5,
    min_new_tokens=0,
    stop_token_ids=[1, 2],
    sampling=Sampling(),
)


def of(
    count: int = 1, capacity: int = 100, sampling: Sampling | None = None, **changes: Any
) -> Price:
    submit = msgspec.structs.replace(SUBMIT, sampling=sampling or Sampling(), **changes)
    return price([submit] * count, capacity)


def test_tokens_and_ids_count_for_every_sequence() -> None:
    assert of() == Price(tokens=15, prompt_tokens=10, sent_ids=12, logprobs=0)
    sampling = Sampling(logit_bias={3: 1.0}, bad_words=[[1, 2], [3]], logprob_token_ids=[7])
    assert of(4, sampling=sampling).sent_ids == 4 * (10 + 2 + 1 + 3 + 1)
    assert of(4).tokens == 60


def test_logprobs_count_where_they_are_asked_for() -> None:
    assert of(3, num_top=4).logprobs == 3 * 5 * 5
    assert of(3, score_prompt=True).logprobs == 3 * 10
    assert of(3, score_prompt=True, num_top=4).logprobs == 3 * 15 * 5
    assert of(sampling=Sampling(logprob_token_ids=[1, 2, 3])).logprobs == 4 * 5


def test_only_sequences_that_score_the_prompt_count_it() -> None:
    scored = msgspec.structs.replace(SUBMIT, score_prompt=True)
    assert price([scored, SUBMIT, SUBMIT], 100).logprobs == 10


def test_bounds_say_what_makes_the_price_and_the_bound() -> None:
    words = replace(Sampling(), bad_words=[[1] * 256] * 256)
    with pytest.raises(
        InvalidRequest, match=rf"`bad_words`.* {64 * (12 + 2**16)} ids.* {MAX_SENT_IDS} "
    ) as raised:
        of(64, sampling=words)
    assert raised.value.param == "n"
    with pytest.raises(InvalidRequest, match=rf"`prompt_logprobs`.* {MAX_LOGPROBS} ") as raised:
        of(128, max_new_tokens=1000, num_top=20)
    assert raised.value.param == "logprobs"


def test_one_sequence_over_the_whole_context_may_have_all_its_logprobs() -> None:
    capacity = MAX_LOGPROBS
    assert (
        of(
            capacity=capacity,
            prompt=[1],
            max_new_tokens=capacity - 1,
            score_prompt=True,
            num_top=MAX_TOP,
        ).logprobs
        > MAX_LOGPROBS
    )
    with pytest.raises(InvalidRequest):
        of(2, capacity=capacity, prompt=[1], max_new_tokens=capacity - 1, num_top=MAX_TOP)
