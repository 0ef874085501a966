"""Request bodies of llama.cpp's routes, /infill, /completion and /apply-template, and its fields that /v1/chat/completions takes."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from server import protocol
from server.generation.generation import Generation
from server.http import fields
from server.http.fields import Body, DeliveryBody, Empty
from server.http.openai.fields import MAX_SEQUENCES, PromptList
from server.text.fim import Filling
from server.text.jobs import Fill, Prompts

Samplers = Annotated[list[Literal["top_k", "top_p", "min_p", "temperature", "infill"]], Field(max_length=64, fail_fast=True)]
ResponseFields = Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=64, fail_fast=True)]
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
"""Values of protocol.Sampling at which a sampler of `samplers` does nothing."""


def switched_off(samplers: Sequence[str] | None) -> dict[str, Any]:
    """The values of protocol.Sampling for the samplers that are not in a request's `samplers`."""
    return {name: value for name, value in OFF.items() if samplers is not None and name not in samplers}


def salt(cache_prompt: bool | None, otherwise: str = "") -> str:
    """The cache salt of a request with this `cache_prompt`."""
    return secrets.token_hex(16) if cache_prompt is False else otherwise


class SlotFields(Body):
    """Fields that llama.cpp's editors send to every generating route."""

    samplers: Samplers | None = None
    """Samplers to use; `top_k`, `top_p`, `min_p` and `temperature` are off when not in this list. `infill` is accepted and adds nothing to
    token healing. Default: all.
    """
    cache_prompt: bool | None = None
    """False: the KV cache of this request is shared with no other. Default: true."""
    # Accepted without effect: there are no slots and no adapters here.
    id_slot: fields.Integer | None = None
    """Accepted for llama.cpp's editors; it changes nothing: there are no slots."""
    lora: list[fields.Json] | None = Empty
    """Adapters are not supported: only an empty list is accepted."""


class ChatSlotFields(SlotFields):
    """Fields of llama.cpp that /v1/chat/completions takes."""

    n_predict: fields.Limit | None = None
    """llama.cpp's name of `max_tokens`; 0 computes the prompt alone, and -1 is the default."""
    response_fields: ResponseFields | None = None
    """Accepted for llama.cpp's editors; it changes nothing on this route, as it does there."""


class LlamaCppBody(SlotFields, DeliveryBody):
    """Fields of /infill and /completion, with llama.cpp's names and defaults."""

    n_predict: fields.Limit | None = Field(default=None, validation_alias=AliasChoices("n_predict", "max_tokens"))
    """Most tokens to generate, or as many as the context holds if that is less. -1, the default: as many as it holds. `max_tokens` is
    another name of it.
    """
    n_cmpl: fields.Choices | None = Field(default=None, validation_alias=AliasChoices("n_cmpl", "n"))
    """Number of outputs. The answer to more than one is a list of objects. Default: 1. `n` is another name of it."""
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
    """Time limit in milliseconds from the first token on, after which an answer that has a line break ends with what it has. Default:
    none.
    """
    response_fields: ResponseFields | None = None
    """Return only these fields of the answer; `a/b` is the field `b` of the object `a`. Default: all."""
    # Accepted without effect: editors send these. `model` is the editor's setting, "" by default.
    model: fields.Name | None = None
    """Accepted for llama.cpp's editors at any value; it changes nothing."""
    t_max_prompt_ms: fields.Count | None = None
    """Accepted for llama.cpp's editors; it changes nothing."""

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        """The prompts that the answer continues. Raises RequestError."""
        raise NotImplementedError

    def sampling(self) -> protocol.Sampling:
        """The engine's sampling parameters, with llama.cpp's defaults."""
        sampling: dict[str, Any] = {
            "temperature": fields.default(self.temperature, 0.8),
            "top_k": max(0, fields.default(self.top_k, 40)),
            "top_p": fields.default(self.top_p, 0.95),
            "min_p": fields.default(self.min_p, 0.05),
        }
        return protocol.Sampling(
            **sampling | switched_off(self.samplers),
            repetition_penalty=fields.default(self.repeat_penalty, 1.0),
            presence_penalty=fields.default(self.presence_penalty, 0.0),
            frequency_penalty=fields.default(self.frequency_penalty, 0.0),
            seed=fields.drawn(self.seed),
        )


class ExtraFile(Body):
    """A file of context for the gap."""

    filename: str | None = Field(default=None, max_length=4096)
    """Name of the file. Default: none."""
    text: fields.Text
    """Content of the file."""
    time: fields.Json = None  # Accepted without effect: editors send it in different forms.
    """When the editor saw the file. Accepted for llama.cpp's editors; it changes nothing."""


class InfillBody(LlamaCppBody):
    """The body of POST /infill. Null is the default of every field but the two texts."""

    input_prefix: fields.Text
    """Text before the gap."""
    input_suffix: fields.Text
    """Text after the gap."""
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=256, fail_fast=True)
    """Other files, placed before the prefix as context. Up to 256. Default: none."""
    prompt: fields.Text | None = None
    """The beginning of the text in the gap, which the answer continues. Default: empty."""
    token_healing: bool | None = None
    """Whether the last token before the gap is removed and generated again under the constraint that its text is kept, for gaps within a
    word. Default: true.
    """
    n_indent: fields.Count | None = None
    """The answer ends before the first new line that is indented by fewer spaces and tabs than this; blank lines, and the line that the
    prefix has begun, do not count. 0, the default: it does not.
    """

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        extra = tuple((file.filename or "", file.text) for file in self.input_extra or ())
        heal = self.token_healing is not False
        job = Fill(self.input_prefix, self.input_suffix, heal, extra, "input_suffix", self.prompt or "")
        return [await generation.tokenize(job, client)]


class LlamaCppCompletionBody(LlamaCppBody):
    """The body of POST /completion. Null is the default of every field but `prompt`."""

    prompt: PromptList
    """The text to continue, or its token ids; or a list of up to 256 texts, or of lists of token ids. The answer to several prompts is a
    list of objects.
    """
    # Accepted without effect.
    mirostat: Literal[0] | None = None
    """Mirostat is not supported: only 0, which turns it off, is accepted."""
    penalty_last_n: fields.Integer | None = None
    """Accepted for Tabby, which sends it; llama.cpp has no such field, and it changes nothing."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "LlamaCppCompletionBody":
        if len(self.prompt) * (self.n_cmpl or 1) > MAX_SEQUENCES:
            raise ValueError(f"`prompt` and `n_cmpl` together ask for more than {MAX_SEQUENCES} sequences")
        return self

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]  # All of them or none.
        made: list[Filling] = await generation.tokenize(Prompts(texts), client) if texts else []
        return made or [Filling(prompt) for prompt in self.prompt if not isinstance(prompt, str)]
