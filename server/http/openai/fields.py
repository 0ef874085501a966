"""Request bodies of OpenAI's dialect with vLLM's extra fields, and their checks.

Invariant: every field has an effect.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.generation.generation import Generation
from server.generation.request import Request
from server.http import fields
from server.http.fields import Body, Format, LimitedBody, Named, SamplingBody, default
from server.text.jobs import Spell
from server.text.service import Kind, Source

MAX_PROMPTS = 256
MAX_SEQUENCES = 1024


Stops = Annotated[
    fields.StopStrings | None,
    BeforeValidator(fields.in_list, fields.StopStrings | fields.StopString | None),
]


def _number(value: Any) -> Any:
    """true as 1, and false as none."""
    return (1 if value else None) if isinstance(value, bool) else value


class StreamOptions(Body):
    """Options of a stream on /v1."""

    include_usage: bool | None = None
    """Whether a last chunk with empty `choices` has the token counts in `usage`. Default: false."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the token counts so far; needs `include_usage`, and does nothing
    where that is false. Default: false."""


class StructuredOutputs(Body):
    """A constraint on the output, in vLLM's form: exactly one of the fields is set."""

    json_: fields.Json = Field(default=None, alias="json")
    """A JSON Schema that the output follows, as an object or as a string of JSON."""
    json_object: Literal[True] | None = None
    """True: the output is a JSON object of any kind."""
    regex: fields.Text | None = None
    """A regular expression that the whole output matches."""
    choice: list[fields.Word] | None = Field(
        default=None, min_length=1, max_length=1024, fail_fast=True
    )
    """Texts, one of which is the output. 1 to 1024 texts of 1 to 256 characters."""
    grammar: fields.Text | None = None
    """A grammar in Lark's syntax (as llguidance reads it), or in GBNF, that the output follows."""

    def source(self) -> Source:
        named: list[tuple[Kind, str, Any]] = [
            ("json", "json", self.json_),
            ("json", "json_object", {"type": "object"} if self.json_object else None),
            ("regex", "regex", self.regex),
            ("choice", "choice", self.choice),
            ("lark", "grammar", self.grammar),
        ]
        given = [
            Source(kind, value, f"structured_outputs.{name}")
            for kind, name, value in named
            if value is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "`structured_outputs` must have exactly one of json, json_object, regex, choice, "
                "grammar"
            )
        return given[0]


