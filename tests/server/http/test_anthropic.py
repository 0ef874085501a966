"""Anthropic's Messages API: by its own client against the embedded model, and what that does not
show.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from server.http.anthropic.fields import BILLING, CountBody
from server.http.body import check
from tests.server.http.test_routes import client_of, make
from tests.support.fake_engine import Served
from tests.support.processes import ServerProcess

ADD: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Current weather", "input_schema": CITY}
GREEDY: Any = {"max_tokens": 64, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(pretrained_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{pretrained_server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


# --- its client


@pytest.mark.parametrize(
    "more",
    [
        {"messages": ADD},
        {"messages": ADD, "stop_sequences": ["="]},
        {"messages": [*ADD, {"role": "assistant", "content": "3 + 4"}]},
        {"messages": ASK, "tools": [WEATHER]},
        {"messages": ASK, "tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"messages": ADD, "max_tokens": 2},
        {"messages": ADD, "system": [{"type": "text", "text": "Answer in capitals."}]},
    ],
    ids=str,
)
def test_a_stream_is_the_whole_answer(client: anthropic.Anthropic, more: dict[str, Any]) -> None:
    given: Any = {"model": "embedded"} | GREEDY | more
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] != []
    for ours, theirs in zip(streamed.content, whole.content, strict=True):
        for name in ("type", "text", "name", "input"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
    for name in ("stop_reason", "stop_sequence", "role"):
        assert getattr(streamed, name) == getattr(whole, name)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = {name: value for name, value in given.items() if name in ("messages", "tools")}
    if "system" not in more:
        tokens = client.messages.count_tokens(model="embedded", **counted).input_tokens
        assert tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    def reason(**more: Any) -> tuple[Any, Any]:
        answer = client.messages.create(**{"model": "embedded", "messages": ADD} | GREEDY | more)
        return answer.stop_reason, answer.stop_sequence

    assert reason() == ("end_turn", None)
    assert reason(max_tokens=2) == ("max_tokens", None)
    assert reason(stop_sequences=["="]) == ("stop_sequence", "=")
    named = {"type": "tool", "name": "get_weather"}
    assert reason(messages=ASK, tools=[WEATHER], tool_choice=named) == ("tool_use", None)
    assert reason(messages=ASK, tools=[WEATHER], tool_choice={"type": "none"})[0] == "end_turn"


def test_a_tool_is_used_and_its_result_told(client: anthropic.Anthropic) -> None:
    given: Any = {"model": "embedded", "tools": [WEATHER]} | GREEDY
    (use,) = client.messages.create(messages=ASK, **given).content
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Oslo"})  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7 degrees and rain"}  # type: ignore[union-attr]
    told = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    (text,) = client.messages.create(messages=[*ASK, *told], **given).content
    assert text.type == "text" and "7" in text.text


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "no such model"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "`max_tokens` must be >= 1"),
        ({"container": "a"}, anthropic.BadRequestError, "`container`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "type` is supported only as",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "`tools.0.type`",
        ),
        ({"messages": []}, anthropic.BadRequestError, "`messages` cannot be empty"),
        (  # By these words a client knows that it has to shorten the conversation.
            {"messages": [{"role": "user", "content": "a b " * 3000}]},
            anthropic.BadRequestError,
            r"prompt is too long: \d+ tokens > \d+ maximum",
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_said(
    client: anthropic.Anthropic, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    given: Any = {"model": "embedded", "messages": ADD, "max_tokens": 8} | more
    extra = {"container": given.pop("container")} if "container" in given else {}
    with pytest.raises(error, match=text) as caught:
        client.messages.create(**given, extra_body=extra)
    assert caught.value.body["type"] == "error"  # type: ignore[attr-defined]


# --- the wire


async def post(served: Served, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with client_of(served) as client:
        body = {"max_tokens": 4, "messages": ADD} | body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post("/v1/messages", json=body, headers=named)


def prompt(served: Served) -> str:
    return served.generation.codec.decode(served.engine.submits[-1].prompt)


async def test_a_block_that_differs_in_every_request_is_left_out(tmp_path: Path) -> None:
    served = await make(tmp_path)
    text = {"type": "text", "text": "be brief"}
    billed = {"type": "text", "text": f"{BILLING} cc_version=1; cch=123"}
    await post(served, {"system": [text]})
    before = prompt(served)
    await post(served, {"system": [billed, text]})
    assert prompt(served) == before and "be brief" in before


async def test_neighbours_of_one_author_are_one_message(tmp_path: Path) -> None:
    served = await make(tmp_path)
    await post(served, {"messages": [{"role": "user", "content": "a\nb"}]})
    before = prompt(served)
    await post(served, {"messages": [{"role": "user", "content": each} for each in "ab"]})
    assert prompt(served) == before


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": ""}], [("user", "")]),
        ([{"role": "user", "content": []}], [("user", "")]),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            [("user", "a\nb")],
        ),
        (
            [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "is_error": True}
                        | {"content": [{"type": "image", "source": {}}]},
                        {"type": "text", "text": "b"},
                    ],
                },
            ],
            [("assistant", "a"), ("tool", "Error: (image that cannot be shown)"), ("user", "b")],
        ),
    ],
)
def test_messages_in_openai(messages: Any, expected: list[tuple[str, str]]) -> None:
    body, _ = check({"messages": messages}, CountBody)
    chat = body.chat
    texts = ["".join(part.text for part in each.content or ()) for each in chat.messages]
    assert [(e.role, text) for e, text in zip(chat.messages, texts, strict=True)] == expected


async def test_the_end_of_the_context_is_told(tmp_path: Path) -> None:
    answer = (await post(await make(tmp_path), {"max_tokens": 32000})).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 128


async def test_a_key_is_taken_from_its_header(tmp_path: Path) -> None:
    served = await make(tmp_path, api_keys=[hashlib.sha256(b"mine").hexdigest()])
    assert (await post(served, {}, x_api_key="mine")).status_code == 200
    refused = await post(served, {}, x_api_key="yours")
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    both = await post(served, {}, x_api_key="mine", authorization="Bearer yours")
    assert both.status_code == 401


async def test_a_stream_that_fails_ends_with_an_event_of_its_error(tmp_path: Path) -> None:
    served = await make(tmp_path, crash_after=[4, 2, 0, 0, 0])
    answer = await post(served, {"max_tokens": 60, "stream": True})
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[0][0] == "event: message_start" and events[-1][0] == "event: error"
    assert json.loads(events[-1][1].removeprefix("data: "))["error"]["type"] == "api_error"
