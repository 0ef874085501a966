"""Bodies in the shapes that Open WebUI's backend sends to a server of OpenAI's API: a streamed chat
with every parameter of its settings that such servers get, its tasks, and a turn after a call.

The shapes follow its routers/openai.py, routers/tasks.py and utils/payload.py: what a user sets is
sent under its own name, what a user does not set is left out, and only a title has a maximum.
"""

import json
from typing import Any

import httpx
import pytest

from tests.support.processes import ServerProcess

PARAMETERS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "max_tokens": 6,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "seed": 7,
    "stop": ["\n\n\n"],
    "logit_bias": {"11": -100},
    "reasoning_effort": "high",
}
OF_OLLAMA: dict[str, Any] = {
    "think": True,
    "num_ctx": 4096,
    "num_keep": 24,
    "num_batch": 512,
    "num_thread": 4,
    "num_gpu": 1,
    "use_mmap": True,
    "use_mlock": True,
    "keep_alive": "5m",
    "repeat_last_n": 64,
    "mirostat": 0,
    "tfs_z": 1,
}
"""Settings for Ollama's servers, which the same page of the settings shows for any other."""
LIGHT: dict[str, Any] = {
    "name": "set_light",
    "description": "Turns a light on or off.",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean", "description": "Whether it is to be on"}},
        "required": ["on"],
    },
}
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "set_light", "arguments": '{"on": true}'},
}
TASK = '### Task:\nGenerate a concise title.\n### Output:\nJSON format: { "title": "..." }'


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    return {"model": "embedded", "messages": messages, "stream": True} | more


def answered(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    assert lines and "data: [DONE]" in lines
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def text(response: httpx.Response) -> str:
    deltas = [event["choices"][0]["delta"] for event in events(response)]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_streamed_chat_with_every_parameter(embedded_server: ServerProcess) -> None:
    asked = chat(**PARAMETERS, stream_options={"include_usage": True})
    response = answered(embedded_server, asked)
    *_, last, usage = events(response)
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    assert usage["choices"] == [] and 1 <= usage["usage"]["completion_tokens"] <= 6
    # The template of this checkpoint has no switch for thoughts.
    assert response.headers["x-onehead-ignored"] == "reasoning_effort"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "xhigh", "max", "12000"])
def test_any_reasoning_effort(embedded_server: ServerProcess, effort: str) -> None:
    given = chat(reasoning_effort=effort, max_tokens=2, temperature=0)
    without = chat(max_tokens=2, temperature=0)
    texts = [text(answered(embedded_server, body)) for body in (given, without)]
    assert texts[0] == texts[1]


def test_settings_of_ollama_are_told(embedded_server: ServerProcess) -> None:
    response = answered(embedded_server, chat(max_tokens=2, **OF_OLLAMA))
    assert set(response.headers["x-onehead-ignored"].split(", ")) == set(OF_OLLAMA)


@pytest.mark.parametrize("name", ["repeat_penalty", "format"])
def test_ollamas_that_change_answers_are_refused(embedded_server: ServerProcess, name: str) -> None:
    values = {"repeat_penalty": 1.1, "format": "json"}
    status, body = embedded_server.post("/v1/chat/completions", chat() | {name: values[name]})
    assert status == 400 and body["error"]["param"] == name
    assert "did you mean" in body["error"]["message"]


def test_tasks(embedded_server: ServerProcess) -> None:
    """A title has a maximum; tags, questions and completions of the input have none, so a stop ends
    them here.
    """
    task = {"model": "embedded", "messages": [{"role": "user", "content": TASK}], "stream": False}
    for more in ({"max_completion_tokens": 8}, {"stop": ["e"]}):
        (choice,) = answered(embedded_server, task | more).json()["choices"]
        assert isinstance(choice["message"]["content"], str)


def test_native_calls(embedded_server: ServerProcess) -> None:
    """A call, and the turn after it, whose message has content and calls with an index."""
    tools = [{"type": "function", "function": LIGHT}]
    body = chat(tools=tools, max_tokens=60, reasoning_effort="low", tool_choice="required")
    first = events(answered(embedded_server, body | {"parallel_tool_calls": False}))
    parts = [event["choices"][0]["delta"].get("tool_calls", []) for event in first]
    deltas = [delta for part in parts for delta in part]
    arguments = json.loads("".join(delta["function"]["arguments"] for delta in deltas))
    assert deltas[0]["function"]["name"] == "set_light" and isinstance(arguments["on"], bool)
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    del body["tool_choice"]
    *_, last = events(answered(embedded_server, body))
    assert last["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_parameters_of_its_own_page_of_json(embedded_server: ServerProcess) -> None:
    """`custom_params` are sent as fields of the body."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    custom = {"chat_template_kwargs": {"enable_thinking": False}, "response_format": shape}
    answer = text(answered(embedded_server, chat(max_tokens=40, **custom)))
    assert isinstance(json.loads(answer)["a"], bool)
