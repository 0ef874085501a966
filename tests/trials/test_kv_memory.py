"""The cache takes what the formula says, little of it is wasted, and layers with a window keep it and a page."""

import pytest

from tests.trials.kv_memory import SHAPES, allocated_bytes_per_token, history

PUBLISHED = {"StarCoderBase-1B": 12_288, "Falcon-7B": 8_192, "Gemma-2B": 18_432, "Gemma-3-270m": 18_432, "Gemma-3-1b": 26_624}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_the_bytes_of_the_formula(name: str) -> None:
    assert allocated_bytes_per_token(SHAPES[name]) == SHAPES[name].bytes_per_token == PUBLISHED.get(name, 27 * 576 * 2)


@pytest.mark.parametrize("name", ["StarCoderBase-1B", "Gemma-3-270m"])
def test_at_most_4_percent_of_the_slots_are_wasted(name: str) -> None:
    result = history(SHAPES[name], 200)
    assert result["wasted"] <= 0.04
    assert result.get("most_kept_tokens", 0) <= result.get("bound", 0)
