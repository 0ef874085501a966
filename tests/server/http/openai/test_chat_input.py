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


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get", "arguments": arguments}, **fields}],
    }


def body(*messages: dict[str, Any], **fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [*messages], **fields})


def test_a_result_has_the_name_of_its_function_and_no_other_message_has() -> None:
    answered = {"role": "tool", "content": "1", "tool_call_id": "a"}
    given = plain_messages(
        body(
            USER, call("{}"), call("", id="a"), answered, answered | {"name": "own"}, USER
        ).messages
    )
    assert [message.get("name") for message in given] == [None, None, None, "get", "own", None]
    assert given[2]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["5", "[]", "{", '{"a": NaN}', "null"])
def test_arguments_are_the_text_of_an_object(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="`arguments` of a call"):
        body(USER, call(arguments)).chat_input()


def test_the_last_of_a_key_counts_in_what_a_model_has_written() -> None:
    (_, given) = (
        body(USER, call('{"a": {"": 1, "": 2}, "a": {"": 3, "": 4}}')).chat_input().messages
    )
    assert given["tool_calls"][0]["function"]["arguments"] == {"a": {"": 4}}


@pytest.mark.parametrize("arguments", [0, [], False])
def test_arguments_are_a_text_or_an_object(arguments: Any) -> None:
    with pytest.raises(ValidationError):
        body(USER, call(arguments))


def test_an_object_is_the_same_as_its_text() -> None:
    value = {"city": "Z\u00fcrich \u2603", "deep": {"a": [1, None, 1.5, True]}}
    texts = [call(value), call(json.dumps(value)), call(json.dumps(value, ensure_ascii=False))]
    given = [body(USER, message).chat_input().messages[1] for message in texts]
    assert (
        given[0] == given[1] == given[2]
        and given[0]["tool_calls"][0]["function"]["arguments"] == value
    )
    without = body(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "get"}}]})
    assert (
        without.chat_input()
        == body(USER, call({})).chat_input()
        == body(USER, call("")).chat_input()
    )


def test_no_calls_are_the_same_as_none() -> None:
    said = {"role": "assistant", "content": "x"}
    nones: list[dict[str, Any]] = [
        {"tool_calls": []},
        {"tool_calls": None},
        {"tool_calls": [], "refusal": None, "function_call": None},
    ]
    for none in nones:
        checked = check({"messages": [USER | none, said | none]}, ChatBody)[0]
        assert checked.chat_input() == body(USER, said).chat_input()
    checked = check({"messages": [USER | {"reasoning_content": "", "tool_call_id": ""}]}, ChatBody)[
        0
    ]
    assert checked.messages[0].content == body(USER).messages[0].content


# What clients send of messages and tools beside what a template is given: all of it is left out of
# the template.
DECORATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (USER | {"cache_control": {"type": "ephemeral"}}, USER),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        },
        USER,
    ),
    (USER | {"id": "msg_1", "createdAt": 1, "metadata": {"a": 1}, "parts": []}, USER),
    (
        {
            "role": "assistant",
            "content": "x",
            "refusal": None,
            "annotations": [{"type": "url_citation"}],
            "audio": None,
        },
        {"role": "assistant", "content": "x"},
    ),
    (
        {"role": "assistant", "content": "x", "parsed": {"a": 1}, "provider_specific_fields": {}},
        {"role": "assistant", "content": "x"},
    ),
    (call({}, index=0, type="function", cache_control={}, provider="x"), call({}, type="function")),
    (call({}, type=None), call({})),
]


@pytest.mark.parametrize(("sent", "given"), DECORATED, ids=lambda x: str(x)[:50])
def test_the_template_is_given_what_it_knows(sent: dict[str, Any], given: dict[str, Any]) -> None:
    assert (
        check({"messages": [USER, sent]}, ChatBody)[0].chat_input()
        == check({"messages": [USER, given]}, ChatBody)[0].chat_input()
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"strict": True},
        {"cache_control": {"type": "ephemeral"}},
        {"type": None},
        {
            "function": {
                "name": "get",
                "strict": True,
                "return": {"type": "string"},
                "cache_control": {},
                "examples": [1],
            }
        },
    ],
    ids=str,
)
def test_a_tool_has_further_keys(extra: dict[str, Any]) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "get"}}
    assert (
        check({"messages": [USER], "tools": [tool | extra]}, ChatBody)[0].chat_input()
        == body(USER, tools=[tool]).chat_input()
    )


