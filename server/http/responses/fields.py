"""The request body of OpenAI's Responses API, and what it is in /v1/chat/completions."""

from collections.abc import Container, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.http import fields
from server.http.body import check
from server.http.fields import Body, Named
from server.http.openai import chat_fields
from server.http.openai.chat_fields import FunctionName

LOGPROBS = "message.output_text.logprobs"
DESCRIBED = {"name", "description", "parameters"}
"""Fields of a function that the model reads."""
KINDS: dict[str, tuple[set[str], set[str]]] = {
    "function": ({"name"}, {"description", "parameters", "strict"}),
    "namespace": ({"name", "tools"}, {"description"}),
    "web_search": (set(), set()),
}
"""Types of tools -> the fields that each needs, and others that it may have."""


class ItemPart(Body):
    """A part of an item: text. Images and files are not supported."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "refusal"]
    """The kind of text."""
    text: fields.Text = ""
    """The text."""
    refusal: fields.Text = ""
    """The text of a refusal."""

    @property
    def shown(self) -> str:
        """What the model reads."""
        return self.text or self.refusal


class OutputPart(fields.ResultPart):
    """A part of a function's output."""

    image_url: fields.Json = None
    """Accepted: the model reads text alone."""
    detail: fields.Json = None
    """Accepted: the model reads text alone."""
    file_id: fields.Json = None
    """Accepted: the model reads text alone."""
    file_data: fields.Json = None
    """Accepted: the model reads text alone."""
    filename: fields.Json = None
    """Accepted: the model reads text alone."""


class Item(Body):
    """An item of a conversation: a message, a call of a function, its output, or a thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    """The kind of item."""
    role: Literal["system", "developer", "user", "assistant"] = "user"
    """The author of a message."""
    content: fields.Parts[ItemPart] | None = None
    """The text of a message, or parts of text. Images and files are not supported."""
    call_id: fields.Name = ""
    """The id of a call, which its output repeats."""
    name: fields.Name = ""
    """The function's name."""
    namespace: fields.Name = ""
    """That of the function."""
    arguments: fields.Text = ""
    """The function's arguments, JSON text."""
    output: fields.Parts[OutputPart] | None = None
    """What the function returned."""
    id: fields.Json = None
    """Accepted: nothing is stored."""
    status: fields.Json = None
    """Accepted: it changes nothing."""
    summary: fields.Json = None
    """Accepted: of a thought the model reads `content`."""
    encrypted_content: fields.Json = None
    """Accepted: thoughts are never encrypted here."""


def _in_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    Annotated[list[Item], Field(min_length=1, max_length=1024, fail_fast=True)],
    BeforeValidator(_in_items, fields.Text | list[Item]),
]


class Typed(Body):
    """What has a type, which is the first field where a response repeats it."""

    type: str


class Function(chat_fields.Function, Typed):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    """The kind of tool."""


class Tool(chat_fields.Function, Typed):
    """A function, a namespace of functions, or a search of the web. `description`: what a function
    does; or what those of a namespace are for, which the model reads before the first one's
    description.
    """

    type: Literal["function", "namespace", "web_search"]
    """The kind of tool. A search by OpenAI's host, which some clients offer unasked, is left out
    and told."""
    name: FunctionName = ""
    """The name of the function or the namespace. The model knows a function of a namespace as
    `NAMESPACE.NAME`."""
    tools: list[Function] = Field(default=[], max_length=128, fail_fast=True)
    """The functions of a namespace. 1 to 128."""

    @model_validator(mode="after")
    def _check_kind(self) -> "Tool":
        needed, other = KINDS[self.type]
        if missing := {name for name in needed if not getattr(self, name)}:
            raise ValueError(f"`tools.{min(missing)}` is required of type {self.type}")
        if odd := self.model_fields_set - {"type"} - needed - other:
            raise ValueError(f"`tools.{min(odd)}` is not supported of type {self.type}")
        return self

    @property
    def described(self) -> Iterator[dict[str, Any]]:
        """The functions that the model may call, as /v1/chat/completions names them."""
        if self.type == "function":
            yield self.model_dump(include=DESCRIBED)
        about = f"{self.description}\n\n" if self.description else ""
        for function in self.tools:
            named = {"name": qualified(self.name, function.name)}
            named["description"] = about + function.description
            yield function.model_dump(include=DESCRIBED) | named
            about = ""


def qualified(namespace: str, name: str) -> str:
    """A function's name, as the model knows it."""
    return f"{namespace}.{name}" if namespace else name


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function", "web_search"]
    """The kind of tool."""
    name: FunctionName = ""
    """The function's name."""
    namespace: fields.Name = ""
    """That of the function."""


class ChosenTools(Body):
    """The function that has to be called, or the functions that may be."""

    type: Literal["function", "allowed_tools"]
    """Which of the two is given."""
    name: FunctionName = ""
    """The function that has to be called."""
    namespace: fields.Name = ""
    """That of the function."""
    mode: Literal["auto", "required"] = "auto"
    """Whether one of the allowed ones has to be called."""
    tools: list[NamedTool] = Field(default=[], max_length=128, fail_fast=True)
    """The functions that may be called. A search is left out."""

    def in_chat(self) -> dict[str, Any]:
        """The same in /v1/chat/completions."""
        if self.type == "function":
            return _named(self)
        tools = [_named(tool) for tool in self.tools if tool.type == "function"]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


