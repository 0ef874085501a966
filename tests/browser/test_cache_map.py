"""The tab "Cache": the page map and what is around it, on real servers under load."""

import hashlib
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.browser.cache_load import SHARED_PREFIX, Load, Viewer, dump_of, state_of, stats_of
from tests.browser.conftest import OpenPage
from tests.browser.support import TIMEOUT, CuttingProxy, expect, violations
from tests.browser.test_injections import CORPUS, check_nothing_ran
from tests.support.processes import ServerProcess, kill, wait_until

SMALL = ("--cache.pages", "48", "--engine.max_running", "12")
"""So few pages that sequences are preempted."""
LOST = ("net::ERR_", "status of 50[0-9]", "status of 429")
"""What a browser logs where a connection is taken away."""
RECORDS = """
window.states = new Map();
document.addEventListener("cachechange", ({ detail: state }) => {
  const pages = Array.from(state.kinds, (kind, page) => [kind, state.owners[page],
  state.positions[page]]);
  const values = (one) => [one.state === "running", one.numComputed, one.numOutput, one.numPages];
  const sequences = [...state.sequences.values()].map((one) => [one.id, values(one)]);
  window.latest = state;
  window.states.set(`${state.engine} ${state.view}`, JSON.stringify({ pages, sequences: Object.fromEntries(sequences) }));
  if (window.states.size > 200) window.states.delete(window.states.keys().next().value);
}, true);
"""  # noqa: E501
"""Keeps the latest states that the page held, each as it was right after an event."""
LONG = {"max_new_tokens": 300, "ignore_eos": True}
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def small(embedded_folder: Path) -> Iterator[ServerProcess]:
    """A server with a small cache."""
    server = ServerProcess(embedded_folder, *SMALL)
    yield server
    assert server.stop() == 0


@pytest.fixture
def open_map(open_page: OpenPage) -> OpenPage:
    """Opens the tab, of which states are recorded, and waits until it is live."""

    def open_one(port: int, **options: Any) -> Any:
        page = open_page(port, "#cache", script=RECORDS, **({"viewport": WIDE} | options))
        expect(page.locator(".monitor .status")).to_contain_text("Live")
        until(page, "window.latest")
        return page

    return open_one


