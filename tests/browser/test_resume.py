"""Streams that lose their connection or their engine, and keys."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.browser.conftest import OpenPage
from tests.browser.support import CuttingProxy, Mode, expect
from tests.support.processes import ServerProcess, kill

PROMPT = "def fibonacci(n):\n    "
LONG: dict[str, Any] = {"max_tokens": 1500, "seed": 7, "temperature": 1, "ignore_eos": "true"}
NETWORK_ERRORS = r"error: Failed to load resource: net::ERR_"
"""The browser logs every request that fails; nothing else may be logged."""


def undisturbed(server: ServerProcess) -> str:
    body = {"prompt": PROMPT, "max_tokens": 1500, "seed": 7, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def running(page: Any) -> Mode:
    """A mode whose output has begun and will take a while."""
    mode = Mode(page, "complete").write(PROMPT).set(**LONG).press("Run")
    expect(mode.panel.locator(".output .t").nth(20)).to_be_attached()
    return mode


def test_a_cut_connection_is_resumed(open_page: OpenPage, server: ServerProcess) -> None:
    with CuttingProxy(server.port) as proxy:
        mode = running(open_page(proxy.port, expected=(NETWORK_ERRORS,)))
        proxy.cut()
        expect(mode.panes.locator(".note").last).to_have_text("Connection lost. Resuming…")
        assert proxy.cuts >= 2
        proxy.mend()
        expect(mode.panes.locator(".note").last).to_have_text(
            "The stream went on; nothing was lost."
        )
        mode.ended()
        assert mode.text() == undisturbed(server)
        expect(mode.panes.locator(".stats")).to_contain_text("1,500 tokens")


def test_a_stream_survives_many_cuts(open_page: OpenPage, server: ServerProcess) -> None:
    with CuttingProxy(server.port) as proxy:
        mode = running(open_page(proxy.port, expected=(NETWORK_ERRORS,)))
        cuts = 0
        while mode.panel.locator(".pane[data-state=running]").count() and cuts < 12:
            proxy.cut()
            proxy.mend()
            cuts += 1
            mode.page.wait_for_timeout(120)
        mode.ended()
        assert cuts >= 3
        assert mode.text() == undisturbed(server)


def test_an_engine_that_is_killed_is_survived(open_page: OpenPage, embedded_folder: Path) -> None:
    with ServerProcess(embedded_folder, "--cache.pages", "512") as server:
        mode = running(open_page(server.port, expected=("status of 503",)))
        kill(server.engine_pid)
        mode.ended()
        expect(mode.panes.locator(".note").last).to_have_text("")  # Its connection was not lost.
        assert server.metric("onehead_engine_restarts_total") == 1
        assert mode.text() == undisturbed(server)


def test_a_server_that_stays_away_is_named(open_page: OpenPage, embedded_folder: Path) -> None:
    with ServerProcess(embedded_folder, "--cache.pages", "64") as server:
        page = open_page(server.port, expected=(NETWORK_ERRORS,))
        mode = Mode(page, "complete")
    mode.press("Run")
    expect(mode.panes.locator(".note[data-kind=bad]")).to_have_text("The server cannot be reached.")
    expect(mode.panel.get_by_role("button", name="Run", exact=True)).to_be_enabled()


def test_a_key_is_asked_for_once_and_kept_in_memory_only(
    open_page: OpenPage, embedded_folder: Path
) -> None:
    digest = hashlib.sha256(b"secret-key").hexdigest()
    with ServerProcess(
        embedded_folder, "--cache.pages", "64", "--server.api_keys", digest
    ) as server:
        page = open_page(server.port, expected=("status of 401",))
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        expect(dialog).to_contain_text("This server asks for an API key")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("The server refused that API key")
        page.keyboard.type("secret-key")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model .name")).to_have_text("embedded")
        mode = Mode(page, "complete").set(max_tokens=8, seed=7).run()
        assert mode.text() != ""
        Mode(page, "chat").write("Hello").set(max_tokens=8).run()
        expect(dialog).to_be_hidden()
        assert "secret-key" not in page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        )
        assert "secret-key" not in page.content() and "secret-key" not in "".join(
            page.watch.requests
        )
        mode = Mode(page, "complete").press("Code")
        expect(page.locator("dialog.code pre")).to_contain_text("Bearer $ONEHEAD_API_KEY")
        page.reload()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#model")).to_contain_text("an API key is needed")
        page.get_by_role("button", name="Enter key").click()
        expect(dialog).to_be_visible()
        page.keyboard.type("secret-key")
        page.keyboard.press("Enter")
        expect(page.locator("#model .name")).to_have_text("embedded")
        expect(mode.field("max_tokens")).to_be_visible()


def test_run_after_a_declined_key_asks_again_and_sends_what_is_set(
    open_page: OpenPage, embedded_folder: Path
) -> None:
    digest = hashlib.sha256(b"secret-key").hexdigest()
    settings = '{"max_tokens": "23", "ignore_eos": "true"}'
    kept = f"localStorage.setItem('onehead.settings.complete', '{settings}')"
    with ServerProcess(
        embedded_folder, "--cache.pages", "64", "--server.api_keys", digest
    ) as server:
        page = open_page(server.port, expected=("status of 401",), script=kept)
        dialog, panel = page.get_by_role("dialog"), page.locator("#panel-complete")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(panel.get_by_role("alert")).to_have_text("An API key is needed: Enter key, above.")
        expect(panel.locator(".settings")).to_contain_text("The server has not told them yet.")
        panel.get_by_role("button", name="Run", exact=True).click()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")  # Without a key nothing is sent.
        expect(panel.locator(".pane")).to_have_count(0)
        panel.get_by_role("button", name="Run", exact=True).click()
        expect(dialog).to_be_visible()
        page.keyboard.type("secret-key")
        with page.expect_request("**/v1/completions") as sent:
            page.keyboard.press("Enter")
        assert sent.value.post_data_json["max_tokens"] == 23
        mode = Mode(page, "complete").ended()
        expect(mode.panes.locator(".stats")).to_contain_text("23 tokens")
        expect(page.locator("#model .name")).to_have_text("embedded")
        expect(panel.get_by_role("alert")).to_have_count(0)


def answers_in_turn(**answers: str) -> str:
    """A script that answers within the page: end of a path -> expression of the Response, in which
    `later(ms, value)` is a promise.
    """
    cases = "".join(
        f"  if (String(url).endsWith({json.dumps(end)})) return {answer};\n"
        for end, answer in answers.items()
    )
    return f"""(() => {{
const real = window.fetch;
const later = (ms, value) => new Promise((done) => setTimeout(() => done(value), ms));
const streamed = (parts) => new Response(new ReadableStream({{
  async start(controller) {{
    for (const [ms, text] of parts) controller.enqueue(new TextEncoder().encode(await later(ms, text)));
    controller.close();
  }},
}}), {{ headers: {{ "x-stream-id": "s" }} }});
window.fetch = async (url, init) => {{
{cases}  return real(url, init);
}};
}})();"""  # noqa: E501


ONE = (
    "id: s.1\\ndata: "
    + json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    + "\\n\\n"
)
DONE = "data: [DONE]\\n\\n"


def test_a_stream_that_had_ended_when_it_was_cut_is_said_to_have_gone_on(
    open_page: OpenPage, server: ServerProcess
) -> None:
    script = answers_in_turn(
        **{
            "v1/completions": f"streamed([[0, '{ONE}']])",
            "v1/streams/s": "later(300, new Response(null, { status: 204 }))",
        }
    )
    mode = Mode(open_page(server.port, script=script), "complete").press("Run")
    note = mode.panes.locator(".note").last
    expect(note).to_have_text("Connection lost. Resuming…")
    mode.ended()
    expect(note).to_have_text("The stream went on; nothing was lost.")


def test_a_request_that_is_stopped_before_it_is_answered_ends_on_the_server(
    open_page: OpenPage, server: ServerProcess
) -> None:
    """Its id is in the head of its answer, which comes later."""
    script = answers_in_turn(
        **{"v1/completions": "real(url, init).then((answer) => later(1000, answer))"}
    )
    page = open_page(server.port, script=script)
    mode = Mode(page, "complete").set(max_tokens=4000, ignore_eos="true")
    with page.expect_request(
        lambda request: request.method == "DELETE" and "/v1/streams/" in request.url
    ):
        mode.press("Run").press("Stop").ended()
        assert mode.panel.get_by_role("button", name="Run", exact=True).is_enabled()
    page.wait_for_timeout(200)
    assert server.metric("onehead_requests_running") == 0
