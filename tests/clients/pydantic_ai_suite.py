"""pydantic-ai over chat completions: text, output types in three ways, tasks of several calls."""

import asyncio
import json
import urllib.request
from importlib.metadata import version
from typing import Any, Literal

from check import run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, ModelAPIError, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
from pydantic_ai.settings import ModelSettings

STEPS = 3
Context = RunContext[list[str]]


class Light(BaseModel):
    """A setting of a light."""

    room: Literal["kitchen", "hall"]
    on: bool
    level: Literal[0, 1, 2] = 0


class AnyObject(BaseModel):
    """Any JSON object: the format json_object promises no more."""

    model_config = ConfigDict(extra="allow")


class CallsFirst(AbstractCapability[list[str]]):
    """Has the model call `set_light` in each of STEPS turns, by the first choice, and then give its
    output, by the other one.
    """

    def __init__(self, first: Any, then: Any) -> None:
        self._first, self._then = first, then

    def get_model_settings(self) -> Any:
        def settings(context: RunContext[list[str]]) -> ModelSettings:
            is_first = len(context.deps) < STEPS
            return ModelSettings(tool_choice=self._first if is_first else self._then)

        return settings


TASKS = (
    (ToolOutput(Light), CallsFirst(["set_light"], ["final_result"])),
    (NativeOutput(Light), CallsFirst("required", "none")),
)
"""Output types, and how they are come to."""


def model(url: str, **settings: Any) -> OpenAIChatModel:
    provider = OpenAICompatibleProvider("onehead", base_url=f"{url}/v1", api_key="none")
    defaults = {"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    given = ModelSettings(**defaults | settings)
    return OpenAIChatModel("embedded", provider=provider, settings=given)


def token(url: str, text: str) -> str:
    """The id of the token that a text is, as logit_bias wants it."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/tokenize", body, headers)) as answer:
        (id,) = json.load(answer)["tokens"]
    return str(id)


def text(url: str) -> None:
    agent = Agent(model(url, max_tokens=8), instructions="Be brief.")
    whole = agent.run_sync("hi")
    assert whole.output and whole.usage.output_tokens == 8

    async def streamed() -> str:
        async with agent.run_stream("hi") as result:
            return "".join([delta async for delta in result.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole.output
    assert agent.run_sync("Go on.", message_history=whole.all_messages()).output


def output_types(url: str) -> None:
    for output in (ToolOutput(Light), NativeOutput(Light)):
        agent = Agent(model(url), output_type=output)
        whole = agent.run_sync("Light, please").output
        assert isinstance(whole, Light)

        async def streamed(agent: Agent[None, Light] = agent) -> Light:
            async with agent.run_stream("Light, please") as result:
                return [light async for light in result.stream_output()][-1]

        assert asyncio.run(streamed()) == whole
    several = Agent(model(url), output_type=[ToolOutput(Light), ToolOutput(bool)])
    assert isinstance(several.run_sync("Light, please").output, Light | bool)
    ends = {token(url, "}"): 100}
    prompted = Agent(model(url, logit_bias=ends), output_type=PromptedOutput(AnyObject))
    assert isinstance(prompted.run_sync("Light, please").output, AnyObject)


def task(url: str, output: Any, choices: CallsFirst) -> Agent[list[str], Any]:
    warm = model(url, temperature=1.0)
    agent = Agent(warm, deps_type=list, output_type=output, capabilities=[choices])

    @agent.tool
    def set_light(context: Context, light: Light, why: Literal["dark", "asked"]) -> str:
        """Sets a light."""
        context.deps.append(f"{light.room} {light.on} {light.level} {why}")
        return context.deps[-1]

    return agent


def several_calls(url: str) -> None:
    for output, choices in TASKS:
        done: list[str] = []
        result = task(url, output, choices).run_sync("All lights on!", deps=done)
        assert len(done) == STEPS and isinstance(result.output, Light), (done, result.output)


def several_calls_streamed(url: str) -> None:
    async def work(agent: Agent[list[str], Any], done: list[str]) -> Any:
        async with agent.run_stream("All lights on!", deps=done) as result:
            return await result.get_output()

    for output, choices in TASKS:
        done: list[str] = []
        light = asyncio.run(work(task(url, output, choices), done))
        assert len(done) == STEPS and isinstance(light, Light), (done, light)


def allowed_tools(url: str) -> None:
    """By its provider for OpenAI: several names are sent as `allowed_tools`, beside all tools."""
    called: list[str] = []
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = ModelSettings(max_tokens=80, temperature=1.0, parallel_tool_calls=False)
    choices = CallsFirst(["kitchen", "hall"], ["final_result"])
    agent = Agent(
        OpenAIChatModel("embedded", provider=provider, settings=settings),
        deps_type=list,
        output_type=ToolOutput(Light),
        capabilities=[choices],
    )

    def named(name: str) -> None:
        @agent.tool(name=name)
        def light(context: Context, on: bool) -> str:
            context.deps.append(name)
            return "done"

    for name in ("kitchen", "cellar", "hall"):
        named(name)
    assert isinstance(agent.run_sync("All lights on!", deps=called).output, Light)
    assert len(called) == STEPS and "cellar" not in called, called


def errors(url: str) -> None:
    try:
        Agent(model(url)).run_sync("x" * 30_000)
    except ModelAPIError as error:
        assert "context" in str(error), error
        return
    raise AssertionError("no ModelAPIError")


CHECKS = [text, output_types, several_calls, several_calls_streamed, allowed_tools, errors]
run("pydantic-ai", version("pydantic-ai-slim"), CHECKS)
