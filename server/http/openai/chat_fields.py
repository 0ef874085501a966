"""Request body of /v1/chat/completions, its messages and its tools."""

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.errors import InvalidRequest, MalformedBody
from server.generation.generation import Generation
from server.generation.request import Request
from server.http import fields
from server.http.body import parse
from server.http.fields import Body, Named
from server.http.openai.fields import GenerationBody
from server.http.openai.slot_fields import ChatSlotFields
from server.http.unknown_fields import quoted
from server.text.calls.parser import Calls
from server.text.conversation import ChatInput

RESERVED = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
}
"""Variables of chat templates that no request sets by `chat_template_kwargs`."""


def _not_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := RESERVED & variables.keys():
        raise ValueError(
            f"`chat_template_kwargs` cannot have {min(taken)!a}, which the server sets"
        )
    return variables


TemplateVariables = Annotated[
    dict[fields.Name, fields.Json], Field(max_length=64), AfterValidator(_not_reserved)
]
FunctionName = Annotated[str, Field(max_length=128, pattern="^[A-Za-z0-9_.-]{1,128}$")]


class TextPart(Body):
    """A part of a message's content: text."""

    type: Literal["text", "input_text", "output_text"]
    """Only text is supported, under the names of all of OpenAI's routes."""
    text: fields.Text
    """The text."""


Parts = Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)]


def _in_parts(value: Any) -> Any:
    return fields.as_parts(fields.text_or_list(value))


TextParts = Annotated[Parts, BeforeValidator(_in_parts, fields.Text | Parts)]
"""A text, or a list of parts."""


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. A model may have chosen a key twice: no grammar forbids it."""
    try:
        return parse(text.encode()) if text else {}
    except MalformedBody:
        raise InvalidRequest(
            "`arguments` of a call must be the text of a JSON object", param="messages"
        ) from None


def _written(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(Body):
    """What a call calls."""

    name: FunctionName
    """The function's name."""
    arguments: Annotated[
        fields.Text, BeforeValidator(_written, fields.Text | fields.JsonObject)
    ] = ""
    """Its arguments: a JSON object, or the text of one. Up to 524,288 characters in all calls of a
    request. Default: none.
    """


class ToolCall(Body):
    """A call in an assistant's message."""

    id: fields.Name | None = None
    """The call's id, which the message with its result repeats."""
    type: Literal["function"] = "function"
    """Only functions are supported."""
    function: CalledFunction
    """The function and its arguments."""


class Message(Body):
    """A message of a conversation. Images and audio are refused: the models served here read and
    write text.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """The author of the message. The checkpoint's chat template decides which roles may follow each
    other; where it does not know `developer`, that is `system`.
    """
    content: TextParts | None = None
    """The text, or a list of parts which are joined. Special tokens are not recognised in it. Only
    an assistant's message may have none."""
    name: str | None = Field(default=None, max_length=256)
    """The author's name, for chat templates that use it; of a `tool`'s message the function's, by
    default that of the call."""
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128, fail_fast=True)
    """The calls of an assistant's message. Up to 128."""
    tool_call_id: fields.Name | None = None
    """The id of the call whose result a `tool`'s message is."""
    reasoning_content: fields.Text | None = None
    """The thought of an assistant's message, for chat templates that use it."""

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        self.tool_calls = self.tool_calls or None
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(
                "`tool_calls` and `reasoning_content` belong to messages of the role assistant"
            )
        if self.role != "tool" and self.tool_call_id:
            raise ValueError("`tool_call_id` belongs to messages of the role tool")
        if self.role != "assistant" and self.content is None:
            raise ValueError("`messages`: only an assistant's message may have no content")
        return self


MAX_ARGUMENT_CHARS = 2**19
"""They are parsed at once, so that more would hold up other requests."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template receives them. One with a result has the name of the
    function, by default that of the call. Raises InvalidRequest.
    """
    if (
        sum(
            len(call.function.arguments)
            for message in messages
            for call in message.tool_calls or ()
        )
        > MAX_ARGUMENT_CHARS
    ):
        text = (
            f"the calls' `arguments` have more than {MAX_ARGUMENT_CHARS} characters in all; "
            "leave out the first messages"
        )
        raise InvalidRequest(text, param="messages")
    names: dict[str | None, str] = {}
    plain = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        name = (
            {"name": names[message.tool_call_id]}
            if message.role == "tool" and message.tool_call_id in names
            else {}
        )
        content = "".join(part.text for part in message.content or ())
        given = message.model_dump(exclude={"type"}, exclude_none=True)
        for call in given.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        plain.append(name | given | {"content": content})
    return plain


