"""Request body of /infill, in llama.cpp's form."""

from typing import Annotated, Literal

from pydantic import Field

from server.http import fields
from server.http.fields import Body, DeliveryBody


class ExtraFile(Body):
    """A file of context for the gap."""

    filename: str | None = Field(default=None, max_length=4096)
    """Name of the file. Default: none."""
    text: fields.Text
    """Content of the file."""
    time: fields.Json = None  # Accepted without effect: editors send it in different forms.
    """When the editor saw the file. Accepted for llama.cpp's editors; it changes nothing."""


class InfillBody(DeliveryBody):
    """The body of POST /infill, with llama.cpp's names and defaults. Null is the default of every field but the two texts."""

    input_prefix: fields.Text
    """Text before the gap."""
    input_suffix: fields.Text
    """Text after the gap."""
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=256, fail_fast=True)
    """Other files, placed before the prefix as context. Up to 256. Default: none."""
    prompt: fields.Text | None = None
    """The beginning of the text in the gap, which the answer continues. Default: empty."""
    n_predict: Annotated[int, Field(ge=-1, lt=2**31), fields.INTEGRAL] | None = None
    """Most tokens to generate. -1, the default: as many as still fit into the context."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divides the logits before sampling. 0: always the most likely token (greedy). Default: 0.8."""
    top_k: fields.TopK | None = None
    """Sample from this many most likely tokens only; at most the size of the vocabulary. 0 and -1: from all. Default: 40."""
    top_p: fields.TopP | None = None
    """Sample from the most likely tokens whose probabilities add up to this share. Default: 0.95."""
    min_p: fields.Share | None = None
    """Sample only tokens at least this share as likely as the most likely token. Default: 0.05."""
    repeat_penalty: fields.RepetitionPenalty | None = None
    """Positive logits of tokens that occur in the prompt or in the output are divided by this, negative ones multiplied. Default: 1.0, no
    penalty.
    """
    presence_penalty: fields.Penalty | None = None
    """Subtracted once from the logit of each token that occurs in the output. Default: 0."""
    frequency_penalty: fields.Penalty | None = None
    """Subtracted from a token's logit once for each time the token occurs in the output. Default: 0."""
    seed: fields.Seed = None
    """Seed of the random draws: the same request with the same seed gets the same tokens where GET /info has `deterministic: true`, and
    nearly always elsewhere. -1, the default: drawn at random for each request.
    """
    stop: fields.StopStrings | None = None
    """Texts of 1 to 1024 characters that end the output and are left out of it; up to server.max_stop_strings (16). Default: none."""
    t_max_predict_ms: fields.Positive | None = None
    """Time limit in milliseconds, waiting included, after which the answer ends with what it has. Default: none."""
    token_healing: bool | None = None
    """Whether the last token before the gap is removed and generated again under the constraint that its text is kept, for gaps within a
    word. Default: true.
    """
    n_indent: fields.Count | None = None
    """The answer ends before the first new line that is indented by fewer spaces and tabs than this; blank lines, and the line that the
    prefix has begun, do not count. 0, the default: it does not.
    """
    samplers: list[Literal["top_k", "top_p", "min_p", "temperature", "infill"]] | None = Field(default=None, max_length=64, fail_fast=True)
    """Samplers to use; `top_k`, `top_p`, `min_p` and `temperature` are off when not in this list. `infill` is accepted and adds nothing to
    `token_healing`. Default: all.
    """
    response_fields: list[Annotated[str, Field(max_length=128)]] | None = Field(default=None, max_length=64, fail_fast=True)
    """Return only these fields of the answer; `a/b` is the field `b` of the object `a`. Default: all."""
    cache_prompt: bool | None = None
    """False: the KV cache of this request is shared with no other. Default: true."""
    # Accepted without effect: llama.vim and others send these. `model` is the editor's setting, "" by default.
    model: str | None = Field(default=None, max_length=1024)
    """Accepted for llama.cpp's editors at any value; it changes nothing."""
    t_max_prompt_ms: fields.Count | None = None
    """Accepted for llama.cpp's editors; it changes nothing."""
    id_slot: fields.Integer | None = None
    """Accepted for llama.cpp's editors; it changes nothing."""
