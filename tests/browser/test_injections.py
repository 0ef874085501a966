"""200 texts that a page could take for HTML, script or style, in every place where a text of the
server or the user is shown.

Invariant: they are shown as text: no element comes of them, no script runs, no request leaves, and
the page says nothing in its console.
"""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.support import Mode, expect, fake_answers, token_event
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess

SCRIPT = "window.hit=1"
ELEMENTS = [
    f"<script>{SCRIPT}</script>",
    f"<img src=x onerror={SCRIPT}>",
    f"<svg onload={SCRIPT}>",
    f"<body onload={SCRIPT}>",
    f"<iframe srcdoc='<script>parent.{SCRIPT}</script>'></iframe>",
    f"<iframe src='javascript:parent.{SCRIPT}'></iframe>",
    f"<a href='javascript:{SCRIPT}' id=injected>x</a>",
    f"<details open ontoggle={SCRIPT}>",
    f"<input autofocus onfocus={SCRIPT}>",
    f"<video><source onerror={SCRIPT}></video>",
    f"<math><mtext><style><img src=x onerror={SCRIPT}></style></mtext></math>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>*{background:url(//evil.example/x)}</style>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><button id=injected>x</button></form>",
    "<object data=//evil.example/x></object>",
    "<embed src=//evil.example/x>",
    f"<template><script>{SCRIPT}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={SCRIPT}>'></noscript>",
]
WRAPPINGS = [
    "{}",
    "\"'>{}",
    "</textarea></title></style></script>{}",
    "--!>{}<!--",
    "`${{{}}}`{}",
    "]]>{}",
    "\\x3c\\u003c&lt;{}",
    "\n\n{}\x00",
    "${{{}}}",
    "{{{{{}}}}}",
]
CORPUS = [wrapping.replace("{}", element) for element, wrapping in product(ELEMENTS, WRAPPINGS)]
PER_PAGE = 40
BATCHES = [CORPUS[begin : begin + PER_PAGE] for begin in range(0, len(CORPUS), PER_PAGE)]


def shown(text: str) -> str:
    """As a browser holds a text without the NUL that it drops from some fields."""
    return text.replace("\x00", "")


def check_nothing_ran(page: Any) -> None:
    """No script has run, and the page has only its own elements."""
    page.wait_for_timeout(50)
    assert page.evaluate("window.hit") is None
    foreign = (
        "iframe, object, embed, base, form:not([method=dialog]), video, math, #injected, "
        "main img, main svg"
    )
    foreign += ", [onerror], [onload], [ontoggle], [onfocus]"
    assert page.locator(foreign).count() == 0
    assert (
        page.locator("script").count() == 1
        and page.locator("link").count() == 4
        and page.locator("style").count() == 0
    )
    assert page.locator("meta").count() == 3


def test_there_are_two_hundred() -> None:
    assert len(set(CORPUS)) == 200


@pytest.mark.parametrize("texts", BATCHES, ids=range(0, len(CORPUS), PER_PAGE))
def test_a_completion_and_its_alternatives_are_text(
    open_page: OpenPage, server: ServerProcess, texts: list[str]
) -> None:
    events = [
        token_event(text, -1.0, {text: -1.0, **{other: -2.0 for other in texts[:3]}})
        for text in texts
    ]
    page = open_page(server.port, script=fake_answers(events))
    mode = Mode(page, "complete").run()
    assert mode.text() == "".join(texts)
    mode.panes.locator(".output").focus()
    for _ in range(mode.panel.locator(".t").count()):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_be_visible()
    check_nothing_ran(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="History").click()
    expect(page.locator("#history-list li")).to_have_count(1)
    check_nothing_ran(page)


