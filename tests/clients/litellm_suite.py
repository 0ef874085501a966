"""litellm's providers for servers like this one."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Or it asks the internet for prices.

from importlib.metadata import version

import litellm
from check import run

MESSAGES = [{"role": "user", "content": "hi"}]


def openai_chat(url: str) -> None:
    answer = litellm.completion(
        "openai/embedded", MESSAGES, api_base=f"{url}/v1", api_key="none", max_tokens=6
    )
    assert answer.choices[0].message.content is not None and answer.usage.completion_tokens == 6


def hosted_vllm_stream(url: str) -> None:
    chunks = litellm.completion(
        "hosted_vllm/embedded", MESSAGES, api_base=f"{url}/v1", max_tokens=6, stream=True, top_k=5
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def text_completion(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/embedded",
        prompt="def add(",
        api_base=f"{url}/v1",
        api_key="none",
        max_tokens=6,
    )
    assert answer.choices[0].text


def json_schema(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = litellm.completion(
        "hosted_vllm/embedded",
        MESSAGES,
        api_base=f"{url}/v1",
        max_tokens=40,
        temperature=0,
        response_format=shape,
    )
    assert answer.choices[0].message.content.startswith('{"a":')


def tools(url: str) -> None:
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    light = {
        "type": "function",
        "function": {
            "name": "set_light",
            "description": "Turns the light on or off",
            "parameters": parameters,
        },
    }
    common = {
        "api_base": f"{url}/v1",
        "api_key": "none",
        "tools": [light],
        "max_tokens": 60,
        "temperature": 0,
    }
    answer = litellm.completion(
        "openai/embedded", MESSAGES, tool_choice="required", parallel_tool_calls=False, **common
    )
    message, (call,) = answer.choices[0].message, answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "set_light"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    chunks = litellm.completion(
        "hosted_vllm/embedded",
        MESSAGES,
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        **common,
    )
    whole = litellm.stream_chunk_builder([*chunks])
    assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = litellm.completion("openai/embedded", [*MESSAGES, message, result], **common)
    assert answer.choices[0].message.content


run(
    "litellm",
    version("litellm"),
    [openai_chat, hosted_vllm_stream, text_completion, json_schema, tools],
)
