"""The page's cost: its first paint and bytes, and 10,000 streamed tokens, of which the last cost no
more than the first.
"""

from collections.abc import Callable
from statistics import median
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
    # The browser asks for /favicon.ico.
    page = open_page(server.port, "live", expected=("status of 404",))
    sizes: dict[str, int] = {}
    page.on(
        "requestfinished",
        lambda request: sizes.update({request.url: request.sizes()["responseBodySize"]}),
    )
    page.goto(f"http://127.0.0.1:{server.port}/")
    expect(page.locator("#panel-complete [name=max_tokens]")).to_be_visible()
    expect(page.locator("#model .name")).to_have_text("embedded")
    paint = (
        page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    )
    # The page's own; the OpenAPI document that it reads is the API's.
    num_bytes = sum(size for url, size in sizes.items() if url == page.url or "/ui/" in url)
    print(f"first paint {paint * 1000:.0f} ms, {num_bytes} bytes in {len(sizes)} requests")
    assert paint < FIRST_PAINT_SECONDS
    assert 20_000 < num_bytes <= MAX_BYTES


def work_of(page: Any) -> Callable[[], float]:
    """Gives the seconds of processor time that the page's main thread has worked so far."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds() -> float:
        return float(
            next(
                metric["value"]
                for metric in session.send("Performance.getMetrics")["metrics"]
                if metric["name"] == "TaskDuration"
            )
        )

    return seconds


@pytest.mark.parametrize("line", [12, NUM_TOKENS], ids=["lines", "one line"])
def test_ten_thousand_tokens_do_not_slow_it_down(
    open_page: OpenPage, server: ServerProcess, line: int
) -> None:
    """The main thread's time for each of the first thousand tokens and of the last; nothing looks
    at the page meanwhile.
    """
    events = []
    for number in range(NUM_TOKENS):
        text = "\n" if number % line == line - 1 else f" word{number % 97}"
        events.append(
            token_event(
                text, -(number % 60) / 10, {text: -0.3, " a": -2, " b": -3, " c": -4, " d": -5}
            )
        )
    page = open_page(
        server.port,
        script=fake_answers(events, per_read=5, pause=4),
        viewport={"width": 1280, "height": 800},
    )
    mode = Mode(page, "complete").write("x")
    seconds = work_of(page)
    page.evaluate("window.limit = 0")
    mode.press("Run")
    spent = []
    for begin in range(0, NUM_TOKENS, PART):
        before = seconds()
        page.evaluate("(limit) => { window.limit = limit; }", begin + PART)
        while page.evaluate("window.given ?? 0") < begin + PART:
            page.wait_for_timeout(50)
        page.wait_for_timeout(200)  # Until they are drawn.
        spent.append((seconds() - before) / PART * 1000)
    mode.ended()
    print("ms of the main thread for each token, by thousands:", *(f"{part:.3f}" for part in spent))
    assert mode.panel.locator(".t").count() == NUM_TOKENS
    assert (
        mode.text() == "".join(event["choices"][0]["text"] for event in events)
        or line == NUM_TOKENS
    )
    assert median(spent[-3:]) < 2 * median(spent[:3])