NAMED = {"type": "function", "function": {"name": "get"}}


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ("any", "required"),
        ({"type": "any"}, "required"),
        ({"type": "required"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "none", "disable_parallel_tool_use": True}, "none"),
        ({"function": {"name": "get"}}, NAMED),
        ({"type": None, "function": {"name": "get", "strict": True}}, NAMED),
    ],
    ids=str,
)
def test_a_choice_of_a_tool_is_spelt_in_other_ways(choice: Any, same: Any) -> None:
    both = [
        check({"messages": [USER], "tools": [NAMED], "tool_choice": given}, ChatBody)[0]
        for given in (choice, same)
    ]
    assert both[0].tool_choice == both[1].tool_choice and both[0].calls == both[1].calls


# (variables of the template, fields, the variables that are given, what is told)
VARIABLES: list[tuple[set[str], dict[str, Any], dict[str, Any], list[str]]] = [
    ({"reasoning_effort"}, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, []),
    (
        {"reasoning_effort", "enable_thinking"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none"},
        [],
    ),
    ({"enable_thinking"}, {"reasoning_effort": "none"}, {"enable_thinking": False}, []),
    ({"enable_thinking"}, {"reasoning_effort": "minimal"}, {"enable_thinking": False}, []),
    ({"enable_thinking"}, {"reasoning_effort": "xhigh"}, {"enable_thinking": True}, []),
    ({"enable_thinking"}, {"reasoning_effort": 3}, {}, ["reasoning_effort"]),
    (
        {"enable_thinking"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        [],
    ),
    (set(), {"reasoning_effort": "high"}, {}, ["reasoning_effort"]),
    (set(), {"reasoning_effort": {"effort": "high"}}, {}, ["reasoning_effort"]),
    (
        {"mood"},
        {"chat_template_kwargs": {"mood": "calm", "b c": 1}},
        {"mood": "calm"},
        ["chat_template_kwargs.b%20c"],
    ),
    (
        set(),
        {"chat_template_kwargs": {"enable_thinking": False}},
        {},
        ["chat_template_kwargs.enable_thinking"],
    ),
    ({"mood"}, {}, {}, []),
]


@pytest.mark.parametrize(
    ("variables", "given", "used", "told"), VARIABLES, ids=map(str, range(len(VARIABLES)))
)
def test_the_template_gets_the_variables_that_it_reads(
    variables: set[str], given: dict[str, Any], used: dict[str, Any], told: list[str]
) -> None:
    checked = body(USER, **given)
    assert checked.fit(variables) == told and checked.chat_input().variables == used


def test_all_arguments_together_are_bounded() -> None:
    half = json.dumps({"a": "x" * (MAX_ARGUMENT_CHARS // 2 - 9)})
    assert body(USER, call(half), call(half)).chat_input()
    with pytest.raises(InvalidRequest, match=str(MAX_ARGUMENT_CHARS)):
        body(USER, call(half), call(half), call('{"a": "xxxxxxxxxxxxxxxx"}')).chat_input()


def test_integers_of_more_than_64_bits_are_refused() -> None:
    tool = {
        "type": "function",
        "function": {"name": "get", "parameters": {"type": "object", "maximum": 10**30}},
    }
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
        (
            {
                "type": "function",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "`tool_choice` has the type function, and names the other",
        ),
        (
            {"type": "functionx", "function": {"name": "a"}},
            "`tool_choice.type` is supported only as 'function'",
        ),
        (
            {"type": "function", "function": {"name": "a b"}},
            "`tool_choice.function.name` must match",
        ),
    ],
)
def test_errors_name_the_field(choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({"messages": [USER], "tool_choice": choice}, ChatBody)
    assert str(caught.value).startswith(message)
