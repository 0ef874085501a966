"""What a chat template is given of a request's messages and tools."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.errors import InvalidRequest
from server.http.body import check
from server.http.openai.chat_fields import MAX_ARGUMENT_CHARS, ChatBody, plain_messages
from server.text.jobs import EncodeChat

USER = {"role": "user", "content": "hi"}


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": arguments}, **fields}]}


def body(*messages: dict[str, Any], **fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [*messages], **fields})


def test_a_result_has_the_name_of_its_function_and_no_other_message_has() -> None:
    answered = {"role": "tool", "content": "1", "tool_call_id": "a"}
    given = plain_messages(body(USER, call("{}"), call("", id="a"), answered, answered | {"name": "own"}, USER).messages)
    assert [message.get("name") for message in given] == [None, None, None, "get", "own", None]
    assert given[2]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["5", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "null"])
def test_arguments_are_the_text_of_an_object(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="`arguments` of a call"):
        body(USER, call(arguments)).chat_input()


@pytest.mark.parametrize("arguments", [0, [], False, {}])
def test_arguments_are_a_text(arguments: Any) -> None:
    with pytest.raises(ValidationError):
        body(USER, call(arguments))


def test_all_arguments_together_are_bounded() -> None:
    half = json.dumps({"a": "x" * (MAX_ARGUMENT_CHARS // 2 - 9)})
    assert body(USER, call(half), call(half)).chat_input()
    with pytest.raises(InvalidRequest, match=str(MAX_ARGUMENT_CHARS)):
        body(USER, call(half), call(half), call('{"a": "xxxxxxxxxxxxxxxx"}')).chat_input()


def test_integers_of_more_than_64_bits_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "maximum": 10**30}}}
    for refused in (
        body(USER, tools=[tool]),
        body(USER, call(json.dumps({"a": -(10**30)}))),
        body(USER, chat_template_kwargs={"a": 10**30}),
    ):
        with pytest.raises(InvalidRequest, match="64 bits"):
            assert EncodeChat(refused.chat_input()).num_chars


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("bogus", "`tool_choice` is supported only as 'none', 'auto' or 'required'"),
        (5, "`tool_choice` is supported only as 'none', 'auto' or 'required'"),
        ({"type": "functionx", "function": {"name": "a"}}, "`tool_choice.type` is supported only as 'function'"),
        ({"type": "function", "function": {"name": "a b"}}, "`tool_choice.function.name` must match"),
    ],
)
def test_errors_name_the_field(choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({"messages": [USER], "tool_choice": choice}, ChatBody)
    assert str(caught.value).startswith(message)
