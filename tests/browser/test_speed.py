"""The page's cost: its first paint and bytes, and 10,000 streamed tokens, of which the last cost no more than the first."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.support import Mode, expect, fake_answers, token_event
from tests.support.processes import ServerProcess

NUM_TOKENS, PART = 10_000, 1_000
MAX_BYTES = 150_000
FIRST_PAINT_SECONDS = 1.0


def test_the_first_paint_and_the_bytes(open_page: OpenPage, server: ServerProcess) -> None:
    """In a browser that has nothing in its cache."""
    page = open_page(server.port, "live")
    sizes: dict[str, int] = {}
    page.on("requestfinished", lambda request: sizes.update({request.url: request.sizes()["responseBodySize"]}))
    page.goto(f"http://127.0.0.1:{server.port}/")
    expect(page.locator("#panel-complete [name=max_tokens]")).to_be_visible()
    expect(page.locator("#model .name")).to_have_text("embedded")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    page_bytes = sum(size for url, size in sizes.items() if not url.endswith(("/openapi.json", "/v1/models")))
    print(f"first paint {paint * 1000:.0f} ms, {page_bytes} bytes in {len(sizes)} requests, {sum(sizes.values())} with the API's answers")
    assert paint < FIRST_PAINT_SECONDS
    assert 20_000 < page_bytes <= MAX_BYTES


def work_of(page: Any) -> Callable[[], float]:
    """Gives the seconds that the page's main thread has worked so far."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def seconds() -> float:
        return float(
            next(metric["value"] for metric in session.send("Performance.getMetrics")["metrics"] if metric["name"] == "TaskDuration")
        )

    return seconds


@pytest.mark.parametrize("line", [12, NUM_TOKENS], ids=["lines", "one line"])
def test_ten_thousand_tokens_do_not_slow_it_down(open_page: OpenPage, server: ServerProcess, line: int) -> None:
    events = []
    for number in range(NUM_TOKENS):
        text = "\n" if number % line == line - 1 else f" word{number % 97}"
        events.append(token_event(text, -(number % 60) / 10, {text: -0.3, " a": -2, " b": -3, " c": -4, " d": -5}))
    page = open_page(server.port, script=fake_answers(events, per_read=10, pause=4), viewport={"width": 1280, "height": 800})
    mode = Mode(page, "complete").write("x")
    seconds, tokens = work_of(page), mode.panel.locator(".t")
    mode.press("Run")
    at = [(0, seconds())]
    for end in (PART, NUM_TOKENS - PART, NUM_TOKENS - 1):
        expect(tokens.nth(end)).to_be_attached(timeout=50_000)
        at.append((tokens.count(), seconds()))
    mode.ended()
    first, _, last = [(after[1] - before[1]) / (after[0] - before[0]) * 1000 for before, after in pairwise(at)]
    print(f"ms of the main thread for each token: {first:.3f} in the first {PART}, {last:.3f} in the last")
    assert tokens.count() == NUM_TOKENS and json.dumps(mode.text()).count("word") == sum(
        "word" in event["choices"][0]["text"] for event in events
    )
    assert last < 2 * first
