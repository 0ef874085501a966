"""What the browser tests share beside the fixtures. Importing it skips a test module where
Playwright is missing.
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import pytest

playwright: Any = pytest.importorskip(
    "playwright.sync_api", reason="the extra [browser] is missing: scripts/setup dev installs it"
)
expect = playwright.expect
TIMEOUT = 15_000
"""Milliseconds that an expectation may take: the machine may be busy."""
expect.set_options(timeout=TIMEOUT)
FAKE_STREAM = Path(__file__).with_name("fake_stream.js").read_text()
AXE = files("axe_playwright_python") / "axe.min.js"
STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
MODES = {"complete": "Complete", "fill": "Fill in the middle", "chat": "Chat"}


class Mode:
    """The panel of one mode, in the words of its user."""

    def __init__(self, page: Any, name: str) -> None:
        self.page, self.name = page, name
        self.panel = page.locator(f"#panel-{name}")
        page.get_by_role("link", name=MODES[name]).click()
        expect(self.field("max_tokens")).to_be_attached()

    def field(self, name: str) -> Any:
        return self.panel.locator(f"[name={name}]")

    def set(self, **values: Any) -> Self:
        """Types values of parameters, opening what hides them."""
        self.panel.locator("details.settings, details.more").evaluate_all(
            "(all) => all.forEach((one) => (one.open = true))"
        )
        for name, value in values.items():
            field = self.field(name)
            if field.evaluate("(element) => element.tagName") == "SELECT":
                field.select_option(str(value))
            else:
                field.fill(str(value))
        return self

    def write(self, text: str, number: int = 0) -> Self:
        """Writes into a text of the mode: the prompt, the text before (0) or after (1) the gap, the
        message.
        """
        self.panel.locator(".editor textarea").nth(number).fill(text)
        return self

    def press(self, name: str) -> Self:
        self.panel.get_by_role("button", name=name, exact=True).click()
        return self

    @property
    def panes(self) -> Any:
        return self.panel.locator(".pane")

    def text(self, number: int = -1) -> str:
        """The whole text of an output, as its button copies it."""
        return str(self.panes.nth(number).locator(".output").evaluate(TEXT_OF))

    def ended(self, count: int = 1) -> Self:
        """Waits until so many outputs have ended, and none runs."""
        expect(self.panel.locator(".pane[data-state=ended]")).to_have_count(count)
        return self

    def run(self, count: int = 1) -> Self:
        return self.press("Send" if self.name == "chat" else "Run").ended(count)


TEXT_OF = """(output) => [...output.querySelectorAll(":scope > div > div")].map((line) => line.textContent).join("\\n")"""  # noqa: E501


def violations(page: Any) -> list[str]:
    """What axe-core finds wrong with the page as it stands."""
    page.evaluate(AXE.read_text())
    found = page.evaluate(
        "(tags) => axe.run(document, { runOnly: tags, preload: false })", STANDARDS
    )
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def check_width(page: Any, width: int) -> None:
    """Asserts that nothing is beside a window of this width, and that controls can be hit (WCAG
    2.2, target size).
    """
    # Canvases follow a new width one frame later.
    page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)
    boxes = page.evaluate(
        """() => [...document.querySelectorAll("button, a:not(.skip), input, select, summary")]
        .filter((element) => element.checkVisibility())
        .map((element) => [element.outerHTML, element.getBoundingClientRect().toJSON()])"""
    )
    for html, box in boxes:
        assert box["left"] >= 0 and box["right"] <= width and box["height"] >= 24, (html, box)


def fake_answers(
    events: list[Any], path: str = "v1/completions", per_read: int = 1, pause: float = 0
) -> str:
    """A script that answers requests to `path` within the page, with these objects as a stream's
    events: what no small model would say.
    """
    values = {"EVENTS": events, "PATH": path, "PER_READ": per_read, "PAUSE": pause}
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    return f"(() => {{\n{constants}{FAKE_STREAM}}})();"


def token_event(
    text: str, logprob: float = -0.5, top: dict[str, float] | None = None, finish: str | None = None
) -> dict[str, Any]:
    """An event of /v1/completions with one token."""
    scores = {
        "text_offset": [0],
        "token_logprobs": [logprob],
        "tokens": [text],
        "top_logprobs": [top or {text: logprob}],
    }
    return {"choices": [{"index": 0, "text": text, "logprobs": scores, "finish_reason": finish}]}


class CuttingProxy:
    """Passes TCP connections on to a port, until told to cut them. After `cut` it refuses new ones,
    too, until `mend`.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._broken = False
        self.cuts = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def cut(self) -> None:
        """Resets every open connection."""
        self._broken = True
        for connection in list(self._open):
            self.cuts += 1
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._broken = False

    def _start(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._broken:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open |= {client, server}
                self._start(self._pass_on, client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        """Copies both ways until one side ends, and closes both."""
        back = threading.Thread(target=self._copy, args=(server, client))
        back.start()
        self._copy(client, server)
        back.join()
        for connection in (client, server):
            self._open.discard(connection)
            connection.close()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