def until(page: Any, script: str, argument: Any = None) -> Any:
    """The first true value of a script. Playwright's own wait evaluates text within the page, which
    the page's policy forbids.
    """
    for _ in range(TIMEOUT // 20):
        if value := page.evaluate(script, argument):
            return value
        page.wait_for_timeout(20)
    raise AssertionError(f"not in time: {script}")


def compare(page: Any, server: ServerProcess) -> dict[str, Any]:
    """Compares the page's state with the engine's at one moment, which it waits for. Returns the
    engine's.
    """
    dump = dump_of(server)
    held = until(page, "(key) => window.states.get(key)", f"{dump['engine']} {dump['view']}")
    state = state_of(dump)
    assert json.loads(held) == state
    return state


@pytest.mark.parametrize(
    "moments", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_the_map_is_the_engines_own_state(
    small: ServerProcess, open_map: OpenPage, moments: int
) -> None:
    page, rng, seen = open_map(small.port), random.Random(moments), Counter[str]()
    before = small.metric("onehead_preemptions_total")
    with Load(small, 16) as load:
        for _ in range(moments):
            page.wait_for_timeout(rng.uniform(0, 100))
            state = compare(page, small)
            seen.update(str(kind) for kind in {kind for kind, _, _ in state["pages"]})
            seen.update(
                "waits" if not running else "runs" for running, *_ in state["sequences"].values()
            )
    print(
        f"{moments} moments, {load.cancelled} cancelled, "
        f"{small.metric('onehead_preemptions_total') - before:.0f} preemptions; {dict(seen)}"
    )
    assert load.cancelled > 0
    assert small.metric("onehead_preemptions_total") > before
    assert {"1", "2", "3", "runs", "waits"} <= seen.keys()
    wait_until(lambda: not compare(page, small)["sequences"], "all requests have ended")


def test_ten_viewers_see_the_same(small: ServerProcess, open_map: OpenPage) -> None:
    with ExitStack() as stack:
        readers = [stack.enter_context(Viewer(small)) for _ in range(9)]
        page = open_map(small.port)
        stack.enter_context(Load(small, 4))
        for _ in range(5):
            compare(page, small)
        for reader in readers:
            reader.wait_for(20)


def test_a_viewer_too_many_is_told_and_comes_in_later(
    tiny_folder: Path, open_page: OpenPage
) -> None:
    with ServerProcess(tiny_folder) as server:
        with ExitStack() as stack:
            viewers = [stack.enter_context(Viewer(server)) for _ in range(64)]
            assert {viewer.status for viewer in viewers} == {200}
            page = open_page(server.port, "#cache", expected=LOST)
            expect(page.locator(".monitor .status")).to_contain_text(
                "Reconnecting: 64 viewers watch this server"
            )
        expect(page.locator(".monitor .status")).to_contain_text("Live")
        page.close()  # It would miss the server.


def test_it_reconnects_after_the_engine_was_killed(
    embedded_folder: Path, open_map: OpenPage
) -> None:
    with ServerProcess(embedded_folder, *SMALL) as server:
        page = open_map(server.port)
        with Load(server, 6):
            until(page, "window.latest.sequences.size > 3")
            kill(server.engine_pid)
            expect(page.locator(".monitor .status")).to_have_text(
                "Live, engine restarts: 1", timeout=60_000
            )
            until(page, "window.latest.engine === 1")
            compare(page, server)
        page.close()  # It would miss the server.


def test_it_reconnects_after_the_connection_was_cut(
    small: ServerProcess, open_map: OpenPage
) -> None:
    with CuttingProxy(small.port) as proxy, Load(small, 4):
        page = open_map(proxy.port)
        page.watch.expected += LOST
        proxy.cut()
        expect(page.locator(".monitor .status")).to_contain_text("Reconnecting")
        page.evaluate("window.states.clear()")
        proxy.mend()
        expect(page.locator(".monitor .status")).to_contain_text("Live")
        until(page, "window.states.size")
        compare(page, small)


def test_it_reconnects_where_nothing_comes_any_more(
    small: ServerProcess, open_map: OpenPage
) -> None:
    page = open_map(small.port)
    small.process.send_signal(signal.SIGSTOP)
    try:
        expect(page.locator(".monitor .status")).to_contain_text(
            "Reconnecting: nothing has come for 10 s", timeout=30_000
        )
    finally:
        small.process.send_signal(signal.SIGCONT)
    expect(page.locator(".monitor .status")).to_contain_text("Live")


def test_without_a_key_the_map_waits_for_one(tiny_folder: Path, open_page: OpenPage) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    with ServerProcess(tiny_folder, "--server.api_keys", digest) as server:
        page = open_page(server.port, "#cache", expected=("status of 401",))
        dialog, status = page.locator("dialog#key"), page.locator(".monitor .status")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(status).to_have_text("An API key is needed: Enter key, above")
        page.wait_for_timeout(1500)  # Longer than the stream would wait before it is opened again.
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#panel-chat").get_by_role("alert")).to_have_text(
            "An API key is needed: Enter key, above."
        )
        page.get_by_role("link", name="Cache").click()
        expect(status).to_contain_text("An API key is needed")
        expect(dialog).to_be_hidden()  # What runs by itself does not ask again.
        page.get_by_role("button", name="Enter key").click()
        page.locator("#key-value").fill("secret")
        page.keyboard.press("Enter")
        expect(status).to_contain_text("Live")
        expect(page.get_by_role("button", name="Enter key")).to_have_count(0)
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#panel-chat [name=max_tokens]")).to_be_visible()
        expect(page.locator("#panel-chat").get_by_role("alert")).to_have_count(0)
        page.close()  # It would miss the server.


def test_leaving_the_tab_ends_its_stream(small: ServerProcess, open_map: OpenPage) -> None:
    page = open_map(small.port)
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/monitor")):
        page.get_by_role("link", name="Chat").click()
    expect(page.locator(".monitor")).to_have_count(0)
    page.get_by_role("link", name="Cache").click()
    expect(page.locator(".monitor .status")).to_contain_text("Live")
    expect(page.locator(".monitor")).to_have_count(1)


def test_by_keyboard_a_sequence_is_found_and_followed(
    small: ServerProcess, open_map: OpenPage
) -> None:
    page = open_map(small.port)
    readout = page.locator(".monitor .readout")
    panel = page.get_by_role("region", name="Followed sequence")
    with closing(
        small.stream(SHARED_PREFIX, "/generate_stream", max_new_tokens=1500, ignore_eos=True)
    ) as stream:
        events = stream.events()
        next(events)
        until(page, "window.latest.sequences.size === 1")
        owned = until(page, "window.latest.kinds.findIndex((kind) => kind === 2) + 1") - 1
        page.get_by_role("application").focus()
        page.keyboard.press("Home")
        expect(readout).to_contain_text("Page 0: ")
        for _ in range(owned):
            page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text(
            re.compile(rf"Page {owned}: sequence \d+ of request .+, tokens \d+ to \d+, generation")
        )
        page.keyboard.press("Enter")
        expect(panel).to_contain_text(re.compile(r"generation \d+\.\d s\. Prompt of \d+ tokens"))
        page.keyboard.press("End")
        expect(readout).to_contain_text("Page 47: ")
        page.keyboard.press("Escape")
        expect(panel).to_contain_text("Choose a sequence")
        page.keyboard.press("Tab")  # To the table's region, and its first row.
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(panel).to_contain_text("Sequence ")
        stream.close()
    expect(panel).to_contain_text("then ended")
    expect(page.locator(".monitor tbody tr")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_accessible_and_fits(
    small: ServerProcess, open_map: OpenPage, scheme: str, width: int
) -> None:
    page = open_map(small.port, viewport={"width": width, "height": 800}, color_scheme=scheme)
    with Load(small, 8):
        until(page, "document.querySelectorAll('.monitor tbody tr').length > 4")
        page.locator(".monitor tbody button").first.click()
        assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_is_that_of_the_canvases_too(small: ServerProcess, open_map: OpenPage) -> None:
    page = open_map(small.port, color_scheme="light")
    drawn = "[...document.querySelectorAll('.monitor canvas')].map((canvas) => canvas.toDataURL())"
    light = until(page, drawn)
    page.locator("#theme").click()  # From the system's to light, which changes nothing.
    page.locator("#theme").click()
    until(page, f"(before) => {drawn}.every((now, i) => now !== before[i])", light)


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_what_was_just_written_is_marked_unless_motion_is_reduced(
    small: ServerProcess, open_map: OpenPage, motion: str
) -> None:
    page = open_map(small.port, reduced_motion=motion, color_scheme="dark")
    page.evaluate(COUNT_INK)
    with closing(small.stream("x", "/generate_stream", **LONG)) as stream:
        for _ in stream.events():
            pass
    until(page, "window.looks > 10")
    assert (page.evaluate("window.marked") > 0) == (motion == "no-preference")


COUNT_INK = """
window.looks = window.marked = 0;
const canvas = document.querySelector(".monitor canvas");
const probe = document.createElement("i");
probe.style.color = "var(--ink)";
document.body.append(probe);
const ink = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
const look = () => {
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += ink.every((value, at) => data[i + at] === value);
  window.looks += 1;
  window.marked = Math.max(window.marked, count);
  requestAnimationFrame(look);
};
look();
"""  # noqa: E501
"""Counts the pixels in the colour of the mark, frame by frame."""


def test_texts_of_the_stream_are_text(small: ServerProcess, open_page: OpenPage) -> None:
    """Ids of requests, which clients choose, and the names of model, device and status: what a
    server refuses or never has, too.
    """
    stats, body = stats_of(small), ""
    # The browser asks for /favicon.ico.
    page = open_page(small.port, "ui/icon.svg", expected=("status of 404",))
    page.route(
        "**/monitor", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    page.route(
        "**/v1/models",
        lambda route: route.fulfill(json={"data": [{"id": "m", "max_model_len": 1}]}),
    )
    rows = [[id, text, "running", 1, 0, 1, 0, 1, 0] for id, text in enumerate(CORPUS)]
    cells = [number for id in range(len(CORPUS)) for number in (id, 1, 2, id, 0)]
    head = {
        "engine": 0,
        "step": 0,
        "view": 1,
        "num_pages": len(CORPUS),
        "page_size": 64,
        "cells": cells,
    }
    cache = json.dumps(head | {"sequences": rows})
    for text in CORPUS[::23]:
        named = json.dumps(stats | {"model": text, "device": text, "status": text})
        body = f"event: stats\ndata: {named}\n\nevent: cache\ndata: {cache}\n\n"
        page.goto(f"http://127.0.0.1:{small.port}/#cache")
        page.reload()
        listed = page.locator(".monitor tbody tr")
        expect(listed).to_have_count(len(CORPUS))
        assert page.locator(".monitor tbody tr > :nth-child(2)").all_text_contents() == CORPUS
        assert text in (page.locator(".monitor .row > .quiet").text_content() or "")
        for number in range(3):
            listed.nth(50 * number).get_by_role("button").click()
            assert CORPUS[50 * number] in (
                page.get_by_role("region", name="Followed sequence").text_content() or ""
            )
        page.get_by_role("application").focus()
        expect(page.locator(".monitor .readout")).to_contain_text("Page 0: sequence 0")
        check_nothing_ran(page)


CHANGES = """async (events) => {
  const { CacheState } = await import(new URL("ui/cache-state.js", document.baseURI).href);
  const state = new CacheState();
  const head = { engine: 0, num_pages: 0, page_size: 64, cells: [], sequences: [] };
  for (const event of events) state.apply({ ...head, ...event }, 0);
  return [...state.sequences.values()].map(({ id, hue, phases }) => [id, hue, phases.map(({ phase }) => phase)]);
}"""  # noqa: E501
"""Applies cache events. Returns each open sequence's id, hue and phases."""


def row_of(id: int, state: str = "running") -> list[Any]:
    return [id, "r", state, 1, 0, 1, 1, 1, 0]


def test_open_sequences_have_different_hues_as_long_as_there_are_some(page: Any) -> None:
    first = {"view": 1, "sequences": [row_of(8 * number) for number in range(8)]}
    assert sorted(hue for _, hue, _ in page.evaluate(CHANGES, [first])) == [*range(8)]
    later = {"view": 2, "sequences": [row_of(8 * number) for number in (0, 1, 2, 4, 5, 6, 7, 8)]}
    held = dict([id, hue] for id, hue, _ in page.evaluate(CHANGES, [first]))
    now = dict([id, hue] for id, hue, _ in page.evaluate(CHANGES, [first, later]))
    assert now == {id: hue for id, hue in held.items() if id != 24} | {64: held[24]}
    last = {"view": 3, "sequences": [*map(row_of, now)]}
    assert now == dict([id, hue] for id, hue, _ in page.evaluate(CHANGES, [first, later, last]))


def test_a_waiting_sequence_that_is_no_longer_listed_may_come_back(page: Any) -> None:
    waiting = row_of(5, "preempted")
    events = [
        {"view": 1, "sequences": [row_of(5)]},
        {"view": 2, "sequences": [waiting]},
        {"view": 3},
    ]
    (found,) = page.evaluate(CHANGES, [*events, {"view": 4, "sequences": [waiting]}])
    assert found[2] == ["generation", "preempted", "ended or not listed", "preempted"]


def test_the_numbers_of_pages_are_the_same_everywhere(
    small: ServerProcess, open_map: OpenPage
) -> None:
    page = open_map(small.port)
    read = """() => {
      const number = (selector) => Number(/\\d+/.exec(document.querySelector(selector).textContent)[0]);
      const [pages] = [...document.querySelectorAll(".plots section")].filter((one) => one.querySelector("h2").textContent === "Pages");
      const [owned, cached] = [...pages.querySelectorAll("p span")].map((span) => Number(/\\d+/.exec(span.textContent)[0]));
      const kinds = [0, 1, 2, 3].map((kind) => number(`.keys-of-map [data-kind="${kind}"]`));
      return [number(".monitor h2"), owned, kinds[2] + kinds[3], cached - kinds[1]];
    }"""  # noqa: E501
    with Load(small, 8):
        until(page, "window.latest.sequences.size > 3")
        for _ in range(100):
            owned, plotted, listed, difference = page.evaluate(read)
            assert owned == plotted == listed and difference == 0
            page.wait_for_timeout(25)


def test_a_hundred_thousand_pages_stay_smooth(tiny_folder: Path, open_page: OpenPage) -> None:
    """Of the processor's time, with what the browser does beside, most is left over at ten events a
    second.
    """
    with ServerProcess(tiny_folder, "--cache.pages", "100000") as server, Load(server, 8):
        page = open_page(server.port, "#cache", script=COUNT_EVENTS, viewport=WIDE)
        until(page, "window.events > 5")  # The first draw of all cells is over.
        page.evaluate("window.events = 0; window.tasks = []")
        until(page, "window.events > 50")
        events, tasks = page.evaluate("[window.events, window.tasks]")
        print(f"{events} events, tasks longer than 50 ms: {[round(task) for task in tasks]}")
        assert page.evaluate("document.querySelector('.monitor canvas').width") > 0
        assert sum(tasks) / events < 50
        page.close()  # It would miss the server.


COUNT_EVENTS = """
window.events = 0;
window.tasks = [];
document.addEventListener("cachechange", () => (window.events += 1), true);
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
"""  # noqa: E501


def test_quantiles_are_those_of_the_values_between_two_events(
    small: ServerProcess, open_map: OpenPage
) -> None:
    page = open_map(small.port)
    # Ten values up to 2, then ten up to 4, as bounds are 1, 2 and 4.
    before = [5, 5, 5, 5]
    after = [5, 15, 15, 5]
    script = (
        "async (counts) => (await import(new URL('ui/plots.js', "
        "document.baseURI).href)).quantile(...counts)"
    )
    histograms = [{"bounds": [1, 2, 4], "counts": counts} for counts in (before, after)]
    found = [page.evaluate(script, [*histograms, share]) for share in (0.25, 0.5, 0.75, 1.0)]
    assert found == [1.5, 2, 3, 4]
    assert page.evaluate(script, [histograms[0], histograms[0], 0.5]) is None
    assert (
        page.evaluate(script, [histograms[0], {"bounds": [1, 2, 4], "counts": [5, 5, 5, 6]}, 0.5])
        == 4
    )
