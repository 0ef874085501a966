"""The body of /infill, in llama.cpp's form."""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.api import fields
from server.api.fields import Body


class ExtraFile(Body):
    """A file that stands before the one to be filled in."""

    filename: str | None = Field(default=None, max_length=4096)
    text: fields.Text
    time: Any = None  # Harmless: editors say when a chunk was seen, each in its own way, and sort by it themselves.


class InfillBody(Body):
    """POST /infill, in llama.cpp's form and with its defaults."""

    input_prefix: fields.Text
    input_suffix: fields.Text
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=256)
    prompt: fields.Text | None = None
    n_predict: int | None = Field(default=None, ge=-1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: fields.TopK | None = None
    top_p: fields.TopP | None = None
    min_p: fields.Share | None = None
    repeat_penalty: fields.RepetitionPenalty | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    seed: int | None = Field(default=None, ge=-1, lt=2**63)
    stop: list[fields.StopString] | None = None
    stream: bool | None = None
    t_max_predict_ms: int | None = Field(default=None, ge=1, lt=2**31)
    token_healing: bool | None = None
    priority: fields.Priority | None = None
    resumable: bool | None = None
    n_indent: fields.Count | None = None
    samplers: list[Literal["top_k", "top_p", "min_p", "temperature", "infill"]] | None = None
    """Those that take part; the others are off. "infill", which keeps a completion from stopping within a word, is what healing does."""
    response_fields: list[Annotated[str, Field(max_length=128)]] | None = Field(default=None, max_length=64)
    cache_prompt: bool | None = None
    """False: nothing of it is shared."""
    # Harmless: llama.vim and others send these, and they change no text here. `model` is whatever the editor is set to, "" by default.
    model: str | None = Field(default=None, max_length=1024)
    t_max_prompt_ms: fields.Count | None = None
    id_slot: int | None = None
