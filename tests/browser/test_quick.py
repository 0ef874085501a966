"""What `scripts/browser quick` runs: each mode once, at a desk's and at phones' widths, and what
the page promises at first sight.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from server.protocol import OWNED
from tests.browser.cache_load import stats_of
from tests.browser.conftest import OpenPage
from tests.browser.support import MODES, Mode, check_width, expect, fake_answers, violations
from tests.support.processes import ServerProcess

DESK = {"width": 1280, "height": 800}
WIDTHS = (320, 360, 390, 768)


def check_widths(page: Any) -> None:
    """Nothing is beside the window of any phone, in light; in dark axe looks at one of them."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 740})
        check_width(page, width)
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    # Colours on their way from light to dark are neither.
    page.wait_for_function(
        "() => document.getAnimations().every((each) => each.playState !== 'running')"
    )
    assert violations(page) == []


@pytest.mark.parametrize("name", MODES)
def test_each_mode_runs_and_fits_every_width(
    open_page: OpenPage, server: ServerProcess, name: str
) -> None:
    page = open_page(server.port, viewport=DESK, color_scheme="light", bypass_csp=True)
    mode = Mode(page, name).set(max_tokens=24, seed=7)
    if name == "chat":
        mode.write("Hello")
    assert mode.run().text() != ""
    assert violations(page) == []
    check_widths(page)


def test_the_cache_fits_every_width(open_page: OpenPage, server: ServerProcess) -> None:
    page = open_page(server.port, "#cache", viewport=DESK, color_scheme="light", bypass_csp=True)
    expect(page.locator(".monitor .status")).to_contain_text("Live")
    expect(page.locator("#panel-cache h2").first).to_contain_text("owned")
    check_widths(page)


# Parameters


def serving(page: Any, port: int, **model: Any) -> None:
    """Loads the page, whose server says this about its model."""
    entry = {"id": "m", "max_model_len": 4096} | model
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [entry]}))
    page.goto(f"http://127.0.0.1:{port}/")


@pytest.fixture
def blank(open_page: OpenPage, server: ServerProcess) -> Any:
    """A page that has not loaded the playground yet."""
    return open_page(server.port, "ui/icon.svg", expected=("status of 404",))  # /favicon.ico.


def test_defaults_are_the_checkpoints_and_reset_gives_them_back(
    blank: Any, server: ServerProcess
) -> None:
    serving(blank, server.port, default_sampling_params={"temperature": 0.7, "top_k": 40})
    mode = Mode(blank, "complete")
    temperature = mode.field("temperature")
    expect(temperature).to_have_value("")
    expect(temperature).to_have_attribute("placeholder", "0.7")
    expect(mode.panel.get_by_label("temperature, slider")).to_have_value("0.7")
    expect(mode.field("top_k")).to_have_attribute("placeholder", "40")
    expect(mode.panel.locator(".settings")).to_contain_text("Defaults are the checkpoint's.")
    mode.set(temperature=1.5, max_tokens=3, top_k=9).press("Reset all")
    for name, value in (("temperature", ""), ("max_tokens", "128"), ("top_k", "")):
        expect(mode.field(name)).to_have_value(value)
    blank.reload()
    expect(Mode(blank, "complete").field("max_tokens")).to_have_value("128")


@pytest.mark.parametrize(("name", "tokens"), [("complete", "128"), ("fill", "48"), ("chat", "256")])
def test_a_model_without_defaults_begins_calmly(page: Any, name: str, tokens: str) -> None:
    mode = Mode(page, name)
    expect(mode.field("temperature")).to_have_value("0.4")
    expect(mode.panel.locator(".settings")).to_contain_text("names no sampling parameters")
    mode.set(temperature="", max_tokens=7)
    page.reload()
    mode = Mode(page, name)
    expect(mode.field("temperature")).to_have_value("")  # It was taken away on purpose.
    expect(mode.field("max_tokens")).to_have_value("7")
    mode.set().panel.get_by_role("button", name="Reset max_tokens").click()
    expect(mode.field("max_tokens")).to_have_value(tokens)
    mode.set(top_p=0.5).press("Reset all")
    for field, value in (("temperature", "0.4"), ("max_tokens", tokens), ("top_p", "")):
        expect(mode.field(field)).to_have_value(value)


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("chat", "completion_chat", "This checkpoint has no chat template"),
        ("fill", "completion_fim", "no fill-in-the-middle tokens"),
    ],
)
def test_a_mode_that_the_model_lacks_says_so(
    blank: Any, server: ServerProcess, name: str, capability: str, words: str
) -> None:
    serving(blank, server.port, capabilities={capability: False})
    mode = Mode(blank, name).write("x")
    expect(mode.panel.get_by_text(words)).to_be_visible()
    verb = "Send" if name == "chat" else "Run"
    expect(mode.panel.get_by_role("button", name=verb, exact=True)).to_be_disabled()
    mode.panel.locator(".editor textarea").first.press("Control+Enter")
    mode.panel.locator(".editor textarea").first.press("Enter")
    expect(mode.panes).to_have_count(0)
    expect(Mode(blank, "complete").panel.get_by_text(words)).to_have_count(0)


