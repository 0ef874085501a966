"""Takes the guides' pictures of the playground anew, from the embedded model: `python -m
tests.browser.pictures`.

Fixed seeds and a fixed size give the same texts each time; only speeds and times differ, and the
moment of the page map.
"""

import io
import shutil
import sys
from typing import Any

from PIL import Image

from tests.browser.cache_load import Load
from tests.browser.support import Mode, playwright
from tests.support.paths import ROOT
from tests.support.processes import ServerProcess

FOLDER = ROOT / "docs" / "pictures"
DESK, PHONE = {"width": 1280, "height": 720}, {"width": 360, "height": 740}
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""'
NAME = "--server.model_name", "onehead-7m"
SETTINGS: dict[str, Any] = {"max_tokens": 90, "temperature": 0.6, "seed": 7}


def save(page: Any, name: str) -> None:
    """Keeps a picture in 128 colours, which a page has no more of that an eye tells apart."""
    picture = (
        Image.open(io.BytesIO(page.screenshot()))
        .convert("RGB")
        .quantize(256, dither=Image.Dither.NONE)
    )
    picture.save(FOLDER / f"ui-{name}.png", optimize=True)
    print(FOLDER / f"ui-{name}.png", (FOLDER / f"ui-{name}.png").stat().st_size, "bytes")


def prepared(page: Any, name: str, **settings: Any) -> Mode:
    """A mode with these settings, its rarer ones closed again."""
    mode = Mode(page, name).set(**SETTINGS | settings)
    mode.panel.locator("details.more").evaluate_all(
        "(all) => all.forEach((one) => (one.open = false))"
    )
    if page.viewport_size == PHONE:
        mode.panel.locator("details.settings").evaluate("(element) => { element.open = false; }")
    return mode


def take(browser: Any, port: int) -> None:
    """Takes all pictures."""
    page = browser.new_context(viewport=DESK, color_scheme="light").new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    mode = prepared(page, "complete").write(PROMPT).run()
    for number in (10, 12):
        mode.panel.locator(".t").nth(number).hover()
    page.locator(".token-card").wait_for()
    save(page, "complete")
    page.keyboard.press("Escape")
    # Of the texts that are there at first.
    prepared(page, "fill", max_tokens=20).run()
    save(page, "fill")
    chat = prepared(page, "chat", temperature=0)
    chat.write("What is the capital of Norway?").run()
    chat.write("And what is the currency of Norway?").run(2)
    save(page, "chat")
    page = browser.new_context(viewport=PHONE, color_scheme="dark").new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    prepared(page, "complete").write(PROMPT).run()
    save(page, "phone")


def take_cache(browser: Any, server: ServerProcess) -> None:
    """Takes the pictures of the page map, under a load whose requests are the same each time."""
    pages = {}
    for scheme in ("light", "dark"):
        pages[scheme] = browser.new_context(
            viewport={"width": 1280, "height": 1225}, color_scheme=scheme
        ).new_page()
        pages[scheme].goto(f"http://127.0.0.1:{server.port}/#cache")
    with Load(server, 14):
        pages["light"].wait_for_timeout(60_000)
        for scheme, page in pages.items():
            if scheme == "dark":  # Where one is followed, the others are pale.
                page.locator(".monitor tbody tr").nth(3).get_by_role("button").click()
                page.mouse.move(1, 1)
            page.wait_for_timeout(1500)
            save(page, f"cache-{scheme}")


def main() -> int:
    """Returns the exit status."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        with ServerProcess(None, *NAME, "--cache.pages", "512") as server:
            take(browser, server.port)
        with ServerProcess(
            None, *NAME, "--cache.pages", "104", "--engine.max_running", "12"
        ) as server:
            take_cache(browser, server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
