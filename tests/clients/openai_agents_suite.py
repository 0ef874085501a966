"""OpenAI's agents: one task with several calls, whose results go back to the model, over chat completions; streamed as well."""

import asyncio
from importlib.metadata import version
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, ToolsToFinalOutputResult, function_tool, set_tracing_disabled
from check import run
from openai import AsyncOpenAI
from pydantic import BaseModel

STEPS = 3


class Setting(BaseModel):
    """A nested argument."""

    on: bool
    level: Literal[0, 1, 2]


def agent(client: AsyncOpenAI, done: list[str]) -> Agent[Any]:
    """An agent that has to call a tool in each of STEPS turns."""

    @function_tool
    def set_light(room: Literal["kitchen", "hall"], setting: Setting) -> str:
        """Turns a light on or off."""
        done.append(f"{room}: {setting.on}, {setting.level}")
        return done[-1]

    def until_done(context: object, results: list[Any]) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(len(done) >= STEPS, "; ".join(done))

    return Agent(
        "light",
        instructions="Set the lights.",
        model=OpenAIChatCompletionsModel("embedded", client),
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=1.0),
        tools=[set_light],
        tool_use_behavior=until_done,
        reset_tool_choice=False,
    )


def several_calls(url: str) -> None:
    async def task() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            done: list[str] = []
            result = await Runner.run(agent(client, done), "All lights on!")
            assert len(done) == STEPS and result.final_output == "; ".join(done)

    asyncio.run(task())


def streamed(url: str) -> None:
    async def task() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            done: list[str] = []
            result = Runner.run_streamed(agent(client, done), "All lights on!")
            assert [event async for event in result.stream_events()]
            assert len(done) == STEPS and result.final_output == "; ".join(done)

    asyncio.run(task())


set_tracing_disabled(True)
run("openai-agents", version("openai-agents"), [several_calls, streamed])