@pytest.mark.parametrize("texts", BATCHES, ids=range(0, len(CORPUS), PER_PAGE))
def test_prompts_parameters_and_code_are_text(page: Any, texts: list[str]) -> None:
    mode = Mode(page, "complete").set(max_tokens=1)
    for number, text in enumerate(texts):
        mode.write(text).set(
            stop=text.replace("\n", "\\n"), bad_words="x", cache_salt=shown(text).replace("\n", " ")
        ).press("Code")
        for label in page.locator("dialog.code label").all() if number % 5 == 0 else ():
            label.click()
            assert (
                "evil" in page.locator("dialog.code pre").text_content()
                or "window" in page.locator("dialog.code pre").text_content()
            )
        page.locator("dialog.code").get_by_role("button", name="Close").click()
        if number % 10 == 0:
            mode.run()
    page.get_by_role("button", name="History").click()
    expect(page.locator("#history-list li")).to_have_count(-(-len(texts) // 10))
    check_nothing_ran(page)
    page.reload()
    expect(page.locator("#model .name")).to_have_text("embedded")
    Mode(page, "complete")
    check_nothing_ran(page)


@pytest.mark.parametrize("texts", BATCHES, ids=range(0, len(CORPUS), PER_PAGE))
def test_errors_are_text(open_page: OpenPage, server: ServerProcess, texts: list[str]) -> None:
    """An error's message has its code between backticks."""
    page = open_page(
        server.port,
        script=fake_answers([{"error": {"message": "`x`".join(texts)}}], "v1/chat/completions"),
    )
    mode = Mode(page, "chat").write("x").run()
    note = mode.panes.locator(".note[data-kind=bad]")
    expect(note).to_contain_text(shown(texts[0]).strip()[:20])
    assert note.evaluate(
        "(note) => [...note.children].every((child) => child.tagName === 'CODE' && "
        "child.children.length === 0)"
    )
    check_nothing_ran(page)


@pytest.mark.parametrize("texts", BATCHES, ids=range(0, len(CORPUS), PER_PAGE))
def test_messages_tools_and_reasoning_are_text(
    open_page: OpenPage, server: ServerProcess, texts: list[str]
) -> None:
    deltas: list[dict[str, Any]] = [{"content": text, "reasoning_content": text} for text in texts]
    deltas += [
        {
            "tool_calls": [
                {"index": index, "id": text, "function": {"name": text, "arguments": text}}
            ]
        }
        for index, text in enumerate(texts)
    ]
    events: list[Any] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": text}]}
        for delta, text in zip(deltas, texts * 2, strict=True)
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    page = open_page(server.port, script=fake_answers(events, "v1/chat/completions"))
    mode = Mode(page, "chat").write("".join(texts)).run()
    expect(mode.panel.locator(".tool")).to_have_count(len(texts))
    assert mode.panel.locator(".tool strong").all_text_contents() == texts
    assert mode.text() == "".join(texts)
    check_nothing_ran(page)
    mode.panel.get_by_role("button", name="Send results").click()
    mode.ended(2)
    check_nothing_ran(page)


def test_the_models_name_and_schemas_are_text(open_page: OpenPage, server: ServerProcess) -> None:
    # The browser asks for /favicon.ico.
    page = open_page(server.port, "ui/icon.svg", expected=("status of 404",))
    document = json.loads(server.get("/openapi.json")[1])
    text = ""
    page.route(
        "**/v1/models",
        lambda route: route.fulfill(json={"data": [{"id": text, "max_model_len": 1}]}),
    )

    def answer(route: Any) -> None:
        for name, schema in document["components"]["schemas"]["CompletionBody"][
            "properties"
        ].items():
            schema["description"] = text + name
        route.fulfill(json=document)

    page.route("**/openapi.json", answer)
    for text in CORPUS[::9]:
        page.goto(f"http://127.0.0.1:{server.port}/")
        expect(page.locator("#model .name")).to_contain_text(shown(text).strip()[:10])
        mode = Mode(page, "complete")
        mode.panel.get_by_role("button", name="About top_p").click()
        mode.press("Code")
        check_nothing_ran(page)


def test_what_a_real_server_repeats_is_text(open_page: OpenPage, tmp_path: Path) -> None:
    """A real model's name, the message of a chat template, and the server's own error about a
    parameter.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    for path in EMBEDDED.iterdir():
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('<img src=x onerror=window.hit=1>' ~ messages[0].content) }}"
    )
    with ServerProcess(
        folder, "--cache.pages", "64", "--server.model_name", "<img src=x onerror=window.hit=1>"
    ) as server:
        page = open_page(server.port, expected=("status of 4",))
        expect(page.locator("#model .name")).to_have_text("<img src=x onerror=window.hit=1>")
        Mode(page, "chat").write(ELEMENTS[0]).run()
        expect(page.locator("#panel-chat .note[data-kind=bad]")).to_be_visible()
        mode = Mode(page, "complete").set(
            stop="\n".join(f"{ELEMENTS[1]}{number}" for number in range(20))
        )
        mode.run()
        expect(mode.panes.locator(".note[data-kind=bad]")).to_be_visible()
        check_nothing_ran(page)


def test_the_policy_stops_a_script_that_got_in(open_page: OpenPage, server: ServerProcess) -> None:
    """What remains if one place forgot: the browser refuses markup, inline scripts and other
    hosts.
    """
    page = open_page(
        server.port,
        expected=("TrustedHTML", "Content Security Policy", "TrustedScript", "violates"),
    )
    tries = {
        "markup": "document.body.innerHTML = '<img src=x onerror=window.hit=1>'",
        "inline": "{ const s = document.createElement('script'); s.append('window.hit=1'); "
        "document.head.append(s); }",
        "style": "document.body.setAttribute('style', 'background: url(//evil.example)')",
        "string": "window.setTimeout('window.hit=1', 0)",
    }
    for code in tries.values():
        page.evaluate(f"() => {{ try {{ {code} }} catch {{ }} }}")
    page.evaluate("() => { new Image().src = 'http://evil.example/x.png'; }")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert (
        page.evaluate("() => fetch('http://evil.example/').then(() => 'sent', () => 'refused')")
        == "refused"
    )
    page.watch.requests.clear()  # Playwright reports what the policy has blocked, too.


def test_the_page_cannot_be_framed_or_read_by_another_origin(
    open_page: OpenPage, server: ServerProcess
) -> None:
    with ServerProcess(None, "--cache.pages", "64") as other:
        page = open_page(
            other.port,
            "live",
            expected=("frame", "CORS", "status of 404", "ERR_", "Refused", "violates"),
        )
        page.watch.origin = "http://127.0.0.1:"
        url = f"http://127.0.0.1:{server.port}/"
        read = "(url) => fetch(url).then((answer) => answer.text(), () => 'refused')"
        for path in ("", "ui/app.js", "v1/models", "openapi.json"):
            assert page.evaluate(read, url + path) == "refused", path
        page.evaluate(
            "(url) => { const frame = document.createElement('iframe'); frame.src = url; "
            "document.body.append(frame); }",
            url,
        )
        page.wait_for_timeout(500)
        (frame,) = [frame for frame in page.frames if frame.parent_frame]
        assert frame.url.startswith("chrome-error:") and "onehead" not in frame.content()
        load = """(url) => new Promise((done) => {
            const script = document.createElement("script");
            Object.assign(script, { src: url, onload: () => done("run"), onerror: () => done("refused") });
            document.head.append(script);
        })"""  # noqa: E501
        assert page.evaluate(load, f"{url}ui/store.js") == "refused"
