"""Request bodies of /tokenize and /detokenize."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from server.http import fields
from server.http.fields import Named
from server.http.openai.chat_fields import Message, TemplateBody

GOES_WITH = {
    "inputs": ("parameters",),
    "prompt": ("add_special_tokens", "return_token_strs"),
    "messages": (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "reasoning_effort",
        "return_token_strs",
        "tool_choice",
        "tools",
    ),
    "content": ("add_special", "parse_special", "with_pieces"),
}
"""What is tokenized -> the fields that go with it alone."""


class TokenizeBody(TemplateBody):
    """The body of POST /tokenize: exactly one of TGI's `inputs`, vLLM's `prompt` and `messages`,
    and llama.cpp's `content`.
    """

    inputs: str | None = Field(default=None, min_length=1, max_length=2**24)
    """Text to tokenize, answered as TGI does: a list of tokens with their places in the text."""
    parameters: fields.JsonObject | None = None
    """Accepted beside `inputs` for TGI's clients, which send the body of /generate; it changes
    nothing."""
    prompt: fields.Text | None = None
    """Text to tokenize, answered as vLLM does: an object with the token ids."""
    content: fields.Text | None = None
    """Text to tokenize, answered as llama.cpp does: an object with the token ids alone."""
    messages: list[Message] | None = Field(  # type: ignore[assignment]
        default=None, min_length=1, max_length=1024, fail_fast=True
    )
    """A conversation to tokenize with the checkpoint's chat template, answered as vLLM does. 1 to
    1024 messages."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens, such as the beginning of sequence, where the
    text does not begin with them; only with `prompt` and `messages`. Default: true; with `messages`
    false.
    """
    add_special: bool | None = None
    """llama.cpp's name of `add_special_tokens`, only with `content`. Default: false."""
    parse_special: Literal[True] | None = None
    """Special tokens are always recognised in texts: only true, the default, is accepted, and only
    with `content`."""
    with_pieces: bool | None = None
    """Also return the text of each token, or its bytes where it is part of a character; only with
    `content`. Default: false."""
    return_token_strs: bool | None = None
    """Also return each token as the vocabulary spells it; only with `prompt` and `messages`.
    Default: false."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "TokenizeBody":
        given = [name for name in GOES_WITH if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(f'`{name}`' for name in GOES_WITH)} is required"
            )
        for others, names in GOES_WITH.items():
            for name in names:
                if getattr(self, name) is not None and name not in GOES_WITH[given[0]]:
                    raise ValueError(f"`{name}` goes with `{others}`, not with `{given[0]}`")
        return self


class DetokenizeBody(Named):
    """The body of POST /detokenize."""

    tokens: Annotated[list[fields.TokenId], Field(max_length=2**20, fail_fast=True)]
    """Token ids to decode, each below the size of the vocabulary."""
