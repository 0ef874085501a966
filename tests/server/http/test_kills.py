"""The engine is killed while a client reads a part of an answer, of each kind: what the client has
put together at the end is the answer of an undisturbed server.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.processes import ServerProcess, wait_until
from tests.support.tool_checkpoints import make_tool_checkpoint

pytestmark = pytest.mark.nightly

ASK: list[Any] = [{"role": "user", "content": "List them."}]
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NUMBERS = {"type": "array", "items": DIGIT, "minItems": 500, "maxItems": 500}
SCHEMA = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
MOST = 2000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tool_checkpoint("gemma4", tmp_path_factory.mktemp("model"))
    server = ServerProcess(folder, "--server.model_name", "random")
    yield server
    assert server.stop() == 0


def kill(server: ServerProcess) -> None:
    """Kills the engine while a request runs, and waits until there is another."""
    killed = server.engine_pid
    assert server.metric("onehead_requests_running") == 1
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: server.engine_pid not in (None, killed), "a new engine")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("thinking", {"thinking": {"type": "adaptive"}}),
        ("text", {}),
        ("tool_use", {"tool_choice": {"type": "any"}}),
    ],
)
def test_messages(server: ServerProcess, kind: str, more: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    tools = [{"name": "show", "input_schema": SCHEMA}] if "tool_choice" in more else []
    given: Any = {"model": "random", "messages": ASK, "max_tokens": MOST, "tools": tools} | more
    given["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**given)
        num_deltas = 0
        with client.messages.stream(**given) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    if num_deltas == 0:
                        kill(server)
                    num_deltas += 1
            streamed = stream.get_final_message()
    assert whole.content[0].type == kind and num_deltas > 20
    for ours, theirs in zip(streamed.content, whole.content, strict=True):
        assert ours.to_dict() | {"id": ""} == theirs.to_dict() | {"id": ""}
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("reasoning", {"reasoning": {"effort": "high"}}),
        ("message", {}),
        ("function_call", {"tool_choice": "required"}),
    ],
)
def test_responses(server: ServerProcess, kind: str, more: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    tools = [{"type": "function", "name": "show", "parameters": SCHEMA}]
    given: Any = {"model": "random", "input": ASK, "max_output_tokens": MOST, "temperature": 0}
    given |= more | {"tools": tools if "tool_choice" in more else []}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.responses.create(**given)
        num_deltas = 0
        with client.responses.stream(**given) as stream:
            for event in stream:
                if event.type.endswith(".delta"):
                    if num_deltas == 0:
                        kill(server)
                    num_deltas += 1
            streamed = event.response
    assert whole.output[0].type == kind and num_deltas > 20
    left_out: Any = {"id": True, "call_id": True, "parsed_arguments": True}
    left_out["content"] = {"__all__": {"parsed"}}
    for ours, theirs in zip(streamed.output, whole.output, strict=True):
        assert ours.model_dump(exclude=left_out) == theirs.model_dump(exclude=left_out)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
