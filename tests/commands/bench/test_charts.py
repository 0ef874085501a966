"""Axes and line charts."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands.bench.charts import BOTTOM, HEIGHT, LEFT, MAX_TICKS, RIGHT, TOP, WIDTH, Series, line_chart, linear, logarithmic, ordinal

SVG = "{http://www.w3.org/2000/svg}"
POSITIVE = st.floats(1e-6, 1e6)


def drawn(markup: str) -> ElementTree.Element:
    """The picture, which must be well-formed."""
    return ElementTree.fromstring(str(markup).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_a_linear_axis_holds_its_values(values: list[float]) -> None:
    axis = linear("", values, str)
    assert axis.low == 0 and axis.high >= max(values) * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 2 * MAX_TICKS
    assert all(0 <= axis.place(value) <= 1 for value in values)


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_a_logarithmic_axis_holds_its_values_but_for_the_smallest(values: list[float]) -> None:
    axis = logarithmic("", values, str)
    assert axis.low < axis.high and axis.high > max(values)
    assert 1 <= len(axis.ticks) <= 2 * MAX_TICKS
    places = [axis.place(value) for value in sorted(values)]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 1
    assert axis.low <= max(min(values), max(values) / 1e4) * (1 + 1e-9)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_axes_without_values_are_axes(values: list[float]) -> None:
    assert linear("", values, str).high > 0
    assert logarithmic("", values, str).high > logarithmic("", values, str).low


def test_ticks_are_round_numbers() -> None:
    assert [words for _, words in linear("", [1273.0], "{:g}".format).ticks] == ["0", "500", "1000", "1500"]
    assert [value for value, _ in logarithmic("", [0.007, 0.4], str).ticks] == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
    assert [value for value, _ in logarithmic("", [0.001, 9.0], str).ticks] == [
        0.001,
        0.002,
        0.005,
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
    ][::3]


def test_a_chart_has_its_points_where_they_belong() -> None:
    series = [Series("now", ((0, 0.0), (1, 50.0), (2, 100.0)), 0), Series("earlier", ((0, 100.0),), 9, is_earlier=True)]
    picture = drawn(line_chart("what it is", series, ordinal("clients", ["1", "8", "32"]), linear("tokens/s", [100.0], str)))
    assert picture.get("aria-label") == "what it is"
    first, second = picture.iter(f"{SVG}polyline")
    across = [float(place.split(",")[0]) for place in first.get("points", "").split()]
    up = [float(place.split(",")[1]) for place in first.get("points", "").split()]
    assert up == [HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2, TOP]
    assert across[1] - across[0] == pytest.approx((WIDTH - LEFT - RIGHT) / 3, abs=0.2) and across[1] == (LEFT + WIDTH - RIGHT) / 2
    assert (first.get("class"), second.get("class")) == ("s0", "s1 earlier")
    assert [title.text for title in picture.iter(f"{SVG}title")] == ["now: 1, 0.0", "now: 8, 50", "now: 32, 100.0", "earlier: 1, 100.0"]


def test_texts_are_escaped() -> None:
    bad = '"><script>alert(1)</script>'
    picture = drawn(line_chart(bad, [Series(bad, ((0, 1.0),), 0)], ordinal(bad, [bad]), linear(bad, [1.0], lambda _: bad)))
    assert {element.tag.removeprefix(SVG) for element in picture.iter()} == {"svg", "line", "text", "polyline", "circle", "title"}
    assert picture.get("aria-label") == bad
