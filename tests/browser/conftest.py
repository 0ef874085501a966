"""Fixtures of the browser suite: Debian's Chromium, driven by Playwright, on pages of a real
server.

Invariant: a page that a test has opened through `open_page` has logged nothing and asked no other
host for anything, unless the test says which lines it expects. Where Playwright or Chromium is
missing, the tests are skipped with words.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.processes import ServerProcess

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, which the default run leaves out."""
    for item in items:
        if "tests/browser/" in item.path.as_posix():
            item.add_marker(pytest.mark.browser)


@dataclass
class Watch:
    """What a page has logged, and which URLs it has asked for."""

    origin: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """Patterns of console lines that the test expects, such as the one about an answer of 401."""

    def follow(self, page: Any) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def _on_console(self, message: Any) -> None:
        """Keeps a line, unless it is about a look at how the server is: the page goes on looking
        after it is gone.
        """
        if not message.location["url"].endswith("/health"):
            self.console.append(f"{message.type}: {message.text}")

    @property
    def unexpected(self) -> list[str]:
        return [
            line
            for line in self.console
            if not any(re.search(pattern, line) for pattern in self.expected)
        ]

    @property
    def foreign(self) -> list[str]:
        return [url for url in self.requests if not url.startswith((self.origin, "data:", "blob:"))]

    def check(self) -> None:
        assert self.unexpected == []
        assert self.foreign == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    from tests.browser.support import playwright

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(embedded_server: ServerProcess) -> ServerProcess:
    """The embedded model with a chat template, shared by the tests that do not stop it."""
    return embedded_server


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens a new page: `open_page(port, path="", expected=(), script="", **options)`, with the
    options of a Playwright context.

    `script` runs before those of the page; `expected` are patterns of lines that it may log. The
    page's Watch is `page.watch`.
    """
    opened: list[tuple[Any, Watch]] = []

    def open_one(
        port: int,
        path: str = "",
        expected: tuple[str, ...] = (),
        script: str = "",
        host: str = "127.0.0.1",
        **options: Any,
    ) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.watch = watch = Watch(f"http://{host}:{port}/", expected=[*expected])
        watch.follow(page)
        opened.append((context, watch))
        if script:
            page.add_init_script(script)
        page.goto(f"{watch.origin}{path}")
        return page

    yield open_one
    for context, _ in opened:
        context.close()
    for _, watch in opened:
        watch.check()


@pytest.fixture
def page(open_page: OpenPage, server: ServerProcess) -> Any:
    """The playground of `server` at 1280 x 800."""
    return open_page(server.port, viewport={"width": 1280, "height": 800})
