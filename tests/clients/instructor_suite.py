"""instructor in every mode of its provider openai: what the mode asks the server for is enforced in
TOOLS and JSON_SCHEMA; in the others the server only has to do what is asked.
"""

import json
import urllib.request
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from check import run
from instructor import Mode
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
COMMON: dict[str, Any] = {"model": "embedded", "max_tokens": 80, "temperature": 0, "max_retries": 0}


class Answer(BaseModel):
    """What is to be extracted."""

    kind: Literal["greeting", "question"]
    count: int = Field(ge=0, le=9)


class Anything(BaseModel):
    """Any JSON object: the format json_object promises no more."""


class Light(BaseModel):
    """Turns a light on or off."""

    on: bool


def client(url: str, mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)


def extracted(url: str, mode: Mode, model: Any = Answer, **more: Any) -> Any:
    arguments = COMMON | {"messages": MESSAGES, "response_model": model, **more}
    return client(url, mode).chat.completions.create(**arguments)


def enforced_modes(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA, Mode.JSON_O1):
        answer = extracted(url, mode)
        assert isinstance(answer, Answer) and 0 <= answer.count <= 9, (mode, answer)


def streamed(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        arguments = COMMON | {"messages": MESSAGES}
        arguments.pop("max_retries")
        parts = [*client(url, mode).create_partial(response_model=Answer, **arguments)]
        assert parts[-1].model_dump() == extracted(url, mode).model_dump(), mode


def json_mode(url: str) -> None:
    body = json.dumps({"prompt": "}", "add_special_tokens": False}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/tokenize", body, headers)) as answer:
        (end,) = json.load(answer)["tokens"]
    assert isinstance(extracted(url, Mode.JSON, Anything, logit_bias={end: 100}), Anything)


def md_json_mode(url: str) -> None:
    block = r'```json\n\{"kind": "(greeting|question)", "count": [0-9]\}\n```'
    only = {"structured_outputs": {"regex": block}}
    assert isinstance(extracted(url, Mode.MD_JSON, extra_body=only), Answer)


def parallel_tools_mode(url: str) -> None:
    """Under `auto`, after an exchange that the model goes on with."""
    light = {"name": "Light", "arguments": '{"on": true}'}
    call = {"id": "a", "type": "function", "function": light}
    earlier = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    more = {"messages": [*earlier, *MESSAGES], "parallel_tool_calls": False}
    (found,) = extracted(url, Mode.PARALLEL_TOOLS, Iterable[Light | Answer], **more)
    assert isinstance(found, Light | Answer), found


def unserved_modes(url: str) -> None:
    """Those of the route /v1/responses are told so by its status."""
    for mode in (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS):
        try:
            extracted(url, mode)
        except Exception as error:
            assert "404" in str(error), error
        else:
            raise AssertionError(f"{mode} was answered")


warnings.simplefilter("ignore")  # Of modes that instructor knows by another name by now.
run(
    "instructor",
    version("instructor"),
    [enforced_modes, streamed, json_mode, md_json_mode, parallel_tools_mode, unserved_modes],
)
