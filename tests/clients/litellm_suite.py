"""litellm's providers for servers like this one."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Or it asks the internet for prices.

from importlib.metadata import version

import litellm
from check import run

MESSAGES = [{"role": "user", "content": "hi"}]


def openai_chat(url: str) -> None:
    answer = litellm.completion("openai/embedded", MESSAGES, api_base=f"{url}/v1", api_key="none", max_tokens=6)
    assert answer.choices[0].message.content is not None and answer.usage.completion_tokens == 6


def hosted_vllm_stream(url: str) -> None:
    chunks = litellm.completion("hosted_vllm/embedded", MESSAGES, api_base=f"{url}/v1", max_tokens=6, stream=True, top_k=5)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def text_completion(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/embedded", prompt="def add(", api_base=f"{url}/v1", api_key="none", max_tokens=6
    )
    assert answer.choices[0].text


def json_schema(url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = litellm.completion("hosted_vllm/embedded", MESSAGES, api_base=f"{url}/v1", max_tokens=40, temperature=0, response_format=shape)
    assert answer.choices[0].message.content.startswith('{"a":')


run("litellm", version("litellm"), [openai_chat, hosted_vllm_stream, text_completion, json_schema])
