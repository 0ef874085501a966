"""The price of a request: what it sends and holds grows with its sequences, and bounds name what
makes it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from server.errors import InvalidRequest
from server.generation import price
from server.generation.price import MAX_LOGPROBS, MAX_SENT_IDS, MAX_TOP, check_price
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


def check(
    count: int = 1, capacity: int = 0, sampling: Sampling | None = None, **changes: Any
) -> None:
    submit = msgspec.structs.replace(SUBMIT, sampling=sampling or Sampling(), **changes)
    check_price([submit] * count, capacity)


def is_bound(name: str, value: int, call: Callable[[], None]) -> None:
    """Checks that a call is allowed where a bound has this value, and not where it is one less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(price, name, value)
        call()
        patch.setattr(price, name, value - 1)
        with pytest.raises(InvalidRequest, match=rf"\b{value}\b.*\b{value - 1}\b"):
            call()


def test_ids_count_for_every_sequence() -> None:
    is_bound("MAX_SENT_IDS", 12, check)
    sampling = Sampling(logit_bias={3: 1.0}, bad_words=[[1, 2], [3]], logprob_token_ids=[7])
    is_bound("MAX_SENT_IDS", 4 * (10 + 2 + 1 + 3 + 1), partial(check, 4, sampling=sampling))


@pytest.mark.parametrize(
    ("count", "value", "changes"),
    [
        (3, 3 * 5 * 5, {"num_top": 4}),
        (3, 3 * 10, {"score_prompt": True}),
        (3, 3 * 15 * 5, {"score_prompt": True, "num_top": 4}),
        (1, 4 * 5, {"sampling": Sampling(logprob_token_ids=[1, 2, 3])}),
    ],
)
def test_logprobs_count_where_they_are_asked_for(
    count: int, value: int, changes: dict[str, Any]
) -> None:
    is_bound("MAX_LOGPROBS", value, partial(check, count, **changes))


def test_only_sequences_that_score_the_prompt_count_it() -> None:
    scored = msgspec.structs.replace(SUBMIT, score_prompt=True)
    is_bound("MAX_LOGPROBS", 10, partial(check_price, [scored, SUBMIT, SUBMIT], 0))


def test_bounds_say_what_makes_the_price_and_the_bound() -> None:
    words = replace(Sampling(), bad_words=[[1] * 256] * 256)
    with pytest.raises(
        InvalidRequest, match=rf"`bad_words`.* {64 * (12 + 2**16)} ids.* {MAX_SENT_IDS} "
    ) as raised:
        check(64, sampling=words)
    assert raised.value.param == "n"
    with pytest.raises(InvalidRequest, match=rf"`prompt_logprobs`.* {MAX_LOGPROBS} ") as raised:
        check(128, max_new_tokens=1000, num_top=20)
    assert raised.value.param == "logprobs"


def test_one_sequence_over_the_whole_context_may_have_all_its_logprobs() -> None:
    capacity = MAX_LOGPROBS
    asked: dict[str, Any] = {"prompt": [1], "max_new_tokens": capacity - 1, "num_top": MAX_TOP}
    check(capacity=capacity, score_prompt=True, **asked)
    with pytest.raises(InvalidRequest):
        check(2, capacity=capacity, **asked)
