"""LangChain's two ways in: HuggingFaceEndpoint (TGI) and OpenAI, ChatOpenAI."""

from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Literal

from check import run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """The structured answer."""

    total: int


def endpoint(url: str) -> None:
    model = HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=8, task="text-generation")
    assert model.invoke("def add(")
    assert "".join(model.stream("def add("))


def endpoint_stop(url: str) -> None:
    model = HuggingFaceEndpoint(
        endpoint_url=url,
        max_new_tokens=40,
        task="text-generation",
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    assert "\n" not in model.invoke("def add(", stop=["\n"])


def completions(url: str) -> None:
    model = OpenAI(
        base_url=f"{url}/v1", api_key="none", model="embedded", max_tokens=8, temperature=0
    )
    whole = model.invoke("def add(")
    assert whole and "".join(model.stream("def add(")) == whole


def chat(url: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="embedded", max_tokens=8, temperature=0
    )
    whole = model.invoke("hi")
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in model.stream("hi")) == whole.content


def structured(url: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="embedded", max_tokens=40, temperature=0
    )
    assert isinstance(model.with_structured_output(Sum, method="json_schema").invoke("1 + 1"), Sum)


@tool
def set_light(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Turns a light on or off."""
    return f"{room}: {on}"


def tools(url: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="embedded", max_tokens=80, temperature=0
    )
    bound = model.bind_tools([set_light], tool_choice="set_light", parallel_tool_calls=False)
    whole = bound.invoke("Light, please")
    (call,) = whole.tool_calls
    assert set_light.invoke(call["args"])
    (streamed,) = reduce(add, bound.stream("Light, please")).tool_calls
    assert streamed["args"] == call["args"]
    answer = model.bind_tools([set_light]).invoke(
        [HumanMessage("Light, please"), whole, set_light.invoke(call)]
    )
    assert answer.content or answer.tool_calls
    assert isinstance(
        model.with_structured_output(Sum, method="function_calling").invoke("1 + 1"), Sum
    )


run(
    "langchain",
    f"(huggingface {version('langchain-huggingface')}, openai {version('langchain-openai')})",
    [endpoint, endpoint_stop, completions, chat, structured, tools],
)
