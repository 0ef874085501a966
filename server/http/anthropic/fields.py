"""Request bodies of Anthropic's Messages API, and what they are in OpenAI's dialect."""

from collections.abc import Container, Iterator
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from server.http import fields
from server.http.body import check
from server.http.fields import Body, Named
from server.http.openai import chat_fields

BILLING = "x-anthropic-billing-header:"
"""What a system block of Claude Code begins with that differs in every request. It is no text for
the model, and would leave nothing of a prompt to be found in the prefix cache."""


class Marked(Body):
    """What clients mark for the prefix cache."""

    cache_control: fields.Json = None
    """Accepted: the prefix cache needs no marks."""


class TextBlock(Marked):
    """A block of text."""

    type: Literal["text"]
    """Only text is supported."""
    text: fields.Text
    """The text."""


class ResultBlock(fields.ResultPart, Marked):
    """A block of a tool's result."""

    source: fields.Json = None
    """Accepted: the model reads text alone."""


class Block(Marked):
    """A block of a message: text, a thought, the use of a tool, or its result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    """The kind of block. Images and documents are not supported."""
    text: fields.Text = ""
    """The text."""
    thinking: fields.Text = ""
    """The thought."""
    id: fields.Name = ""
    """The id of the tool's use."""
    name: fields.Name = ""
    """The tool's name."""
    input: fields.JsonObject = Field(default={})
    """The tool's arguments."""
    tool_use_id: fields.Name = ""
    """Of a result, the id of the tool's use."""
    content: fields.Parts[ResultBlock] | None = None
    """The result, a text or blocks."""
    is_error: bool | None = None
    """Whether the result is an error, which the model is told by the word before it."""
    signature: fields.Json = None
    """Accepted: a thought is not signed here."""
    data: fields.Json = None
    """Accepted: a thought that is not readable is left out."""


class Message(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """The author of the message. A system's within the conversation is written as the user's, where
    it stands, since few chat templates take one there."""
    content: fields.Parts[Block]
    """A text, or blocks."""


class Tool(Marked):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    """Only tools of the client's own are supported."""
    name: chat_fields.FunctionName
    """The tool's name."""
    description: fields.Text = ""
    """What it does, for the model."""
    input_schema: fields.JsonObject
    """The JSON Schema of its arguments, which its uses follow."""


class ToolChoice(Body):
    """How the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    """The model decides; it uses some; it uses the named one; it uses none."""
    name: chat_fields.FunctionName | None = None
    """The tool of the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """Whether an answer has at most one use. Default: false."""


class Thinking(Body):
    """Whether the model thinks before it answers, if its chat template can say so."""

    type: fields.Name
    """Everything but `disabled` turns thoughts on."""


class OutputFormat(Body):
    """A constraint on the output."""

    type: Literal["json_schema"]
    """Only JSON is supported."""
    schema_: fields.JsonObject = Field(alias="schema")
    """The JSON Schema that the output follows."""


class OutputConfig(Body):
    """How the model answers."""

    effort: fields.Name | None = None
    """How much it thinks, in the words of its chat template."""
    format: OutputFormat | None = None
    """A constraint on the output. Default: none."""


class CountBody(Named):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[Message] = Field(min_length=1, max_length=1024, fail_fast=True)
    """The conversation, oldest message first. The answer continues a last one of the assistant's.
    1 to 1024 messages."""
    system: fields.Parts[TextBlock] | None = None
    """A system message. Default: none."""
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    """Tools that the model may use. Up to 128. Default: none."""
    tool_choice: ToolChoice | None = None
    """Default: the model decides."""
    thinking: Thinking | None = None
    """Default: as the chat template has it."""
    output_config: OutputConfig = OutputConfig()
    """Default: text of any form."""
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""

    def fit(self, variables: Container[str]) -> list[str]:
        """Leaves out what the chat template does not read, and returns its places."""
        return ["thinking"] if self.chat.fit(variables) else []

    @cached_property
    def chat(self) -> chat_fields.ChatBody:
        """The same request to /v1/chat/completions. Raises InvalidRequest."""
        return check(self._in_openai(), chat_fields.ChatBody)[0]

    def _in_openai(self) -> dict[str, Any]:
        messages = [message for given in self.messages for message in _messages(given)]
        texts = [block.text for block in self.system or () if not block.text.startswith(BILLING)]
        if system := "\n".join(texts):
            messages.insert(0, {"role": "system", "content": system})
        value: dict[str, Any] = {"messages": [*chat_fields.joined(messages)]}
        last = value["messages"][-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            value["continue_final_message"] = True
        value["tools"] = [
            {
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                }
            }
            for tool in self.tools or ()
        ]
        return value | self._choice() | self._output()

    def _choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        word: Any = choice.type
        if choice.type == "tool":
            word = {"type": "function", "function": {"name": choice.name}}
        return {"tool_choice": word, "parallel_tool_calls": not choice.disable_parallel_tool_use}

    def _output(self) -> dict[str, Any]:
        value: dict[str, Any] = {"reasoning_effort": self.output_config.effort}
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            value["chat_template_kwargs"] = {"enable_thinking": on}
        if (format := self.output_config.format or self.output_format) is not None:
            schema = {"name": "output", "schema": format.schema_}
            value["response_format"] = {"type": "json_schema", "json_schema": schema}
        return value


class MessagesBody(CountBody):
    """The body of POST /v1/messages."""

    max_tokens: fields.Positive
    """Most tokens to generate, or as many as the context holds if that is less."""
    stop_sequences: fields.StopStrings | None = None
    """Texts that end the output, up to 16. Default: none."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """As on /v1/chat/completions."""
    top_k: fields.Limit | None = None
    """As on /v1/chat/completions."""
    top_p: fields.TopP | None = None
    """As on /v1/chat/completions."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events. Default: false."""
    resumable: bool | None = None
    """Whether the stream can be read again. Default: false."""
    metadata: fields.Json = None
    """Accepted: it changes nothing."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted: there is one tier."""
    container: fields.Unsupported = None
    """There are no containers."""
    mcp_servers: fields.Unsupported = None
    """No tools are hosted here."""

    @property
    def max_output_tokens(self) -> int:
        """`max_tokens`."""
        return self.max_tokens

    def _in_openai(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return super()._in_openai() | sampling | {"stop": self.stop_sequences}


def _messages(given: Message) -> Iterator[dict[str, Any]]:
    """The messages of OpenAI's dialect that one of Anthropic's is: results of tools are messages
    of their own.
    """
    role = "assistant" if given.role == "assistant" else "user"
    message: dict[str, Any] = {"role": role, "content": ""}
    for block in given.content:
        if block.type == "text":
            message["content"] += block.text
        elif block.type == "thinking" and block.thinking:
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif block.type == "tool_use":
            call = {"name": block.name, "arguments": block.input}
            message.setdefault("tool_calls", []).append({"id": block.id, "function": call})
        elif block.type == "tool_result":
            text = "\n".join(part.shown for part in block.content or ())
            text = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if not given.content or any(block.type != "tool_result" for block in given.content):
        yield message
