"""The body of /v1/chat/completions, and the messages in it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.api import fields
from server.api.fields import Body, Empty, Nothing, default
from server.api.openai_fields import GenerationBody


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: fields.Text


def _in_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """One message. Images, sound, tools and what they bring are refused: these are models of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_in_parts)] = None
    name: str | None = Field(default=None, max_length=256)
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: list[Any] | None = Empty
    annotations: list[Any] | None = Empty

    def plain(self) -> dict[str, str]:
        """What a chat template is given."""
        content = "".join(part.text for part in self.content or ())
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: fields.Positive | None = None
    max_completion_tokens: fields.Positive | None = None
    logprobs: bool | None = None
    top_logprobs: fields.Top | None = None
    add_generation_prompt: bool | None = None
    # Harmless at these values.
    tools: list[Any] | None = Empty
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = Empty
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` is allowed only with `logprobs`")
        if any(message.role != "assistant" and message.content is None for message in self.messages):
            raise ValueError("`messages`: only an assistant's message may have no content")
        return self

    @property
    def most_tokens(self) -> int | None:
        return default(self.max_completion_tokens, self.max_tokens)

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
