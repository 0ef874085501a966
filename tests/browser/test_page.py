"""The page itself: its tabs, what it loads and from where, its headers."""

from typing import Any

from tests.browser.support import expect
from tests.support.processes import ServerProcess


def test_the_page_shows_the_model_and_its_tabs(page: Any, server: ServerProcess) -> None:
    expect(page.locator("#model .name")).to_have_text("embedded")
    for name, panel in (
        ("Fill in the middle", "fill"),
        ("Chat", "chat"),
        ("Cache", "cache"),
        ("Complete", "complete"),
    ):
        page.get_by_role("link", name=name).click()
        expect(page.locator("main > section:not([hidden])")).to_have_id(f"panel-{panel}")
        expect(page.locator("[aria-current=page]")).to_have_id(f"tab-{panel}")
