"""Request bodies of /tokenize and /detokenize."""

from pydantic import Field, model_validator

from server.http import fields
from server.http.fields import Body
from server.http.openai.chat_fields import Message


class TokenizeBody(Body):
    """The body of POST /tokenize: exactly one of TGI's `inputs`, and vLLM's `prompt` and `messages`."""

    inputs: str | None = Field(default=None, min_length=1, max_length=2**24)
    """Text to tokenize, answered as TGI does: a list of tokens with their places in the text."""
    parameters: fields.JsonObject | None = None
    """Accepted beside `inputs` for TGI's clients, which send the body of /generate; it changes nothing."""
    prompt: fields.Text | None = None
    """Text to tokenize, answered as vLLM does: an object with the token ids."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    """A conversation to tokenize with the checkpoint's chat template, answered as vLLM does. 1 to 1024 messages."""
    model: str | None = Field(default=None, max_length=1024)
    """A name that GET /v1/models lists, or what --model was given; `dummy`, `tgi` and "" too. Default: the served model."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens, such as the beginning of sequence; only with `prompt`. Default: true."""
    add_generation_prompt: bool | None = None
    """Whether the chat template begins the assistant's answer after the last message; only with `messages`. Default: true."""
    return_token_strs: bool | None = None
    """Also return each token as the vocabulary spells it; not with `inputs`. Default: false."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "TokenizeBody":
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
    """The body of POST /detokenize."""

    tokens: fields.TokenIds
    """Token ids to decode, each below the size of the vocabulary."""
    model: str | None = Field(default=None, max_length=1024)
    """A name that GET /v1/models lists, or what --model was given; `dummy`, `tgi` and "" too. Default: the served model."""