# Chat


def delta(text: str) -> dict[str, Any]:
    """An event of /v1/chat/completions with one token."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


COMPOSED = """(area) => area.dispatchEvent(new KeyboardEvent("keydown",
  { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))"""


def test_enter_sends_and_shift_enter_breaks_the_line(
    open_page: OpenPage, server: ServerProcess
) -> None:
    script = fake_answers([delta("Hello.")], "v1/chat/completions")
    page = open_page(server.port, script=script, viewport=DESK)
    mode = Mode(page, "chat")
    area = mode.panel.locator(".editor textarea")
    area.press("Enter")
    area.type("  ")
    area.press("Enter")
    expect(mode.panes).to_have_count(0)  # There is nothing to send.
    area.fill("one")
    area.press("Shift+Enter")
    area.type("two")
    assert area.evaluate(COMPOSED)  # The input method's: it is not taken.
    expect(mode.panes).to_have_count(0)
    area.press("Enter")
    mode.ended()
    assert page.evaluate("window.sent.messages") == [{"role": "user", "content": "one\ntwo"}]
    expect(area).to_have_value("")
    area.type("three")
    area.press("Enter")
    mode.ended(2)
    assert page.evaluate("window.sent.messages.at(-1).content") == "three"


def test_enter_during_an_answer_keeps_the_draft(open_page: OpenPage, server: ServerProcess) -> None:
    script = fake_answers([delta("a"), delta("b")], "v1/chat/completions")
    page = open_page(server.port, script=f"window.limit = 1;{script}", viewport=DESK)
    mode = Mode(page, "chat").write("one")
    area = mode.panel.locator(".editor textarea")
    area.press("Enter")
    expect(mode.panes.locator(".output")).to_have_text("a")
    area.type("two")
    area.press("Enter")
    expect(area).to_have_value("two")
    page.evaluate("window.limit = 9")
    mode.ended()


def grown(page: Any, count: int) -> None:
    """Gives the stream so many events, and waits until they are drawn."""
    page.evaluate("(count) => { window.limit = count; }", count)
    expect(page.locator("#panel-chat .pane").last.locator(".t")).to_have_count(count)
    page.wait_for_timeout(100)


END = "document.querySelector('#panel-chat .stage').getBoundingClientRect().bottom - innerHeight"


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_follows_an_answer_unless_its_reader_scrolls_up(
    open_page: OpenPage, server: ServerProcess, width: int
) -> None:
    script = fake_answers([delta(f"line {n}\n") for n in range(200)], "v1/chat/completions")
    page = open_page(
        server.port, script=f"window.limit = 0;{script}", viewport={"width": width, "height": 740}
    )
    mode = Mode(page, "chat").write("Go").press("Send")
    grown(page, 60)
    assert page.evaluate("scrollY") > 300 and page.evaluate(END) < 4
    composer = mode.panel.locator(".composer").bounding_box()
    last = mode.panel.locator(".t").last.bounding_box()
    assert last["y"] + last["height"] <= composer["y"]  # It is read above the composer.
    page.mouse.move(100, 300)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(200)
    before = page.evaluate("scrollY")
    grown(page, 120)
    assert page.evaluate("scrollY") == before
    assert mode.panel.locator(".composer").bounding_box()["y"] < 740  # It stays in the window.
    page.mouse.wheel(0, 10_000)
    page.wait_for_timeout(200)
    grown(page, 180)
    assert page.evaluate(END) < 4
    page.evaluate("window.limit = 999")
    mode.ended()


# The server's state


def test_the_header_says_how_the_server_is(page: Any) -> None:
    header = page.locator("#model")
    expect(header).to_have_text(re.compile("embedded.*ready, context of 4,096 tokens"))
    colours = {}
    for state, status, body, words in (
        ("recovering", 200, {"status": "restarting after the engine crashed"}, "recovering"),
        ("recovering", 503, {"status": "restarting after the engine hung"}, "recovering"),
        ("draining", 503, {"status": "draining"}, "draining"),
        ("waiting", 503, {"status": "loading weights"}, "not ready"),
        ("unreachable", 502, None, "cannot be reached"),  # A proxy's own page.
        ("ready", 200, {"status": "ok"}, "ready"),
        ("unreachable", 0, None, "cannot be reached"),
    ):
        page.unroute_all()
        page.route("**/health", answering(status, body))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # It looks at once.
        expect(header).to_contain_text(words)
        expect(header).to_have_attribute("data-state", state)
        expect(page.locator("#model .name")).to_have_text("embedded")
        colours[state] = header.evaluate("(e) => getComputedStyle(e, '::before').backgroundColor")
    assert all(colour != colours["ready"] for state, colour in colours.items() if state != "ready")
    page.unroute_all()
    expect(header).to_have_attribute("data-state", "ready")  # By itself, within seconds.


def answering(status: int, body: Any) -> Callable[[Any], None]:
    """A handler that answers a request; status 0: with a broken connection."""
    if status == 0:
        return lambda route: route.abort()
    if body is None:
        return lambda route: route.fulfill(status=status, body="<h1>Bad gateway</h1>")
    return lambda route: route.fulfill(status=status, json=body)


# The cache


@pytest.fixture
def watching(blank: Any, server: ServerProcess) -> Callable[..., Any]:
    """Opens the tab on a cache of so many pages with four sequences, which own these pages."""

    def open_one(num_pages: int, owned: range, cached: range = range(0), **facts: Any) -> Any:
        stats = stats_of(server) | {"num_pages": num_pages, "page_bytes": 2**18} | facts
        cells = [n for page in owned for n in (page, 1, OWNED, page % 4, 0)]
        cells += [n for page in cached for n in (page, 1, 1, -1, 0)]
        rows = [[id, f"request-{id}", "running", 1, 0, 1, 0, 1, 0] for id in range(4)]
        cache: dict[str, Any] = {
            "engine": 0,
            "step": 0,
            "view": 1,
            "num_pages": num_pages,
            "page_size": 64,
        }
        cache |= {"cells": cells, "sequences": rows}
        body = "".join(
            f"event: {name}\ndata: {json.dumps(value)}\n\n"
            for name, value in (("stats", stats), ("cache", cache), ("stats", stats))
        )
        blank.route(
            "**/monitor", lambda route: route.fulfill(content_type="text/event-stream", body=body)
        )
        blank.set_viewport_size(DESK)
        blank.goto(f"http://127.0.0.1:{server.port}/#cache")
        expect(blank.locator(".monitor tbody tr")).to_have_count(4)
        return blank

    return open_one


CELL = """() => {
  document.querySelector(".monitor [role=application]").focus();
  return document.querySelector(".monitor .cursor").getBoundingClientRect().width;
}"""


@pytest.mark.parametrize(
    ("num_pages", "owned", "shown", "least"),
    [
        (4160, range(4), "Pages 0 to 255 of 4,160 pages", 20),
        (4160, range(300, 304), "Pages 0 to 511 of 4,160 pages", 14),
        (4160, range(100, 200), "Pages 0 to 511 of 4,160 pages", 14),  # 400 with multi-head.
        (4160, range(4100, 4104), "All 4,160 pages", 4),
        (100_000, range(4), "Pages 0 to 255 of 100,000 pages", 20),
        (48, range(4), "All 48 pages", 20),
    ],
)
def test_the_map_shows_the_part_in_use_and_its_scale(
    watching: Callable[..., Any], num_pages: int, owned: range, shown: str, least: int
) -> None:
    page = watching(num_pages, owned)
    card = page.locator(".monitor .card").first
    expect(card).to_contain_text(shown)
    expect(card).to_contain_text("A cell is a page: 64 tokens, 256\u00a0KiB.")
    expect(card).to_contain_text(f"{len(owned)} pages owned, {len(owned) / 4:g}\u00a0MiB")
    other = page.locator(".monitor .card").nth(1)
    expect(other).to_contain_text(f"{4 * len(owned)} pages, {len(owned)}\u00a0MiB")
    expect(other.locator(".frame span")).to_have_text("\u00d7 4")
    assert page.evaluate(CELL) >= least
    page.keyboard.press("End")
    last = int(re.findall(r"\d+", shown.replace(",", ""))[1 if "to" in shown else 0])
    expect(page.locator(".monitor .readout")).to_contain_text(
        f"Page {last if 'to' in shown else last - 1}:"
    )


def test_a_page_of_an_unknown_size_has_no_memory(watching: Callable[..., Any]) -> None:
    page = watching(4160, range(4), page_bytes=0)
    expect(page.locator(".monitor .card").first).to_contain_text("A cell is a page: 64 tokens.")
    expect(page.locator(".monitor .card").first).not_to_contain_text("iB")


def test_a_whole_row_is_chosen_by_pointer_and_by_keyboard(watching: Callable[..., Any]) -> None:
    page = watching(4160, range(4))
    panel = page.get_by_role("region", name="Followed sequence")
    row = page.locator(".monitor tbody tr").nth(2)
    for cell in (1, 2, 6, 0):
        row.locator("th, td").nth(cell).click()
        expect(panel).to_contain_text("Sequence 2 of request request-2")
        expect(row.get_by_role("button")).to_have_attribute("aria-pressed", "true")
        row.locator("th, td").nth(cell).click()
        expect(panel).to_contain_text("Choose a sequence")
    page.locator(".monitor .scroll").focus()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(panel).to_contain_text("Sequence 1 of request request-1")
    page.keyboard.press("Space")
    expect(panel).to_contain_text("Choose a sequence")
