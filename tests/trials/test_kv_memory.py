"""The cache takes what the formula says, little of it is wasted, and layers with a window keep it
and a page.
"""

import pytest

from tests.trials.kv_memory import SPECS, allocated_bytes_per_token, history

PUBLISHED = {
    "starcoderbase-1b": 12_288,
    "falcon-7b": 8_192,
    "gemma-2b": 18_432,
    "gemma-3-270m": 18_432,
    "gemma-3-1b": 26_624,
    "gemma-4-e2b": 18_432,
}
PUBLISHED |= {"deepseek-v2-lite": 27 * 576 * 2}


@pytest.mark.parametrize("name", SPECS)
def test_a_token_takes_the_bytes_of_the_formula(name: str) -> None:
    assert (
        allocated_bytes_per_token(SPECS[name])
        == SPECS[name].kv_bytes_per_token(2)
        == PUBLISHED[name]
    )


@pytest.mark.parametrize("name", ["starcoderbase-1b", "gemma-3-270m"])
def test_at_most_4_percent_of_the_slots_are_wasted(name: str) -> None:
    result = history(SPECS[name], 200)
    assert result["wasted"] <= 0.04
    assert result.get("most_kept_tokens", 0) <= result.get("bound", 0)
