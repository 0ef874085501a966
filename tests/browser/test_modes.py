"""What each mode does: complete, fill in the middle, chat; stop, continue, regenerate, side by
side; parameters; history.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.support import MODES, Mode, expect, fake_answers, token_event
from tests.support.processes import ServerProcess
from tests.support.tool_checkpoints import make_tool_checkpoint

PROMPT = "def fibonacci(n):\n    "


def completion(server: ServerProcess, **body: Any) -> str:
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_complete_streams_what_the_server_says(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=40, seed=7, temperature=0.8).run()
    assert mode.text() == completion(server, prompt=PROMPT, max_tokens=40, seed=7, temperature=0.8)
    expect(mode.panes.locator("h2")).to_have_text("Seed 7")
    expect(mode.panes.locator(".stats")).to_contain_text("40 tokens")
    expect(mode.panes.locator(".stats")).to_contain_text("reached max_tokens")


def test_tokens_show_their_probability_on_hover_and_by_keyboard(page: Any) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=20, seed=7).run()
    card = page.locator(".token-card")
    mode.panel.locator(".t").nth(3).hover()
    expect(card).to_be_visible()
    expect(card).to_contain_text(re.compile(r"[\d.]+ %, log-probability -\d+\.\d{3}"))
    assert card.locator("tr").count() >= 5
    expect(card.locator("tr.chosen")).to_have_count(1)
    card.hover()  # The card can be pointed at: it does not go away.
    page.wait_for_timeout(400)
    expect(card).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    mode.panes.locator(".output").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(card).to_be_visible()
    expect(mode.panel.locator(".t.current")).to_have_count(1)
    assert mode.panel.locator(".t").nth(2).evaluate("(span) => span.classList.contains('current')")


def test_an_unlikely_token_is_tinted_more(open_page: OpenPage, server: ServerProcess) -> None:
    shares = [0.95, 0.7, 0.4, 0.2, 0.05, 0.001]
    events = [token_event(f"w{number} ", math.log(share)) for number, share in enumerate(shares)]
    mode = Mode(open_page(server.port, script=fake_answers(events)), "complete").run()
    spans = mode.panel.locator(".output .t")
    assert [spans.nth(number).get_attribute("class") for number in range(6)] == [
        f"t t{number}" for number in range(6)
    ]
    colours = [
        spans.nth(number).evaluate("(span) => getComputedStyle(span).backgroundColor")
        for number in range(6)
    ]
    assert len(set(colours)) == 6


def test_tokens_that_are_held_back_or_share_a_character_find_their_text(
    open_page: OpenPage, server: ServerProcess
) -> None:
    def event(text: str, *tokens: str) -> dict[str, Any]:
        scores = {
            "tokens": [*tokens],
            "token_logprobs": [-1.0] * len(tokens),
            "top_logprobs": [{token: -1.0} for token in tokens],
        }
        return {"choices": [{"index": 0, "text": text, "logprobs": scores, "finish_reason": None}]}

    held = [
        event("ab", "ab"),
        event("", "HA"),
        event("", "LT"),
        event("HALT!", "!"),
        event("", "bytes:\\xf0"),
        event("🙂", "bytes:\\x9f"),
    ]
    mode = Mode(
        open_page(
            server.port, script=fake_answers([*held, event("x\n\ny", "x\n\n", "y"), event("rest")])
        ),
        "complete",
    ).run()
    assert mode.text() == "abHALT!🙂x\n\nyrest"
    assert mode.panel.locator(".output .t").all_text_contents() == [
        "ab",
        "HA",
        "LT",
        "!",
        "🙂",
        "x",
        "y",
        "rest",
    ]


def test_stop_ends_the_stream_on_the_server_too(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=4000, ignore_eos="true")
    mode.press("Run")
    expect(mode.panel.locator(".output .t").nth(5)).to_be_attached()
    with page.expect_request(
        lambda request: request.method == "DELETE" and "/v1/streams/" in request.url
    ):
        page.keyboard.press("Escape")
    mode.ended()
    expect(mode.panes.locator(".stats")).to_contain_text("stopped")
    assert len(mode.text()) > 0
    page.wait_for_timeout(200)
    assert server.metric("onehead_requests_running") == 0


def test_continue_goes_on_in_place(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=12, temperature=0).run()
    first = mode.text()
    page.keyboard.press("Alt+c")
    expect(mode.panes.locator(".output")).not_to_have_text(first)
    mode.ended()
    whole = mode.text()
    assert whole.startswith(first) and whole == first + completion(
        server, prompt=PROMPT + first, max_tokens=12, temperature=0
    )


def test_regenerate_gives_the_same_text_and_run_another(page: Any) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=24).run()
    first, seed = mode.text(), mode.panes.locator("h2").text_content()
    mode.press("Regenerate").ended()
    assert (mode.text(), mode.panes.locator("h2").text_content()) == (first, seed)
    mode.press("Run")
    expect(mode.panes.locator("h2")).not_to_have_text(str(seed))
    mode.ended()


def test_up_to_four_side_by_side(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "complete").write(PROMPT).set(max_tokens=16, seed=11)
    mode.panel.get_by_role("radio", name="4").check()
    mode.run(4)
    texts = [mode.text(number) for number in range(4)]
    wanted = [
        completion(server, prompt=PROMPT, max_tokens=16, seed=11 + number, temperature=0.4)
        for number in range(4)
    ]
    assert texts == wanted
    boxes = [mode.panes.nth(number).bounding_box() for number in range(4)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_fill_shows_the_gap_in_its_place(page: Any, server: ServerProcess) -> None:
    before, after = "def add(a, b):\n    ret", "\n\nprint(add(1, 2))\n"
    mode = (
        Mode(page, "fill")
        .write(before, 0)
        .write(after, 1)
        .set(max_tokens=16, seed=3, temperature=1)
        .run()
    )
    assert mode.text() == completion(server, prompt=before, suffix=after, max_tokens=16, seed=3)
    tops = [
        mode.panel.locator(".editor textarea").nth(0),
        mode.panes,
        mode.panel.locator(".editor textarea").nth(1),
    ]
    assert [top.bounding_box()["y"] for top in tops] == sorted(
        top.bounding_box()["y"] for top in tops
    )


def test_chat_keeps_the_conversation(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "chat").set(max_tokens=12, temperature=0)
    mode.panel.locator("details.system").evaluate("(element) => { element.open = true; }")
    mode.panel.get_by_label("System message").fill("Be brief.")
    mode.write("Hello").run()
    answer = mode.text()
    mode.write("And then?").run(2)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And then?"},
    ]
    _, said = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0}
    )
    assert mode.text() == said["choices"][0]["message"]["content"]
    expect(mode.panel.locator(".turn.user .said")).to_have_text(["Hello", "And then?"])
    mode.press("New conversation")
    expect(mode.panel.locator(".turn")).to_have_count(0)


def test_another_answer_takes_the_place_of_the_last(page: Any) -> None:
    mode = Mode(page, "chat").set(max_tokens=10, seed=5).write("Hello").run()
    mode.set(seed=6).press("Send").ended()
    chosen = mode.text()
    with page.expect_request("**/v1/chat/completions") as sent:
        mode.write("Go on").press("Send")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": chosen}
    mode.ended(2)


def test_chat_shows_tool_calls_and_sends_their_results(
    open_page: OpenPage, server: ServerProcess
) -> None:
    def delta(value: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {
            "choices": [{"index": 0, "delta": value, "logprobs": None, "finish_reason": finish}]
        }

    def call(index: int, function: dict[str, str], **more: Any) -> dict[str, Any]:
        return delta({"tool_calls": [{"index": index, "function": function, **more}]})

    events = [
        delta({"role": "assistant", "content": "Let me see. "}),
        call(0, {"name": "weather", "arguments": ""}, id="call_1", type="function"),
        call(0, {"arguments": '{"city": '}),
        call(0, {"arguments": '"Bern"}'}),
        call(1, {"name": "time", "arguments": "{}"}, id="call_2", type="function"),
        delta({}, "tool_calls"),
    ]
    page = open_page(server.port, script=fake_answers(events, "v1/chat/completions"))
    mode = Mode(page, "chat").write("What is the weather?").run()
    expect(mode.panel.locator(".tool strong")).to_have_text(["weather", "time"])
    expect(mode.panel.locator(".tool pre")).to_have_text(['{"city": "Bern"}', "{}"])
    page.get_by_label("Result of weather").fill("rain")
    page.get_by_label("Result of time").fill("noon")
    mode.press("Send results").ended(2)
    assert page.evaluate("window.sent.messages")[1:] == [
        {
            "role": "assistant",
            "content": "Let me see. ",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                },
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "time", "arguments": "{}"},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]


def tool_call_events(finish: str) -> list[Any]:
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
    }
    return [
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"tool_calls": [call]},
                    "logprobs": None,
                    "finish_reason": finish,
                }
            ]
        }
    ]


def test_results_are_asked_for_as_long_as_they_can_be_sent(
    open_page: OpenPage, server: ServerProcess
) -> None:
    page = open_page(
        server.port, script=fake_answers(tool_call_events("tool_calls"), "v1/chat/completions")
    )
    mode = Mode(page, "chat").write("What is the weather?").run()
    expect(page.get_by_role("button", name="Send results")).to_have_count(1)
    mode.write("Never mind.").run(2)
    # Only the last answer's.
    expect(page.get_by_role("button", name="Send results")).to_have_count(1)
    expect(mode.panes.first.get_by_label("Result of weather")).to_be_disabled()
    expect(mode.panes.last.get_by_label("Result of weather")).to_be_enabled()


def test_results_are_not_asked_for_where_the_calls_were_cut(
    open_page: OpenPage, server: ServerProcess
) -> None:
    page = open_page(
        server.port, script=fake_answers(tool_call_events("length"), "v1/chat/completions")
    )
    mode = Mode(page, "chat").write("What is the weather?").run()
    expect(mode.panel.locator(".tool strong")).to_have_text("weather")
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)


def test_chat_continues_an_answer(page: Any, server: ServerProcess) -> None:
    mode = Mode(page, "chat").set(max_tokens=10, temperature=0).write("Hello").run()
    first = mode.text()
    mode.press("Continue")
    expect(mode.panes.locator(".output")).not_to_have_text(first)
    mode.ended()
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    body = {
        "messages": messages,
        "max_tokens": 10,
        "temperature": 0,
        "continue_final_message": True,
    }
    assert (
        mode.text()
        == first + server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    )


def test_chat_shows_the_calls_of_a_real_server(open_page: OpenPage, tmp_path: Path) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    with ServerProcess(
        make_tool_checkpoint("functiongemma", tmp_path / "tools"), "--cache.pages", "256"
    ) as server:
        mode = Mode(open_page(server.port), "chat").set(
            tools=json.dumps(tools), tool_choice="required", max_tokens=200, seed=1
        )
        mode.write("What is the weather?").run()
        expect(mode.panel.locator(".tool strong").first).to_have_text("weather")
        assert json.loads(mode.panel.locator(".tool pre").first.text_content())["city"] in (
            "Bern",
            "Rome",
        )
        for result in mode.panel.get_by_label("Result of weather").all():
            result.fill("rain")
        mode.set(tool_choice="none").press("Send results").ended(2)
        expect(mode.panel.locator(".turn.tool .said").first).to_have_text("rain")
        assert mode.panes.nth(1).locator(".note[data-kind=bad]").count() == 0


def test_without_a_chat_template_it_says_what_to_do(
    open_page: OpenPage, untemplated_folder: Path
) -> None:
    with ServerProcess(untemplated_folder, "--cache.pages", "64") as server:
        page = open_page(server.port)
        chat = Mode(page, "chat").write("Hello")
        notice = chat.panel.locator(".stage > .blank")
        expect(notice).to_contain_text("This checkpoint has no chat template")
        expect(notice).to_contain_text("--server.chat_template FILE")
        expect(chat.panel.get_by_role("button", name="Send", exact=True)).to_be_disabled()
        page.keyboard.press("Control+Enter")
        expect(chat.panes).to_have_count(0)
        fill = Mode(page, "fill").run()
        assert fill.text() != ""


def test_a_failed_run_is_not_kept(page: Any) -> None:
    page.watch.expected.append("status of 400")
    mode = Mode(page, "complete").set(stop="\n".join(map(str, range(20)))).run()
    expect(mode.panes.locator(".output")).to_have_attribute("data-empty", "Failed")
    expect(mode.panel.get_by_role("alert")).to_have_count(0)  # It is said once.
    page.get_by_role("button", name="History").click()
    expect(page.locator("#history-list li")).to_have_count(0)


@pytest.mark.parametrize("name", MODES)
def test_controls_have_the_bounds_and_words_of_the_schema(
    page: Any, server: ServerProcess, name: str
) -> None:
    schemas = json.loads(server.get("/openapi.json")[1])["components"]["schemas"]
    properties = schemas["ChatBody" if name == "chat" else "CompletionBody"]["properties"]
    mode = Mode(page, name)
    numbers = mode.panel.locator("input[type=number]").all()
    assert len(numbers) >= 12
    for field in numbers:
        (schema,) = (
            kind
            for kind in properties[field.get_attribute("name")]["anyOf"]
            if kind["type"] != "null"
        )
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        most = schema.get("maximum", schema.get("exclusiveMaximum"))
        assert (float(field.get_attribute("min")), float(field.get_attribute("max"))) == (
            least,
            most,
        )
    mode.panel.get_by_role("button", name="About temperature").click()
    expect(
        mode.panel.get_by_text(properties["temperature"]["description"].split(".")[0])
    ).to_be_visible()


def test_a_value_out_of_bounds_is_named_and_not_sent(page: Any) -> None:
    mode = Mode(page, "complete").set(temperature=3)
    mode.press("Run")
    expect(page.get_by_role("alert")).to_contain_text(
        "temperature: Value must be less than or equal to 2"
    )
    mode.set(temperature=1, logit_bias="{").press("Run")
    expect(page.get_by_role("alert")).to_contain_text("logit_bias: is not JSON")
    expect(mode.panes).to_have_count(0)


def test_parameters_are_sent_as_they_are_set(page: Any) -> None:
    values = {
        "top_k": 5,
        "stop": "END\\n\na\\\\b",
        "stop_token_ids": "3 4,\n5",
        "ignore_eos": "true",
        "logit_bias": '{"5": -1}',
        "seed": 9,
    }
    mode = Mode(page, "complete").set(**values)
    with page.expect_request("**/v1/completions") as sent:
        mode.run()
    body = sent.value.post_data_json
    wanted = {
        "top_k": 5,
        "stop": ["END\n", "a\\b"],
        "stop_token_ids": [3, 4, 5],
        "ignore_eos": True,
        "logit_bias": {"5": -1},
        "seed": 9,
    }
    assert {name: body[name] for name in wanted} == wanted and "top_p" not in body


def test_the_output_follows_a_schema_or_an_expression(page: Any) -> None:
    mode = Mode(page, "complete").set(max_tokens=60, temperature=0)
    mode.set(regex="[0-9]{3}-[0-9]{2}").run()
    assert re.fullmatch(r"\d{3}-\d{2}", mode.text())
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    }
    mode.set(regex="", json=json.dumps(schema)).run()
    assert set(json.loads(mode.text())) == {"a"}
    mode.set(json='{"type": ').press("Run")
    expect(page.get_by_role("alert")).to_contain_text("json: is not JSON")
    mode.set(json="", choice="yes\nno").run()
    assert mode.text() in ("yes", "no")


def test_history_restores_a_run_and_can_be_cleared(page: Any, tmp_path: Path) -> None:
    mode = Mode(page, "complete").write("first").set(max_tokens=8, seed=1).run()
    text = mode.text()
    fill = Mode(page, "fill").write("before", 0).write("after", 1).set(max_tokens=4).run()
    chat = Mode(page, "chat").write("Hello").set(max_tokens=4).run()
    said = chat.text()
    page.reload()
    expect(page.locator("#model .name")).to_have_text("embedded")
    page.get_by_role("button", name="History").click()
    entries = page.locator("#history-list button")
    expect(entries).to_have_count(3)
    entries.nth(2).click()
    expect(page.locator("#panel-complete textarea").first).to_have_value("first")
    assert mode.text() == text and mode.field("seed").input_value() == "1"
    page.get_by_role("button", name="History").click()
    entries.nth(1).click()
    expect(fill.panel.locator(".editor textarea").nth(1)).to_have_value("after")
    page.get_by_role("button", name="History").click()
    entries.nth(0).click()
    expect(chat.panel.locator(".turn.user .said")).to_have_text("Hello")
    assert chat.text() == said
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Clear history").click()
    expect(entries).to_have_count(0)
    assert page.evaluate("localStorage.getItem('onehead.history')") is None


def entries_of(page: Any) -> list[str]:
    """The titles of the history, newest first."""
    page.get_by_role("button", name="History").click()
    titles = [
        str(entry.locator("span").nth(1).text_content())
        for entry in page.locator("#history-list button").all()
    ]
    page.keyboard.press("Escape")
    return titles


def start_long(mode: Mode) -> None:
    mode.set(max_tokens=4000, ignore_eos="true").press("Send" if mode.name == "chat" else "Run")
    expect(mode.panel.locator(".pane[data-state=running] .t").nth(5)).to_be_attached()


def test_an_entry_that_is_opened_during_a_run_leaves_both_in_the_history(page: Any) -> None:
    mode = Mode(page, "complete").write("first").set(max_tokens=8, seed=1).run()
    text = mode.text()
    start_long(mode.write("second"))
    page.get_by_role("button", name="History").click()
    page.locator("#history-list button").click()
    expect(mode.panel.locator("textarea").first).to_have_value("first")
    expect(mode.panel.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    page.wait_for_timeout(300)  # The other run has ended.
    assert mode.text() == text
    assert entries_of(page) == ["second", "first"]


def test_the_history_has_the_prompt_that_was_sent(page: Any) -> None:
    mode = Mode(page, "complete").write("sent")
    start_long(mode)
    mode.write("edited").set(seed=5).press("Stop").ended()
    page.get_by_role("button", name="History").click()
    page.locator("#history-list button").click()
    expect(mode.panel.locator("textarea").first).to_have_value("sent")
    assert mode.field("seed").input_value() == ""


def test_a_new_conversation_during_an_answer_leaves_the_old_one_in_the_history(page: Any) -> None:
    mode = Mode(page, "chat").write("Hello")
    start_long(mode)
    mode.press("New conversation")
    page.wait_for_timeout(300)
    expect(mode.panel.locator(".turn, .pane")).to_have_count(0)
    expect(mode.panel.get_by_role("button", name="Regenerate")).to_be_disabled()
    assert entries_of(page) == ["Hello"]


def test_characters_that_are_typed_with_alt_are_typed(page: Any) -> None:
    """On a Mac with a British keyboard # is Option and 3."""
    mode = Mode(page, "complete")
    press = """([key, code]) => document.querySelector("#panel-complete textarea")
        .dispatchEvent(new KeyboardEvent("keydown", { key, code, altKey: true, bubbles: true, cancelable: true }))"""  # noqa: E501
    for key, code in (("#", "Digit3"), ("ç", "KeyC"), ("®", "KeyR")):
        assert page.evaluate(press, [key, code])  # It is not taken.
    expect(mode.panel).to_be_visible()
    assert not page.evaluate(press, ["3", "Digit3"])
    expect(page.locator("#panel-chat")).to_be_visible()


