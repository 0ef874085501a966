"""The bodies of /tokenize and /detokenize."""

from typing import Any

from pydantic import Field, model_validator

from server.api import fields
from server.api.chat_fields import Message
from server.api.fields import Body


class TokenizeBody(Body):
    """POST /tokenize: TGI's `inputs`, or vLLM's `prompt` or `messages`."""

    inputs: str | None = Field(default=None, min_length=1, max_length=2**24)
    parameters: dict[str, Any] | None = None
    """Harmless: TGI's clients send the body of /generate, and none of it changes the tokens."""
    prompt: fields.Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1024)
    model: str | None = Field(default=None, max_length=1024)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "TokenizeBody":
        if sum(value is not None for value in (self.inputs, self.prompt, self.messages)) != 1:
            raise ValueError("exactly one of `inputs`, `prompt` and `messages` is required")
        if self.inputs is not None and (self.add_special_tokens is not None or self.return_token_strs is not None):
            raise ValueError("`add_special_tokens` and `return_token_strs` go with `prompt`, not with `inputs`")
        if self.inputs is None and self.parameters is not None:
            raise ValueError("`parameters` goes with `inputs`")
        if self.messages is None and self.add_generation_prompt is not None:
            raise ValueError("`add_generation_prompt` goes with `messages`")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("`add_special_tokens` goes with `prompt`")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: fields.TokenIds
    model: str | None = Field(default=None, max_length=1024)