def _named(tool: NamedTool | ChosenTools) -> dict[str, Any]:
    return {"type": "function", "function": {"name": qualified(tool.namespace, tool.name)}}


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ChosenTools, Tag("<object>")],
    Discriminator(lambda value: "<word>" if isinstance(value, str) else "<object>"),
]


class TextFormat(Body):
    """A constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    """No constraint, a JSON object, or what the schema says."""
    name: fields.Name = "output"
    """A name for the schema. It changes nothing in the answer."""
    schema_: fields.JsonObject | None = Field(default=None, alias="schema")
    """The JSON Schema that the text follows."""
    strict: bool | None = None
    """Accepted: the text always follows the schema."""

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("`text.format.schema` is required")
        return self


class TextOptions(Body):
    """How the text is written."""

    format: TextFormat | None = None
    """A constraint on the text. Default: none."""
    verbosity: fields.Json = None
    """Accepted: the model decides."""


class Reasoning(Body):
    """How much the model thinks."""

    effort: fields.Name | None = None
    """In the words of its chat template; `none` and `minimal` turn thoughts off."""
    summary: fields.Json = None
    """Accepted: thoughts are shown as they are."""


class ResponsesBody(Named):
    """The body of POST /v1/responses."""

    input: Items
    """A text, or the items of a conversation. 1 to 1024 items."""
    instructions: fields.Text | None = None
    """A system message in front. Default: none."""
    max_output_tokens: fields.Positive | None = None
    """Most tokens to generate, or as many as the context holds if that is less."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """As on /v1/chat/completions."""
    top_p: fields.TopP | None = None
    """As on /v1/chat/completions."""
    top_logprobs: fields.NumTop | None = None
    """Return this many most likely tokens at each position of the text. Default: none."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events. Default: false."""
    resumable: bool | None = None
    """Whether the stream can be read again. Default: false."""
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    """Functions that the model may call, and namespaces of them. Up to 128 functions. Default:
    none."""
    tool_choice: ToolChoice | None = None
    """As on /v1/chat/completions. Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default: true."""
    text: TextOptions = TextOptions()
    """How the text is written."""
    reasoning: Reasoning | None = None
    """How much the model thinks. Default: as the chat template has it."""
    include: list[fields.Name] | None = Field(default=None, max_length=16, fail_fast=True)
    """`message.output_text.logprobs`: return the log-probability of each token of the text. Other
    things that may be included do not occur here."""
    store: bool | None = None
    """Accepted: nothing is stored, and the answer says so."""
    truncation: Literal["disabled"] | None = None
    """An input that does not fit the context is refused."""
    background: Literal[False] | None = None
    """Answers are given at once."""
    previous_response_id: fields.Unsupported = None
    """Nothing is stored: send the items of the conversation."""
    conversation: fields.Unsupported = None
    """Nothing is stored: send the items of the conversation."""
    prompt: fields.Unsupported = None
    """There are no stored prompts."""
    context_management: fields.Unsupported = None
    """The client decides what the context holds."""
    max_tool_calls: fields.Unsupported = None
    """No tools are hosted here."""

    def fit(self, variables: Container[str]) -> list[str]:
        """Leaves out what the model cannot use, and returns its places."""
        found = self.tools or []
        self.tools = [tool for tool in found if tool.type != "web_search"] or None
        searches = ["tools.web_search"] if len(found) > len(self.tools or ()) else []
        return searches + (["reasoning.effort"] if self.chat.fit(variables) else [])

    @cached_property
    def chat(self) -> chat_fields.ChatBody:
        """The same request to /v1/chat/completions. Raises InvalidRequest."""
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenTools):
            choice = choice.in_chat()
        logprobs = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        value: dict[str, Any] = {
            "messages": [*chat_fields.joined(self._messages())],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": choice,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": [
                {"function": function} for tool in self.tools or () for function in tool.described
            ],
        }
        if (format := self.text.format) is not None:
            schema = {"name": format.name, "schema": format.schema_}
            wanted = None if format.schema_ is None else schema
            value["response_format"] = {"type": format.type, "json_schema": wanted}
        return check(value, chat_fields.ChatBody)[0]

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        thought = {}
        for item in self.input:
            text = "".join(part.shown for part in item.content or ())
            if item.type == "reasoning":
                thought = {"reasoning_content": text} if text else {}
            elif item.type == "function_call":
                name = qualified(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                yield {"role": "assistant", "content": "", "tool_calls": [call]} | thought
                thought = {}
            elif item.type == "function_call_output":
                text = "".join(part.shown for part in item.output or ())
                yield {"role": "tool", "tool_call_id": item.call_id, "content": text}
            elif item.role == "assistant":
                yield {"role": "assistant", "content": text} | thought
                thought = {}
            else:
                yield {"role": item.role, "content": text}