def test_the_speed_leaves_out_the_wait_for_the_first_token(
    open_page: OpenPage, server: ServerProcess
) -> None:
    page = open_page(
        server.port, script=fake_answers([token_event("a ") for _ in range(8)], pause=20)
    )
    mode = Mode(page, "complete")
    page.evaluate("window.limit = 0")
    mode.press("Run")
    page.wait_for_timeout(1500)
    page.evaluate("window.limit = 1")
    expect(mode.panes.locator(".stats")).to_have_text(re.compile(r"^1 token · first after \d+ ms$"))
    page.evaluate("window.limit = 100")
    mode.ended()
    (speed,) = re.findall(
        r"^8 tokens · (\d+) tokens/s · first after \d{4} ms",
        mode.panes.locator(".stats").text_content(),
    )
    assert int(speed) > 8


def test_the_code_has_the_seed_of_the_output(page: Any) -> None:
    mode = Mode(page, "complete").run()
    (seed,) = re.findall(r"\d+", mode.panes.locator("h2").text_content())
    mode.press("Code")
    expect(page.locator("dialog.code pre")).to_contain_text(f'"seed": {seed}')


def test_code_in_an_error_is_shown_as_code(page: Any) -> None:
    page.watch.expected.append("status of 400")
    mode = Mode(page, "complete").set(stop="\n".join(map(str, range(20)))).run()
    note = mode.panes.locator(".note[data-kind=bad]")
    expect(note.locator("code")).to_have_text("stop")
    assert "`" not in note.text_content()