def joined(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, of which neighbours of the same author are one, as other APIs write them: chat
    templates expect that authors alternate.
    """
    before: dict[str, Any] = {}
    for message in messages:
        if before.get("role") == message["role"] != "tool":
            texts = before["content"], message["content"]
            calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
            before = before | message | {"content": "\n".join(filter(None, texts))}
            before |= {"tool_calls": calls} if calls else {}
            continue
        if before:
            yield before
        before = message
    if before:
        yield before


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    """The function's name: up to 128 letters, digits, `_`, `.` and `-`."""
    description: fields.Text = ""
    """What it does, for the model."""
    parameters: fields.JsonObject = Field(default={"type": "object", "properties": {}})
    """The JSON Schema of its arguments, an object, which calls follow. Default: it takes none."""
    strict: bool | None = None
    """Accepted for OpenAI's clients: calls always follow the schema."""


class Tool(Body):
    """A tool that the model may use: a function."""

    type: Literal["function"] = "function"
    """Only functions are supported."""
    function: Function
    """The function."""


class NamedFunction(Body):
    """A function by its name."""

    name: FunctionName
    """The function's name."""


class NamedTool(Body):
    """A tool by its function's name."""

    type: Literal["function"] = "function"
    """Only functions are supported."""
    function: NamedFunction
    """The function."""


class AllowedTools(Body):
    """Those of the tools that may be called; the model is shown them all."""

    mode: Literal["auto", "required"] = "auto"
    """As the words for `tool_choice`. Default: `auto`."""
    tools: list[NamedTool] = Field(default=[], max_length=128, fail_fast=True)
    """The tools. 1 to 128."""


class NamedTools(Body):
    """The function that has to be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    """Which of the two is given."""
    function: NamedFunction | None = None
    """The function that has to be called, once."""
    allowed_tools: AllowedTools = AllowedTools()
    """The tools that may be called. A validated body has `function` here too."""

    @model_validator(mode="after")
    def _check_names(self) -> "NamedTools":
        if bool(self.function) == bool(self.allowed_tools.tools):
            raise ValueError("`tool_choice` has to name either a function or `allowed_tools`")
        if "type" in self.model_fields_set and (self.type == "function") != bool(self.function):
            raise ValueError(f"`tool_choice` has the type {self.type}, and names the other")
        if self.function:
            tool = NamedTool(function=self.function)
            self.allowed_tools = AllowedTools(mode="required", tools=[tool])
        return self

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]


def _chosen(value: Any) -> Any:
    """Other servers' spellings of a word: `{"type": "auto"}`, and `any` for `required`."""
    word = value["type"] if isinstance(value, dict) and value.keys() == {"type"} else value
    return "required" if word == "any" else word


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTools, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | NamedTools) else "<word>"),
    BeforeValidator(_chosen, Literal["none", "auto", "required", "any"] | NamedTools),
]
NO_THOUGHTS = ("none", "minimal")
"""Values of `reasoning_effort` that turn a template's `enable_thinking` off."""


class TemplateFields(Body):
    """Fields that set variables of the chat template."""

    chat_template_kwargs: TemplateVariables | None = None
    """Further variables of the chat template, such as `enable_thinking`. One that it does not read
    is ignored and told. Up to 64.
    """
    reasoning_effort: fields.Json = None
    """How much the model should think, in the template's words, such as `low`: its variable
    `reasoning_effort`, or `enable_thinking`, which is false for `none` and `minimal`. It is ignored
    and told where the template reads neither, or it is no text.
    """

    def fit(self, variables: Container[str]) -> list[str]:
        """Leaves out what sets none of the `variables` that the chat template reads. Returns its
        places.
        """
        given, effort = dict(self.chat_template_kwargs or {}), self.reasoning_effort
        switch = next(
            (name for name in ("reasoning_effort", "enable_thinking") if name in variables), None
        )
        told = []
        if switch and isinstance(effort, str):
            value = effort if switch == "reasoning_effort" else effort not in NO_THOUGHTS
            given.setdefault(switch, value)
        elif effort is not None:
            told = ["reasoning_effort"]
        self.chat_template_kwargs = {name: given[name] for name in given if name in variables}
        return told + [
            f"chat_template_kwargs.{quoted(name)}" for name in given if name not in variables
        ]


