"""/fim/completions: Mistral's fill-in-the-middle request, which is a completion whose answer has
the form of a chat completion.
"""

from typing import Any

from pydantic import AliasChoices, Field

from server.http import fields
from server.http.answer import Output
from server.http.openai.completions import CompletionReply
from server.http.openai.fields import CompletionBody


class FimBody(CompletionBody):
    """The body of POST /v1/fim/completions: that of /v1/completions, with Mistral's name of the
    seed, and its defaults.
    """

    max_tokens: fields.Limit | None = -1
    """Most tokens to generate for each output. 0 only with `echo`. -1, the default: as many as
    still fit into the context.
    """
    seed: fields.Seed = Field(default=None, validation_alias=AliasChoices("seed", "random_seed"))
    """Seed of the random draws, as on /v1/completions. -1, the default: drawn at random for each
    request. `random_seed` is another name of it.
    """


class FimReply(CompletionReply):
    """A completion in Mistral's form."""

    objects = "chat.completion", "chat.completion.chunk"

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return super().chunk([_as_chat(choice, "delta") for choice in choices])

    def _choice(self, index: int, output: Output, first: Output) -> dict[str, Any]:
        return _as_chat(super()._choice(index, output, first), "message")


def _as_chat(choice: dict[str, Any], key: str) -> dict[str, Any]:
    """A choice of a completion with its text where one of a chat completion has it."""
    return {
        "index": choice.pop("index"),
        key: {"role": "assistant", "content": choice.pop("text")},
    } | choice
