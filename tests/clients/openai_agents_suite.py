"""OpenAI's agents over chat completions, whole and streamed: a task with several calls whose
results go back to the model, an output type beside tools, a handoff to an agent with one. The
example of a guide, as it stands there.
"""

import asyncio
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from check import run
from openai import AsyncOpenAI
from pydantic import BaseModel

GUIDE = Path(__file__).parents[2] / "docs/guides/testing-applications.md"
STEPS = 3
REQUIRED = ModelSettings(
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=120,
    temperature=1.0,
)


class Setting(BaseModel):
    """A nested argument."""

    on: bool
    level: Literal[0, 1, 2]


class Report(BaseModel):
    """The structured answer."""

    room: Literal["kitchen", "hall"]
    setting: Setting


class Reason(BaseModel):
    """Why a task is handed on."""

    why: Literal["lights", "heating"]


def light_tool(done: list[str], most: int) -> Any:
    """A tool that appends to `done`, and is no longer offered after `most` calls."""

    def is_enabled(context: RunContextWrapper[Any], agent: Any) -> bool:
        return len(done) < most

    @function_tool(is_enabled=is_enabled)
    def set_light(room: Literal["kitchen", "hall"], setting: Setting) -> str:
        """Turns a light on or off."""
        done.append(f"{room}: {setting.on}, {setting.level}")
        return done[-1]

    return set_light


def caller(model: OpenAIChatCompletionsModel, done: list[str]) -> Agent[Any]:
    """An agent that has to call a tool in each of STEPS turns."""

    def until_done(context: object, results: list[Any]) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(len(done) >= STEPS, "; ".join(done))

    return Agent(
        "light",
        instructions="Set the lights.",
        model=model,
        model_settings=REQUIRED,
        tools=[light_tool(done, STEPS)],
        tool_use_behavior=until_done,
        reset_tool_choice=False,
    )


def reporter(model: OpenAIChatCompletionsModel, done: list[str]) -> Agent[Any]:
    """An agent that has to call a tool in its first turn, may in the next ones, and reports."""
    return Agent(
        "report",
        instructions="Set the lights, and report.",
        model=model,
        model_settings=REQUIRED,
        tools=[light_tool(done, STEPS)],
        output_type=Report,
    )


def triage(model: OpenAIChatCompletionsModel, done: list[str]) -> Agent[Any]:
    """An agent that has to hand the task on, to one that only reports."""

    def on_handoff(context: RunContextWrapper[Any], reason: Reason) -> None:
        done.append(reason.why)

    settings = ModelSettings(max_tokens=120, temperature=1.0)
    last = Agent("last", model=model, model_settings=settings, output_type=Report)
    to_last = handoff(last, input_type=Reason, on_handoff=on_handoff)
    return Agent("triage", model=model, model_settings=REQUIRED, handoffs=[to_last])


async def results(url: str, make: Any) -> list[tuple[list[str], Any]]:
    """What an agent has done, and its result, once whole and once streamed."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel("embedded", client)
        whole: list[str] = []
        result = await Runner.run(make(model, whole), "All lights on!")
        done: list[str] = []
        stream = Runner.run_streamed(make(model, done), "All lights on!")
        assert [event async for event in stream.stream_events()]
        return [(whole, result), (done, stream)]


def several_calls(url: str) -> None:
    for done, result in asyncio.run(results(url, caller)):
        assert len(done) == STEPS and result.final_output == "; ".join(done)


def output_type_with_tools(url: str) -> None:
    for done, result in asyncio.run(results(url, reporter)):
        assert 1 <= len(done) <= STEPS and isinstance(result.final_output, Report), done


def handoff_to_output_type(url: str) -> None:
    for done, result in asyncio.run(results(url, triage)):
        assert len(done) == 1 and done[0] in ("lights", "heating")
        assert result.last_agent.name == "last" and isinstance(result.final_output, Report)


def example_of_the_guide(_: str) -> None:
    """On a server of its own: the one of the suites has another chat template than the model's."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if "from agents import" in block)
    (expected,) = re.findall(r"^# (.+)$", program, re.MULTILINE)
    command = ".venv/bin/onehead", "serve", "--port", "0"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        program = program.replace("http://localhost:8000", server.stdout.readline().split()[-1])
        try:
            told = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            )
        finally:
            server.terminate()
    assert told.stdout == f"{expected}\n", told


set_tracing_disabled(True)
run(
    "openai-agents",
    version("openai-agents"),
    [several_calls, output_type_with_tools, handoff_to_output_type, example_of_the_guide],
)
