"""Request bodies of /infill and /completion, with llama.cpp's names and defaults."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from server import protocol
from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.http import fields
from server.http.fields import Body, DeliveryBody, SamplingBody
from server.http.openai.fields import MAX_SEQUENCES, PromptList, Stops
from server.http.openai.slot_fields import SlotFields
from server.text.fim import Filling
from server.text.jobs import Fill, Prompts
from server.text.service import Source

ResponseFields = Annotated[
    list[Annotated[str, Field(max_length=128)]], Field(max_length=64, fail_fast=True)
]
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def _biases(value: Any) -> Any:
    """Tokens, by ids or texts, and their biases; a bias of false is the least. Raises
    ValueError.
    """
    try:
        return {
            str(token) if isinstance(token, int) else token: (
                -100.0 if bias is False else max(-100.0, min(100.0, bias))
            )
            for token, bias in (value.items() if isinstance(value, dict) else value)
        }
    except (TypeError, ValueError):
        text = (
            "`logit_bias` must be pairs of a token's id or text and a bias or false, or an "
            "object of them"
        )
        raise ValueError(text) from None


NAMES = (
    ("n_predict", "max_tokens", "max_completion_tokens"),
    ("n_cmpl", "n"),
    ("n_probs", "logprobs"),
)
"""Names of the same field, llama.cpp's first."""


