"""Calls over HTTP: several choices, stop strings, bounds of length, constraints that exclude each other, and the option of a template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.text.codec import TextCodec
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess
from tests.support.tool_checkpoints import TOOL_MODELS, make_tool_checkpoint

LEVELS = {"type": "object", "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["level"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "set_level", "parameters": LEVELS}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "max_tokens": 80, "seed": 4}


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
        assert choice["finish_reason"] == "tool_calls" and all(0 <= given["level"] <= 9 for given in arguments(choice))
    (cut,) = chat(server, BODY | {"tool_choice": "required", "max_tokens": 5})
    assert cut["finish_reason"] == "length"


def test_the_engine_refuses_nothing_that_the_fields_allow(server: ServerProcess, raised: dict[str, Any]) -> None:
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


def test_a_call_that_a_stop_token_cuts_is_not_reported_as_whole(server: ServerProcess, raised: dict[str, Any], folder: Path) -> None:
    (colon,) = TextCodec(folder).encode_bare("{")
    for more in ({}, {"include_stop_str_in_output": True}):
        (cut,) = chat(server, raised | {"stop_token_ids": [colon]} | more)
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", colon)
    (whole,) = chat(server, BODY | {"tool_choice": "required", "parallel_tool_calls": False, "stop_token_ids": [colon]})
    assert whole["finish_reason"] == "tool_calls" and 0 <= arguments(whole)[0]["level"] <= 9


def test_the_token_that_ends_calls_is_neither_a_call_nor_a_stop_of_the_request(server: ServerProcess, folder: Path) -> None:
    codec = TextCodec(folder)
    bias = {str(codec.token_id("<start_function_call>")): 100, str(codec.token_id("<start_function_response>")): 60}
    kept = {"include_stop_str_in_output": True, "skip_special_tokens": False, "return_token_ids": True, "parallel_tool_calls": False}
    (choice,) = chat(server, BODY | kept | {"logit_bias": bias})
    assert choice["token_ids"][-1] == codec.token_id("<start_function_response>")
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None and len(arguments(choice)) == 1


def test_openais_stream_of_calls(server: ServerProcess, raised: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(model="", **raised) as stream:
            events = [event.type for event in stream]
            (streamed,) = stream.get_final_completion().choices
        (whole,) = chat(server, raised)
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    given = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    assert given == [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
    assert streamed.finish_reason == whole["finish_reason"] == "tool_calls"


def test_a_template_by_option_is_used_and_a_missing_one_is_named(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TOOL_MODELS["granite"].template.replace("<start_of_turn>", "# "))
    with ServerProcess(EMBEDDED, "--cache.pages", "256", "--server.chat_template", str(template)) as server:
        (choice,) = chat(server, BODY | {"tool_choice": "required", "parallel_tool_calls": False})
        assert choice["finish_reason"] == "tool_calls" and 0 <= arguments(choice)[0]["level"] <= 9
        assert chat(server, BODY | {"max_tokens": 3})[0]["finish_reason"]
        given = {"messages": BODY["messages"], "tools": [TOOL]}
        assert server.post("/apply-template", given)[1]["prompt"].startswith('{"name": "set_level"')
    with pytest.raises(AssertionError, match=r"missing.jinja: expected a text"):
        ServerProcess(EMBEDDED, "--server.chat_template", str(tmp_path / "missing.jinja"))
    with ServerProcess(EMBEDDED, "--cache.pages", "256") as server:
        status, answer = server.post("/v1/chat/completions", BODY)
        assert status == 400 and "--server.chat_template FILE" in answer["error"]["message"]
