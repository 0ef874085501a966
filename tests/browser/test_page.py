"""The page itself: its tabs, what it loads and from where, its headers."""

from typing import Any

from tests.browser.support import expect
from tests.support.processes import ServerProcess


def test_the_page_shows_the_model_and_its_tabs(page: Any, server: ServerProcess) -> None:
    expect(page.locator("#model .name")).to_have_text("embedded")
    for name in ("Fill in the middle", "Chat", "Complete"):
        page.get_by_role("tab", name=name).click()
        expect(page.locator("[role=tabpanel]:not([hidden])")).to_have_id(page.get_by_role("tab", name=name).get_attribute("aria-controls"))