class GenerationBody(Named, SamplingBody, LimitedBody):
    """Fields of both completions and chat."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divides the logits before sampling. 0: always the most likely token (greedy). Default: the
    checkpoint's generation_config.json, else 1.0; the defaults of `top_k`, `top_p`, `min_p`,
    `typical_p` and `repetition_penalty` come from that file too, where it has them.
    """
    bad_words: list[fields.Word] | None = Field(default=None, max_length=128, fail_fast=True)
    """Texts of 1 to 256 characters whose token sequences are never generated. Up to 128. Default:
    none."""
    stop: Stops = None
    """Texts that end the output, one or a list, of 1 to 1024 characters each, up to 16.
    Default: none.
    """
    include_stop_str_in_output: bool | None = None
    """Whether the stop string or stop token that ended the output is part of its text. Default:
    false."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. Default: true."""
    prompt_logprobs: fields.NumTop | None = None
    """Also return the log-probability of each prompt token, and this many most likely tokens at its
    position. Not with `stream`. Default: none.
    """
    logprob_token_ids: (
        Annotated[list[fields.TokenId], Field(min_length=1, max_length=128, fail_fast=True)] | None
    ) = None
    """Return, at each position of the output, the log-probability of the chosen token and then
    those of these token ids, not those of the most likely tokens; only with `logprobs`. 1 to 128
    ids. Default: none.
    """
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens in `logprobs` are written as `token_id:` and their id, so that those of the
    same text differ; only with `logprobs`. Default: false.
    """
    truncate_prompt_tokens: fields.Limit | None = None
    """Keep only this many tokens of the prompt, its last ones. -1: as many as the context holds
    beside `max_tokens`. Default: all."""
    n: fields.Choices | None = None
    """Number of outputs for each prompt. Default: 1."""
    stream_options: StreamOptions | None = None
    """Options of a stream; only with `stream`."""
    response_format: Format | None = None
    """A constraint on the output. Default: none."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's constraints on the output: exactly one of its fields. Not with `response_format`.
    Default: none."""
    return_token_ids: bool | None = None
    """Whether the answer has the token ids of the prompt and of the output. Default: false."""
    request_id: Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    """Becomes the part of the answer's `id` after the hyphen: 1 to 64 letters, digits, `_` and `-`.
    Default: a random one."""

    @model_validator(mode="after")
    def _check_common_combinations(self) -> "GenerationBody":
        fields.check_logit_bias(self.logit_bias, "logit_bias")
        fields.check_minimum(self.min_tokens, self.max_output_tokens, ("min_tokens", "max_tokens"))
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is allowed only with `stream`")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and options.include_usage is None:
            raise ValueError(
                "`stream_options.continuous_usage_stats` is allowed only with `include_usage`"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("`prompt_logprobs` is not supported when streaming")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("`truncate_prompt_tokens` must be -1 or >= 1. Given: 0")
        for name in ("logprob_token_ids", "return_tokens_as_token_ids"):
            if getattr(self, name) and self.num_top is None:
                raise ValueError(f"`{name}` is allowed only with `logprobs`")
        if self.source() is not None and self.logprob_token_ids:
            # Tokens that a grammar forces get log-probabilities as prompt tokens do, for which the
            # engine returns none of chosen ids.
            raise ValueError(
                "`logprob_token_ids` cannot be combined with a constraint on the output"
            )
        return self

    @property
    def max_output_tokens(self) -> int | None:
        """Largest number of output tokens; None: as many as fit into the context."""
        return None

    @property
    def num_top(self) -> int | None:
        """Number of most likely tokens to return with each token; None without
        log-probabilities.
        """
        return None

    def source(self) -> Source | None:
        """The constraint on the output, if there is one. Raises ValueError if there are two."""
        formatted = (
            None if self.response_format is None else self.response_format.source("response_format")
        )
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            raise ValueError("`structured_outputs` cannot be combined with `response_format`")
        return self.structured_outputs.source()

    def truncated(self, prompt: list[int], capacity: int) -> list[int]:
        """The last prompt tokens, which `truncate_prompt_tokens` keeps. `capacity`: largest number
        of prompt and output tokens.
        """
        kept = self.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, capacity - (self.max_output_tokens or 1))
        return prompt if kept is None else prompt[-kept:]

    async def request(self, generation: Generation, client: str, prompt: list[int]) -> Request:
        """The internal request of a prompt. Sampling defaults are those of generation_config.json,
        as in vLLM. Raises RequestError.
        """
        sampling = replace(
            self.sampling(generation.codec.files.sampling_defaults),
            logprob_token_ids=self.logprob_token_ids or [],
            bad_words=await generation.texts.run(Spell(self.bad_words), client)
            if self.bad_words
            else [],
        )
        return Request(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=self.max_output_tokens,
            min_new_tokens=self.min_tokens or 0,
            stop_strings=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            keep_stop=bool(self.include_stop_str_in_output),
            keep_stop_token=bool(self.include_stop_str_in_output),
            skip_special_tokens=default(self.skip_special_tokens, True),
            num_top=max(self.num_top or 0, self.prompt_logprobs or 0),
            score_prompt=self.prompt_logprobs is not None,
            grammar=await generation.texts.grammar(self.source(), client),
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
            salt=self.cache_salt or "",
        )


PromptList = Annotated[
    list[fields.Text | fields.TokenIds],
    Field(max_length=MAX_PROMPTS, fail_fast=True),
    fields.ONE_OR_MORE,
]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions. Null is the default of every field but `prompt`."""

    prompt: PromptList
    """The text to continue, or its token ids; or a list of up to 256 texts, or of lists of token
    ids. Each prompt gets `n` outputs; all together up to 1024.
    """
    suffix: fields.Text | None = None
    """Text after the gap to fill: the output stands between `prompt`, a single text, and this.
    Needs a tokenizer with fill-in-the-middle tokens. Default: none.
    """
    max_tokens: fields.Limit | None = None
    """Most tokens to generate for each output. 0 only with `echo`. -1: as many as still fit into
    the context. Default: 16.
    """
    echo: bool | None = None
    """Whether the text of each choice begins with its prompt. Default: false."""
    logprobs: Annotated[
        fields.NumTop | None, BeforeValidator(_number, fields.NumTop | bool | None)
    ] = None
    """Return the log-probability of each output token, and this many most likely tokens at its
    position. true: 1; false, the default: none.
    """
    best_of: fields.Choices | None = None
    """Number of outputs generated for each prompt, of which the `n` with the highest mean
    log-probability are returned; at least `n`. Not above `n` with `stream`. Default: `n`.
    """
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens, such as the beginning of sequence, to a text
    prompt. Default: true."""
    token_healing: bool | None = None
    """Whether the prompt's last token is removed and generated again under the constraint that its
    text is kept, for prompts that end within a word. Text prompts only. Default: false; true with
    `suffix` unless the output has a constraint.
    """

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens` must be >= 1, or 0 with `echo`. Given: 0")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"`best_of` must be >= `n` {self.n}. Given: {self.best_of}")
        if len(self.prompt) * (self.best_of or self.n or 1) > MAX_SEQUENCES:
            raise ValueError(
                f"`prompt` and `n` together ask for more than {MAX_SEQUENCES} sequences"
            )
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise ValueError(
                "`best_of` above `n` is not supported when streaming: which are best is known at "
                "the end"
            )
        if self.suffix is not None and (
            self.echo or len(self.prompt) > 1 or not isinstance(self.prompt[0], str)
        ):
            raise ValueError("`suffix` needs a `prompt` that is one string, and no `echo`")
        for name in ("add_special_tokens", "truncate_prompt_tokens"):
            if self.suffix is not None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` cannot be combined with `suffix`")
        if self.token_healing and not isinstance(self.prompt[0], str):
            raise ValueError("`token_healing` needs prompts that are texts")
        if self.token_healing and self.source() is not None:
            raise ValueError("`token_healing` cannot be combined with a constraint on the output")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return None if self.max_tokens == -1 else default(self.max_tokens, 16)

    @property
    def num_top(self) -> int | None:
        return self.logprobs
