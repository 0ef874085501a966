"""The page for everybody: WCAG 2.2 AA by axe-core, keyboard alone, a phone's width, both themes,
reduced motion.
"""

import re
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.support import MODES, Mode, check_width, expect, violations
from tests.support.processes import ServerProcess

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 800}


def filled(page: Any, name: str) -> Mode:
    mode = Mode(page, name).set(max_tokens=24, seed=7, temperature=2)
    for number in range(mode.panel.locator(".editor textarea").count()):
        mode.write("def add(a, b):\n    ", number)
    return mode.run()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", MODES)
def test_axe_finds_no_violation(
    open_page: OpenPage, server: ServerProcess, name: str, viewport: dict[str, int], scheme: str
) -> None:
    page = open_page(server.port, viewport=viewport, color_scheme=scheme, bypass_csp=True)
    Mode(page, name)
    assert violations(page) == []
    mode = filled(page, name)
    mode.panes.last.locator(".output").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    mode.panel.get_by_role("button", name="About temperature").click()
    mode.set(top_p=7).press("Regenerate")
    expect(mode.panel.get_by_role("alert")).to_be_visible()
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_in_dialogs(
    open_page: OpenPage, server: ServerProcess, scheme: str
) -> None:
    page = open_page(server.port, viewport=DESK, color_scheme=scheme, bypass_csp=True)
    mode = filled(page, "complete")
    for name in ("History", "Keyboard shortcuts"):
        page.get_by_role("button", name=name).click()
        assert violations(page) == []
        page.keyboard.press("Escape")
    mode.press("Code")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.evaluate("document.getElementById('key').showModal()")
    assert violations(page) == []


@pytest.mark.parametrize("name", MODES)
def test_a_phone_shows_everything_without_sideways_scrolling(
    open_page: OpenPage, server: ServerProcess, name: str
) -> None:
    page = open_page(server.port, viewport=PHONE, has_touch=True, is_mobile=True)
    mode = filled(page, name)
    check_width(page, PHONE["width"])
    mode.panel.locator(".t").nth(2).tap()
    card = page.locator(".token-card")
    expect(card).to_be_visible()
    box = card.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    for button in ("History", "Keyboard shortcuts"):
        page.get_by_role("button", name=button).tap()
        dialog = page.get_by_role("dialog").bounding_box()
        assert dialog["x"] >= 0 and dialog["x"] + dialog["width"] <= PHONE["width"]
        page.keyboard.press("Escape")


def test_the_theme_follows_the_system_and_a_button(
    open_page: OpenPage, server: ServerProcess
) -> None:
    def paper(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = open_page(server.port, color_scheme="light")
    dark = open_page(server.port, color_scheme="dark")
    assert paper(light) != paper(dark)
    button = dark.get_by_role("button", name=re.compile("Theme"))
    button.click()
    assert paper(dark) == paper(light)
    dark.reload()
    assert paper(dark) == paper(light)  # It is kept.
    button.click()
    assert paper(dark) != paper(light)
    button.click()
    expect(button).to_have_attribute("aria-label", "Theme: as the system. Change")


def test_everything_is_done_with_the_keyboard(page: Any, server: ServerProcess) -> None:
    """From the address bar to an output's third token, each stop visibly focused."""
    focused = (
        "() => { const box = document.activeElement; const style = getComputedStyle(box); "
        "return [box.tagName, style.outlineStyle]; }"
    )
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the playground")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Complete")).to_be_focused()
    page.keyboard.press("Tab")
    for panel in ("fill", "chat", "cache"):
        expect(page.locator(f"#tab-{panel}")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(f"#panel-{panel}")).to_be_visible()
        page.keyboard.press("Tab")
    page.locator("#tab-complete").press("Enter")
    expect(page.locator("#panel-complete [name=max_tokens]")).to_be_visible()
    stops = []
    for _ in range(40):
        page.keyboard.press("Tab")
        tag, outline = page.evaluate(focused)
        name = page.evaluate(
            "(({ name, textContent, id }) => name || textContent.trim() || "
            "id)(document.activeElement)"
        )
        if tag not in ("BODY", "HTML"):
            assert outline != "none" or page.evaluate(
                "document.activeElement.matches('.choice input')"
            ), name
        stops.append(name)
    assert {"History", "Run", "Code", "max_tokens", "temperature", "seed", "More parameters"} <= {
        *stops
    }
    page.locator("#panel-complete textarea").first.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("import")
    page.keyboard.press("Control+Enter")
    mode = Mode(page, "complete").ended()
    while not mode.panes.locator(".output").evaluate(
        "(output) => output === document.activeElement"
    ):
        page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".token-card")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    for number, panel in enumerate(MODES, 1):
        page.keyboard.press(f"Alt+{number}")
        expect(page.locator(f"#panel-{panel}")).to_be_visible()


def test_nothing_moves_where_motion_is_unwanted(open_page: OpenPage, server: ServerProcess) -> None:
    moving = (
        "() => [...document.querySelectorAll('*')].flatMap((element) => "
        "element.getAnimations({ subtree: true })).length"
    )
    for motion, count in (("reduce", 0), ("no-preference", 1)):
        page = open_page(server.port, reduced_motion=motion)
        mode = Mode(page, "complete").set(max_tokens=4000, ignore_eos="true").press("Run")
        expect(mode.panel.locator(".t").nth(3)).to_be_attached()
        page.mouse.move(1, 1)
        assert min(1, page.evaluate(moving)) == count
        assert page.evaluate(
            "getComputedStyle(document.querySelector('button')).transitionDuration"
        ) == ("0s" if count == 0 else "0.12s, 0.12s, 0.12s")
        page.keyboard.press("Escape")
        mode.ended()
