"""OpenAI's Responses API: by its own client against the embedded model, and what that does not
show.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFailedEvent
from pydantic import BaseModel

from server.http.body import check
from server.http.openai.chat_fields import plain_messages
from server.http.responses.fields import ResponsesBody
from tests.server.http.test_routes import client_of, make
from tests.support.processes import ServerProcess

ASK = "What is the weather in Oslo?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY}
THOUGHT = {"type": "reasoning_text", "text": "hm"}
GREEDY: dict[str, Any] = {"model": "embedded", "temperature": 0, "max_output_tokens": 64}


class Person(BaseModel):
    """What the text holds."""

    name: str


@pytest.fixture(scope="module")
def client(pretrained_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{pretrained_server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def shape(response: Any) -> Any:
    """A response without what differs from one request to the next."""
    value = response.model_dump(exclude={"created_at", "id"}, exclude_none=True)
    for item in value["output"]:
        item.pop("id"), item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    value["usage"].pop("input_tokens_details")
    return value


@pytest.mark.parametrize(
    "more",
    [
        {"input": "What is 3 + 4?"},
        {"input": "What is 3 + 4?", "max_output_tokens": 2},
        {"input": "What is 3 + 4?", "top_logprobs": 2},
        {"input": ASK, "tools": [WEATHER]},
        {"input": ASK, "tools": [WEATHER], "tool_choice": "required"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]},
        {"input": "What is 3 + 4?", "instructions": "Answer in capitals."},
    ],
    ids=str,
)
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, more: dict[str, Any]) -> None:
    given = GREEDY | more
    whole = client.responses.create(**given)
    with client.responses.stream(**given) as stream:
        events = [*stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last: Any = events[-1]
    assert shape(last.response) == shape(whole) and whole.output
    assert last.type == f"response.{whole.status}"
    assert whole.status == ("incomplete" if more.get("max_output_tokens") else "completed")
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text


def test_a_function_is_called_and_its_output_told(client: openai.OpenAI) -> None:
    first = client.responses.create(input=ASK, tools=[WEATHER], **GREEDY)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo"}
    told: Any = {"type": "function_call_output", "call_id": call.call_id}
    items = [{"role": "user", "content": ASK}, call, told | {"output": "7 degrees and rain"}]
    second = client.responses.create(input=items, tools=[WEATHER], **GREEDY)
    assert "7" in second.output_text


NAMESPACES: Any = [
    {"type": "namespace", "name": name, "description": "", "tools": [WEATHER]}
    for name in ("north", "south")
]
SEARCH: Any = {"type": "web_search"}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "get_weather", "namespace": "south"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [
                {"type": "function", "name": "get_weather", "namespace": "south"},
                SEARCH,
            ],
        },
    ],
    ids=lambda choice: choice["type"],
)
def test_a_function_of_one_of_two_namespaces_is_called(client: openai.OpenAI, choice: Any) -> None:
    tools = [*NAMESPACES, WEATHER]
    whole = client.responses.create(input=ASK, tools=tools, tool_choice=choice, **GREEDY)
    (call,) = whole.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("south", "get_weather")
    assert json.loads(call.arguments)["city"]
    told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    items = [{"role": "user", "content": ASK}, call, told]
    assert client.responses.create(input=items, tools=tools, **GREEDY).output_text
    with client.responses.stream(input=ASK, tools=tools, tool_choice=choice, **GREEDY) as stream:
        assert shape(stream.get_final_response()) == shape(whole)


def test_a_search_is_left_out_and_told(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(input=ASK, tools=[WEATHER, SEARCH], **GREEDY)
    assert raw.headers["x-onehead-ignored"] == "tools.web_search"
    assert json.loads(raw.text)["tools"] == [WEATHER]


async def test_the_model_reads_what_a_namespace_is_for(tmp_path: Path) -> None:
    about = NAMESPACES[0] | {"description": "Of the north."}
    (tool,) = check({"input": "a", "tools": [about]}, ResponsesBody)[0].chat.tools
    assert (tool.function.name, tool.function.description) == (
        "north.get_weather",
        "Of the north.\n\n",
    )
    served = await make(tmp_path, strict_fields=True)
    async with client_of(served) as client:
        body = {"input": "a", "tools": [SEARCH]}
        refused = await client.post("/v1/responses", json=body)
    assert refused.status_code == 400 and "`tools.web_search`" in refused.text


def test_a_class_is_parsed(client: openai.OpenAI) -> None:
    asked = "Write as JSON with the key name: Anna is here."
    parsed = client.responses.parse(input=asked, text_format=Person, **GREEDY).output_parsed
    assert parsed == Person(name="Anna")


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"truncation": "auto"},
        {"conversation": "conv_1"},
        {"max_tool_calls": 3},
        {"tools": [{"type": "file_search"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "namespace", "name": "a", "tools": []}]},
        {"tools": [{"type": "namespace", "tools": [WEATHER]}]},
        {"tools": [WEATHER | {"tools": [WEATHER]}]},
        {"tools": [{"type": "web_search", "tools": [WEATHER]}]},
        {"tool_choice": {"type": "namespace", "name": "a"}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": []},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, more: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=f"`{next(iter(more))}"):
        client.responses.create(**GREEDY | {"input": "a"} | more)


def test_items_are_the_messages_of_a_chat() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [THOUGHT], "id": "rs_1"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:"}
    shown = [{"type": "input_text", "text": "c "}, image]
    output = {"type": "function_call_output", "call_id": "1", "output": shown}
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "b"}]}
    items = [{"role": "user", "content": "a"}, thought, said, call, call | {"call_id": "2"}, output]
    chat = check({"input": items}, ResponsesBody)[0].chat
    user, assistant, tool = plain_messages(chat.messages)
    assert (user["content"], tool["name"]) == ("a", "f")
    assert tool["content"] == "c (input_image that cannot be shown)"
    assert (assistant["content"], assistant["reasoning_content"]) == ("b", "hm")
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]


def test_a_cut_call_is_incomplete(client: openai.OpenAI) -> None:
    given = GREEDY | {"max_output_tokens": 10}
    cut = client.responses.create(input=ASK, tools=[WEATHER], **given)
    assert [item.status for item in cut.output] == ["incomplete"]  # type: ignore[union-attr]


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    included: Any = ["message.output_text.logprobs"]
    with client.responses.stream(input="What is 3 + 4?", include=included, **GREEDY) as stream:
        events: list[Any] = [*stream]
    streamed = [e for event in events if event.type.endswith("text.delta") for e in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    (message,) = events[-1].response.output
    shown = message.content[0].logprobs
    assert "".join(entry.token for entry in shown) == message.content[0].text
    assert [e.logprob for e in streamed] == [e.logprob for e in done.logprobs]
    assert [e.logprob for e in streamed] == [e.logprob for e in shown]


async def test_a_stream_that_fails_ends_with_a_failed_response(tmp_path: Path) -> None:
    served = await make(tmp_path, crash_after=[4, 2, 0, 0, 0])
    body = {"input": "a", "max_output_tokens": 60, "stream": True}
    async with client_of(served) as client:
        answer = await client.post("/v1/responses", json=body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line]
    events = [*map(json.loads, lines)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    failed = ResponseFailedEvent.model_validate(events[-1])
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error is not None and "retried" in failed.response.error.message
    assert events[-1]["response"]["output"][0]["content"][0]["text"]


async def test_a_resumable_stream_is_read_again(tmp_path: Path) -> None:
    served = await make(tmp_path)
    body = {"input": "a", "max_output_tokens": 4, "stream": True, "resumable": True}
    async with client_of(served) as client:
        first = await client.post("/v1/responses", json=body)
        again = await client.get(f"/v1/streams/{first.headers['x-stream-id']}?after=2")
    events = first.text.split("\n\n")
    assert again.text.split("\n\n") == events[2:]
    assert events[2].splitlines()[1] == "event: response.output_item.added"
