"""Calls over HTTP: several choices, stop strings, bounds of length, constraints that exclude each
other, and the option of a template.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.text.codec import TextCodec
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess
from tests.support.tool_checkpoints import TOOL_MODELS, make_tool_checkpoint

LEVELS = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["level"],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "set_level", "parameters": LEVELS}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "?"}],
    "tools": [TOOL],
    "max_tokens": 80,
    "seed": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint("functiongemma", tmp_path_factory.mktemp("functiongemma"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "--cache.pages", "256") as server:
        yield server


@pytest.fixture(scope="module")
def raised(folder: Path) -> dict[str, Any]:
    """A request of one call under `auto`, with a bias that has the opening drawn at once."""
    opening = TextCodec(folder).token_id("<start_function_call>")
    return BODY | {"parallel_tool_calls": False, "logit_bias": {str(opening): 100}}


def chat(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return list(answer["choices"])


def arguments(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]


def test_each_choice_has_calls_of_its_own(server: ServerProcess, raised: dict[str, Any]) -> None:
    for body in (raised, BODY | {"tool_choice": "required", "parallel_tool_calls": False}):
        choices = chat(server, body | {"n": 3, "temperature": 1.5})
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 3
        assert all(0 <= arguments(choice)[0]["level"] <= 9 for choice in choices)
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_stop_strings_and_bounds_end_no_call(server: ServerProcess, raised: dict[str, Any]) -> None:
    for more in ({"stop": ["l", "{", "1"]}, {"min_tokens": 60}):
        (choice,) = chat(server, raised | more)
        assert choice["finish_reason"] == "tool_calls" and all(
            0 <= given["level"] <= 9 for given in arguments(choice)
        )
    (cut,) = chat(server, BODY | {"tool_choice": "required", "max_tokens": 5})
    assert cut["finish_reason"] == "length"


def test_the_engine_refuses_nothing_that_the_fields_allow(
    server: ServerProcess, raised: dict[str, Any]
) -> None:
    fields: tuple[dict[str, Any], ...] = (
        {"logprobs": True, "top_logprobs": 2},
        {"bad_words": ["level"]},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": [40]},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
    )
    for more in fields:
        (choice,) = chat(server, raised | more)
        assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
        assert [0 <= given["level"] <= 9 for given in arguments(choice)] == [True]
        assert not more.get("logprobs") or choice["logprobs"]["content"]


def test_a_call_that_a_stop_token_cuts_is_not_reported_as_whole(
    server: ServerProcess, raised: dict[str, Any], folder: Path
) -> None:
    (colon,) = TextCodec(folder).encode_bare("{")
    for more in ({}, {"include_stop_str_in_output": True}):
        (cut,) = chat(server, raised | {"stop_token_ids": [colon]} | more)
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", colon)
    (whole,) = chat(
        server,
        BODY | {"tool_choice": "required", "parallel_tool_calls": False, "stop_token_ids": [colon]},
    )
    assert whole["finish_reason"] == "tool_calls" and 0 <= arguments(whole)[0]["level"] <= 9


def test_the_token_that_ends_calls_is_neither_a_call_nor_a_stop_of_the_request(
    server: ServerProcess, folder: Path
) -> None:
    codec = TextCodec(folder)
    bias = {
        str(codec.token_id("<start_function_call>")): 100,
        str(codec.token_id("<start_function_response>")): 60,
    }
    kept = {
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "parallel_tool_calls": False,
    }
    (choice,) = chat(server, BODY | kept | {"logit_bias": bias})
    assert choice["token_ids"][-1] == codec.token_id("<start_function_response>")
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["stop_reason"] is None
        and len(arguments(choice)) == 1
    )


NAMED = {"tool_choice": {"type": "function", "function": {"name": "set_level"}}}


def answered(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def streamed(server: ServerProcess, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """The content, the calls and the finish reason of a streamed answer."""
    content, calls, finish = "", list[list[str]](), ""
    for line in answered(server, body | {"stream": True}).text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for delta in choice["delta"].get("tool_calls", []):
            if "id" in delta:
                calls.append([delta["function"]["name"], ""])
            calls[delta["index"]][1] += delta["function"]["arguments"]
    return content, [(name, text) for name, text in calls], finish


def plain_calls(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_named_function_is_called_once(
    server: ServerProcess, formless: ServerProcess, parallel: bool | None
) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for host in (server, formless):
        for seed in range(3):
            body = BODY | NAMED | {"tools": [other, TOOL], "seed": seed, "temperature": 1.5}
            body |= {"parallel_tool_calls": parallel, "max_tokens": 300}
            (choice,) = chat(host, body)
            calls = plain_calls(choice)
            assert [name for name, _ in calls] == ["set_level"]
            assert choice["finish_reason"] == "tool_calls" and len(arguments(choice)) == 1
            assert streamed(host, body) == ("", calls, "tool_calls")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    }


def test_only_allowed_tools_are_called(
    server: ServerProcess, formless: ServerProcess, raised: dict[str, Any]
) -> None:
    others = [{"type": "function", "function": {"name": name}} for name in ("first", "last")]
    more = {"tools": [others[0], TOOL, others[1]], "temperature": 1.5, "max_tokens": 300}
    ways = [(server, raised, "auto"), (server, BODY, "required"), (formless, BODY, "required")]
    for host, body, mode in ways:
        called = set[str]()
        for seed in range(4):
            one = body | more | allowed(mode, "set_level", "last") | {"seed": seed}
            (choice,) = chat(host, one)
            calls = plain_calls(choice)
            text = choice["message"]["content"] or ""
            assert calls and streamed(host, one) == (text, calls, choice["finish_reason"])
            called |= {name for name, _ in calls}
        assert called == {"set_level", "last"}


def test_the_model_is_shown_tools_that_may_not_be_called(server: ServerProcess) -> None:
    tools = {"tools": [TOOL, {"type": "function", "function": {"name": "other"}}]}
    prompts = [
        answered(server, BODY | tools | choice).json()["usage"]["prompt_tokens"]
        for choice in ({"tool_choice": "required"}, allowed("required", "other"))
    ]
    assert prompts[0] == prompts[1]


def test_what_a_schema_says_that_is_not_followed_is_told(server: ServerProcess) -> None:
    properties = {"a b": {"type": "array", "uniqueItems": True}, "é": {"not": {}}}
    schema = {"type": "object", "properties": properties}
    tools = [TOOL, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    for body in (BODY | {"tools": tools}, BODY | {"tools": tools, "tool_choice": "required"}):
        headers = answered(server, body | {"max_tokens": 4}).headers
        places = ("a%20b/uniqueItems", "%C3%A9/not")
        expected = ", ".join(f"tools.f/properties/{place}" for place in places)
        assert headers["x-onehead-ignored"] == expected
    assert "x-onehead-ignored" not in answered(server, BODY | {"max_tokens": 4}).headers


@pytest.fixture(scope="module")
def formless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model without a format of calls, whose template knows no tools, and refuses
    roles that do not alternate.
    """
    folder = make_tool_checkpoint("plain", tmp_path_factory.mktemp("plain"))
    (folder / "chat_template.jinja").write_text(ALTERNATING)
    with ServerProcess(folder, "--cache.pages", "256") as server:
        yield server