class LlamaCppBody(SlotFields, SamplingBody, DeliveryBody):
    """Fields of /infill and /completion, with llama.cpp's names and defaults."""

    n_predict: fields.Limit | None = Field(default=None, validation_alias=AliasChoices(*NAMES[0]))
    """Most tokens to generate, or as many as the context holds if that is less. -1, the default: as
    many as it holds. `max_tokens` and `max_completion_tokens` are other names of it.
    """
    n_cmpl: fields.Choices | None = Field(default=None, validation_alias=AliasChoices(*NAMES[1]))
    """Number of outputs. The answer to more than one is a list of objects. Default: 1. `n` is
    another name of it."""
    n_probs: fields.NumTop | None = Field(default=None, validation_alias=AliasChoices(*NAMES[2]))
    """Return the log-probability of each token, and this many most likely ones in its place, in
    `completion_probabilities`. `logprobs` is another name of it. Default: 0, none.
    """
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divides the logits before sampling. 0: always the most likely token (greedy). Default:
    0.8."""
    top_k: fields.Limit | None = None
    """Sample from this many most likely tokens only; at most the size of the vocabulary. 0 and -1:
    from all. Default: 40."""
    top_p: fields.TopP | None = None
    """Sample from the most likely tokens whose probabilities add up to this share. Default:
    0.95."""
    min_p: fields.Share | None = None
    """Sample only tokens at least this share as likely as the most likely token. Default: 0.05."""
    repetition_penalty: fields.RepetitionPenalty | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    """Positive logits of tokens that occur in the prompt or in the output are divided by this,
    negative ones multiplied. Default: 1.0, no penalty. `repetition_penalty` is another name of it.
    """
    logit_bias: Annotated[fields.LogitBias | None, BeforeValidator(_biases, fields.Json)] = None
    """Added to the logits of tokens: pairs of an id, or a text that stands for its tokens, and a
    bias from -100 to 100, or false for the least; or an object of them. Default: none.
    """
    json_schema: fields.JsonObject | None = None
    """A JSON schema that the output follows. Default: none."""
    grammar: fields.Text | None = None
    """A grammar that the output follows, in GBNF, or in Lark as llguidance reads it. Not with
    `json_schema`. Default: none."""
    post_sampling_probs: Literal[False] | None = None
    """Log-probabilities are those before samplers: only false is accepted."""
    return_tokens: bool | None = None
    """Whether the answer has the ids of its tokens; events of a stream always have them. Default:
    false."""
    timings_per_token: bool | None = None
    """Whether each event of a stream has `timings`, not the last one alone. Default: false."""
    n_indent: fields.Count | None = None
    """The answer ends before the first new line that is indented by fewer spaces and tabs than
    this; blank lines, and the line that the prompt has begun, do not count. 0, the default: it does
    not.
    """
    stop: Stops = None
    """Texts of 1 to 1024 characters that end the output and are left out of it, one or a list; up
    to 16. Default: none.
    """
    t_max_predict_ms: fields.Integer | None = None
    """Time limit in milliseconds from the first token on, after which an answer that has a line
    break ends with what it has. 0 and -1, the default: none.
    """
    response_fields: ResponseFields | None = None
    """Return only these fields of the answer; `a/b` is the field `b` of the object `a`. Default:
    all."""
    # Accepted without effect: the editor's setting, "" by default.
    model: fields.Name | None = None
    """Accepted for llama.cpp's editors at any value; it changes nothing."""

    @model_validator(mode="before")
    @classmethod
    def _under_one_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Leaves out further names of a field that has been given. Raises ValueError where they
        differ.
        """
        for names in NAMES:
            first, *others = [name for name in names if name in value] or names[:1]
            if any(value.pop(other) != value[first] for other in others):
                raise ValueError(f"`{first}` and `{others[0]}` differ; give one of them")
        return value

    def source(self) -> Source | None:
        """The constraint on the output, if there is one. Raises InvalidRequest if there are two."""
        if self.json_schema is None:
            return Source("lark", self.grammar, "grammar") if self.grammar else None
        if self.grammar:
            text = "`grammar` cannot be combined with `json_schema`"
            raise InvalidRequest(text, param="grammar")
        return Source("json", self.json_schema, "json_schema")

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        """The prompts that the answer continues. Raises RequestError."""
        raise NotImplementedError

    async def draws(self, generation: Generation, client: str) -> protocol.Sampling:
        """The engine's sampling parameters, with llama.cpp's defaults. Raises RequestError."""
        bias = self.logit_bias or {}
        if texts := [token for token in bias if not token.isdecimal()]:
            spelt = await generation.texts.run(Prompts(texts, bare=True), client)
            for text, filling in zip(texts, spelt, strict=True):
                bias |= dict.fromkeys(map(str, filling.prompt), bias.pop(text))
        sampling = self.sampling(DEFAULTS)
        return replace(sampling, **self.switched_off())


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
    """Whether the last token before the gap is removed and generated again under the constraint
    that its text is kept, for gaps within a word. Not with `json_schema` and `grammar`, else true
    by default.
    """

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        extra = tuple((file.filename or "", file.text) for file in self.input_extra or ())
        heal = fields.default(self.token_healing, self.source() is None)
        if heal and self.source() is not None:
            text = "`token_healing` cannot be combined with a constraint on the output"
            raise InvalidRequest(text, param="token_healing")
        job = Fill(
            self.input_prefix, self.input_suffix, heal, extra, "input_suffix", self.prompt or ""
        )
        return [await generation.tokenize(job, client)]


class LlamaCppCompletionBody(LlamaCppBody):
    """The body of POST /completion. Null is the default of every field but `prompt`."""

    prompt: PromptList
    """The text to continue, or its token ids; or a list of up to 256 texts, or of lists of token
    ids. The answer to several prompts is a list of objects.
    """

    @model_validator(mode="after")
    def _check_combinations(self) -> "LlamaCppCompletionBody":
        if len(self.prompt) * (self.n_cmpl or 1) > MAX_SEQUENCES:
            raise ValueError(
                f"`prompt` and `n_cmpl` together ask for more than {MAX_SEQUENCES} sequences"
            )
        return self

    async def prompts(self, generation: Generation, client: str) -> list[Filling]:
        # All of them or none.
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]
        made: list[Filling] = await generation.tokenize(Prompts(texts), client) if texts else []
        return made or [Filling(prompt) for prompt in self.prompt if not isinstance(prompt, str)]
