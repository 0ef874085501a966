"""Request body of /v1/chat/completions, and its messages."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.generation.request import Request
from server.http import fields
from server.http.fields import Body, Empty
from server.http.openai.fields import GenerationBody
from server.http.openai.llama_cpp_fields import ChatSlotFields, salt, switched_off
from server.text.codec import TextCodec


class TextPart(Body):
    """A part of a message's content: text."""

    type: Literal["text", "input_text", "output_text"]
    """Only text is supported, under the names of all of OpenAI's routes."""
    text: fields.Text
    """The text."""


Parts = Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)]


def _in_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(fields.text_or_list(value), str) else value


TextParts = Annotated[Parts, BeforeValidator(_in_parts, fields.Text | Parts)]
"""A text, or a list of parts."""


class Message(Body):
    """A message of a conversation. Images, audio and tools are refused: the models served here read and write text."""

    role: Literal["system", "developer", "user", "assistant"]
    """The author of the message. The checkpoint's chat template decides which roles may follow each other."""
    content: TextParts | None = None
    """The text, or a list of parts which are joined. Special tokens are not recognised in it. Only an assistant's message may have none."""
    name: str | None = Field(default=None, max_length=256)
    """The author's name, for chat templates that use it."""
    tool_calls: list[fields.Json] | None = Empty
    """Tools are not supported: only an empty list is accepted."""
    annotations: list[fields.Json] | None = Empty
    """Annotations are not supported: only an empty list is accepted."""

    def plain(self) -> dict[str, str]:
        """The message as a chat template receives it."""
        content = "".join(part.text for part in self.content or ())
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class Conversation(Body):
    """What a chat template is given."""

    messages: list[Message] = Field(min_length=1, max_length=1024, fail_fast=True)
    """The conversation, oldest message first. 1 to 1024 messages."""
    add_generation_prompt: bool | None = None
    """Whether the chat template begins the assistant's answer after the last message. Default: true."""
    # Accepted at the values that change nothing.
    tools: list[fields.Json] | None = Empty
    """Tools are not supported: only an empty list is accepted."""
    tool_choice: Literal["none", "auto"] | None = None
    """Tools are not supported: only `none` and `auto` are accepted."""
    chat_template_kwargs: dict[fields.Name, fields.Json] | None = Empty
    """Not supported: only an empty object is accepted."""


class TemplateBody(Conversation):
    """The body of POST /apply-template. Null is the default of every field but `messages`."""

    model: str | None = Field(default=None, max_length=1024)
    """A name that GET /v1/models lists, or what --model was given; `dummy`, `tgi` and "" too. Default: the served model."""


class ChatBody(Conversation, ChatSlotFields, GenerationBody):
    """The body of POST /v1/chat/completions. Null is the default of every field but `messages`."""

    max_tokens: fields.Positive | None = None
    """Most tokens to generate for each output. Default: as many as still fit into the context."""
    max_completion_tokens: fields.Positive | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return the log-probability of each output token. Default: false."""
    top_logprobs: fields.NumTop | None = None
    """Return this many most likely tokens at each position of the output; only with `logprobs`. Default: 0."""
    # Accepted at the values that change nothing.
    parallel_tool_calls: bool | None = None
    """Tools are not supported: accepted for OpenAI's clients, changes nothing."""
    functions: list[fields.Json] | None = Empty
    """Functions are not supported: only an empty list is accepted."""
    function_call: Literal["none", "auto"] | None = None
    """Functions are not supported: only `none` and `auto` are accepted."""
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=16, fail_fast=True)
    """Only text is supported."""
    continue_final_message: Literal[False] | None = None
    """Not supported: only false is accepted."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatBody":
        if len(self._maxima) > 1:
            raise ValueError("`max_tokens`, `max_completion_tokens` and `n_predict` differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` is allowed only with `logprobs`")
        if any(message.role != "assistant" and message.content is None for message in self.messages):
            raise ValueError("`messages`: only an assistant's message may have no content")
        return self

    @property
    def _maxima(self) -> set[int]:
        return {self.max_tokens, self.max_completion_tokens, None if self.n_predict == -1 else self.n_predict} - {None}  # type: ignore

    @property
    def max_output_tokens(self) -> int | None:
        return next(iter(self._maxima), None)

    def request(self, codec: TextCodec, prompt: list[int]) -> Request:
        request = super().request(codec, prompt)
        sampling = replace(request.sampling, **switched_off(self.samplers))
        return replace(request, sampling=sampling, salt=salt(self.cache_prompt, request.salt))

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