class Conversation(TemplateFields):
    """What a chat template is given."""

    messages: list[Message] = Field(min_length=1, max_length=1024, fail_fast=True)
    """The conversation, oldest message first. 1 to 1024 messages."""
    add_generation_prompt: bool | None = None
    """Whether the chat template begins the assistant's answer after the last message. Default:
    true."""
    continue_final_message: bool | None = None
    """Whether the output continues the last message, an assistant's, as if the model had begun it
    so; the answer holds what is added. Not with `add_generation_prompt`. Default: false.
    """
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    """Functions that the model may call. Up to 128. With `response_format` or `structured_outputs`
    text follows these, and calls follow the functions. Default: none.
    """
    tool_choice: ToolChoice | None = None
    """`none`: nothing is called, and the tools are not shown to the model; `auto`: the model
    decides, if GET /v1/models shows a `tool_call_format`, else the output is text; `required`, or
    `any`: the output is calls; or the function that is called, once; or, with the type
    `allowed_tools`, those of the tools that may be called. Default: `auto` with `tools`.
    """

    @model_validator(mode="after")
    def _check_conversation(self) -> "Conversation":
        if not self.messages:  # On /tokenize, without a conversation.
            return self
        last = self.messages[-1]
        if self.continue_final_message and (
            last.role != "assistant" or not last.content or last.tool_calls
        ):
            raise ValueError(
                "`continue_final_message` needs a last message of the role assistant, with "
                "content and no calls"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "`continue_final_message` cannot be combined with `add_generation_prompt`"
            )
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("`tools` has two functions of the same name")
        if self.tool_choice == "required" and not names:
            raise ValueError("`tool_choice` required needs `tools`")
        for name in self.named.names if self.named else ():
            if name not in names:
                raise ValueError(f"`tool_choice` names {name}, which is not one of `tools`")
        return self

    @property
    def named(self) -> NamedTools | None:
        """`tool_choice`, if it names functions."""
        return self.tool_choice if isinstance(self.tool_choice, NamedTools) else None

    @property
    def calls(self) -> Calls:
        """Whether the output may have calls, or has to be some."""
        if not self.tools or self.tool_choice == "none":
            return "none"
        mode = self.named.allowed_tools.mode if self.named else self.tool_choice
        return "auto" if mode in (None, "auto") else "required"

    def chat_input(self, can_call: bool = True) -> ChatInput:
        """What the chat template is given. `can_call`: calls are recognised under `auto` too; if
        not, the model is not told how to write some.
        """
        return ChatInput(
            plain_messages(self.messages),
            self.add_generation_prompt is not False and not self.continue_final_message,
            []
            if self.calls == "none"
            else [tool.model_dump(exclude={"function": {"strict"}}) for tool in self.tools or ()],
            self.chat_template_kwargs or {},
            bool(self.continue_final_message),
            can_call or self.calls != "auto",
        )


class TemplateBody(Named, Conversation):
    """The body of POST /apply-template. Null is the default of every field but `messages`."""


class ChatBody(Conversation, ChatSlotFields, GenerationBody):
    """The body of POST /v1/chat/completions. Null is the default of every field but `messages`."""

    max_tokens: fields.Limit | None = None
    """Most tokens to generate for each output. -1, the default: as many as still fit into the
    context."""
    max_completion_tokens: fields.Limit | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return the log-probability of each output token. Default: false."""
    top_logprobs: fields.NumTop | None = None
    """Return this many most likely tokens at each position of the output; only with `logprobs`.
    Default: 0."""
    parallel_tool_calls: bool | None = None
    """Whether an output may have several calls, up to 128. Default: true, but for a named
    function."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatBody":
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise ValueError(f"`{name}` must be >= 1, or -1 for no limit. Given: 0")
        if len(self._maxima) > 1:
            raise ValueError(
                "`max_tokens`, `max_completion_tokens` and `n_predict` differ; give one of them"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` is allowed only with `logprobs`")
        if self.logprob_token_ids and self.calls != "none":
            raise ValueError(
                "`logprob_token_ids` cannot be combined with `tools`, as calls follow a grammar"
            )
        return self

    @property
    def _maxima(self) -> set[int]:
        return {self.max_tokens, self.max_completion_tokens, self.n_predict} - {None, -1}  # type: ignore

    @property
    def max_output_tokens(self) -> int | None:
        return next(iter(self._maxima), None)

    async def request(self, generation: Generation, client: str, prompt: list[int]) -> Request:
        request = await super().request(generation, client, prompt)
        sampling = replace(request.sampling, **self.switched_off())
        return replace(request, sampling=sampling, salt=self.salt(request.salt))

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