ALTERNATING = (
    "{%- for message in messages -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "<start_of_turn>{{ message.role }}\n{{ message.content | trim }}<end_of_turn>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<start_of_turn>assistant\n{%- endif -%}"
)


def test_a_model_without_a_format_answers_in_text_and_calls_where_it_has_to(
    server: ServerProcess, formless: ServerProcess
) -> None:
    for host, name in ((server, "functiongemma"), (formless, None)):
        assert json.loads(host.get("/v1/models")[1])["data"][0]["tool_call_format"] == name
    kept = {"messages": BODY["messages"], "max_tokens": 40, "seed": 1}
    (free,) = chat(formless, kept)
    (auto,) = chat(formless, kept | {"tools": [TOOL]})
    assert auto["message"] == free["message"]
    told = answered(formless, kept | {"tools": [TOOL]}).headers["x-onehead-ignored"]
    assert told == "tools"
    messages: list[dict[str, Any]] = [*BODY["messages"]]
    for choice in ("required", NAMED["tool_choice"], "auto"):
        body = BODY | {"messages": messages, "tool_choice": choice, "max_tokens": 400}
        (answer,) = chat(formless, body)
        content = answer["message"]["content"] or ""
        assert streamed(formless, body) == (content, plain_calls(answer), answer["finish_reason"])
        if choice == "auto":
            assert not plain_calls(answer)
            break
        assert plain_calls(answer)
        if answer["finish_reason"] == "length":
            answer["message"]["tool_calls"].pop()
        messages.append(answer["message"])
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            for call in answer["message"]["tool_calls"]
        ]


def test_a_format_binds_the_text_and_the_functions_the_calls(
    server: ServerProcess, raised: dict[str, Any]
) -> None:
    level = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": level}}
    (text,) = chat(server, BODY | {"response_format": format})
    assert isinstance(json.loads(text["message"]["content"])["ok"], bool)
    for more in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"response_format": format}):
        (called,) = chat(server, raised | more)
        assert called["finish_reason"] == "tool_calls" and not called["message"]["content"]
        assert streamed(server, raised | more) == ("", plain_calls(called), "tool_calls")
    required = {"tool_choice": "required", "parallel_tool_calls": False, "response_format": format}
    (called,) = chat(server, BODY | required)
    assert 0 <= arguments(called)[0]["level"] <= 9


def test_openais_stream_of_calls(server: ServerProcess, raised: dict[str, Any]) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        with client.chat.completions.stream(model="", **raised) as stream:
            events = [event.type for event in stream]
            (streamed,) = stream.get_final_completion().choices
        (whole,) = chat(server, raised)
    assert (
        "tool_calls.function.arguments.delta" in events
        and "tool_calls.function.arguments.done" in events
    )
    given = [
        (call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()
    ]
    assert given == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in whole["message"]["tool_calls"]
    ]
    assert streamed.finish_reason == whole["finish_reason"] == "tool_calls"


def test_a_template_by_option_is_used_and_a_missing_one_is_named(
    untemplated_folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TOOL_MODELS["granite"].template.replace("<start_of_turn>", "# "))
    with ServerProcess(
        EMBEDDED, "--cache.pages", "256", "--server.chat_template", str(template)
    ) as server:
        (choice,) = chat(server, BODY | {"tool_choice": "required", "parallel_tool_calls": False})
        assert choice["finish_reason"] == "tool_calls" and 0 <= arguments(choice)[0]["level"] <= 9
        assert chat(server, BODY | {"max_tokens": 3})[0]["finish_reason"]
        given = {"messages": BODY["messages"], "tools": [TOOL]}
        assert server.post("/apply-template", given)[1]["prompt"].startswith('{"name": "set_level"')
    with pytest.raises(AssertionError, match=r"missing.jinja: expected a text"):
        ServerProcess(EMBEDDED, "--server.chat_template", str(tmp_path / "missing.jinja"))
    with ServerProcess(untemplated_folder, "--cache.pages", "256") as server:
        status, answer = server.post("/v1/chat/completions", BODY)
        assert status == 400 and "--server.chat_template FILE" in answer["error"]["message"]
