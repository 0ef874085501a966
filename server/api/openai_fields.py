"""The bodies of OpenAI's routes, with the fields that vLLM's clients send beside OpenAI's own, and their checks.

Every field changes something, stands under "harmless" below at the values that change nothing, or is refused as unknown.
"""

from typing import Annotated, Any, Literal

from msgspec import structs
from pydantic import BeforeValidator, Field, model_validator

from server.api import fields
from server.api.fields import Body, Format, SamplingBody, default
from server.generation import Request
from server.grammar import Source
from server.text import TextCodec

MAX_PROMPTS = 256
MAX_SEQUENCES = 1024


def _in_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    """`stream_options`. Obfuscation is padding against those who watch lengths; there is none here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: Any = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[fields.Word] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = None

    def source(self) -> Source:
        given: list[Source] = []
        if self.json_ is not None:
            given.append(Source("json", self.json_, "structured_outputs.json"))
        if self.json_object:
            given.append(Source("json", {"type": "object"}, "structured_outputs.json_object"))
        if self.regex is not None:
            given.append(Source("regex", self.regex, "structured_outputs.regex"))
        if self.choice is not None:
            given.append(Source("choice", self.choice, "structured_outputs.choice"))
        if self.grammar is not None:
            given.append(Source("lark", self.grammar, "structured_outputs.grammar"))
        if len(given) != 1:
            raise ValueError("`structured_outputs` must have exactly one of json, json_object, regex, choice, grammar")
        return given[0]


class GenerationBody(SamplingBody):
    """What completions and chat have in common. Null is the default everywhere."""

    model: str | None = Field(default=None, max_length=1024)
    temperature: float | None = Field(default=None, ge=0, le=2)
    bad_words: list[fields.Word] | None = Field(default=None, max_length=128)
    stop: Annotated[list[fields.StopString] | None, BeforeValidator(_in_list)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: fields.Top | None = None
    n: int | None = Field(default=None, ge=1, le=fields.MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    priority: fields.Priority | None = None
    timeout_s: fields.Seconds | None = None
    resumable: bool | None = None
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    # Requests with another one share nothing that is computed.
    cache_salt: fields.Salt | None = None
    # Harmless: what clients send as a matter of course, and what changes no answer.
    user: str | None = Field(default=None, max_length=1024)
    safety_identifier: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _common_fits_together(self) -> "GenerationBody":
        fields.check_logit_bias(self.logit_bias, "logit_bias")
        fields.check_fewest(self.min_tokens, self.most_tokens, ("min_tokens", "max_tokens"))
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is allowed only with `stream`")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ValueError("`stream_options.continuous_usage_stats` is allowed only with `include_usage`")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("`prompt_logprobs` is not supported when streaming")
        self.source()
        return self

    @property
    def most_tokens(self) -> int | None:
        """`max_tokens`, however this body spells it."""
        return None

    @property
    def num_top(self) -> int | None:
        """Alternatives wanted with each token; None where not even its own log-probability is."""
        return None

    def source(self) -> Source | None:
        """The constraint on the output. Raises ValueError where there are two."""
        formatted = None if self.response_format is None else self.response_format.source("response_format")
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            raise ValueError("`structured_outputs` cannot be combined with `response_format`")
        return self.structured_outputs.source()

    def request(self, codec: TextCodec, prompt: list[int]) -> Request:
        """The internal request. Sampling defaults are the checkpoint's own, as vLLM's clients expect on these routes."""
        own = codec.files.sampling_defaults
        sampling = structs.replace(
            self.sampling(default(self.temperature, own.get("temperature", 1.0)), own),
            bad_words=[ids for word in self.bad_words or () for ids in bad_word_ids(codec, word)],
        )
        return Request(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=self.most_tokens,
            min_new_tokens=self.min_tokens or 0,
            stop_strings=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            keep_stop=bool(self.include_stop_str_in_output),
            keep_stop_token=bool(self.include_stop_str_in_output),
            skip_special_tokens=default(self.skip_special_tokens, True),
            num_top=max(self.num_top or 0, self.prompt_logprobs or 0),
            score_prompt=self.prompt_logprobs is not None,
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
            salt=self.cache_salt or "",
        )


def bad_word_ids(codec: TextCodec, word: str) -> list[list[int]]:
    """The token sequences by which a word may be written: at the beginning of a text, and behind a space."""
    found = [codec.encode_plain(word), codec.encode_plain(" " + word.lstrip())]
    return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids. Raises ValueError naming the first that is neither."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("`prompt` cannot be empty")
    several = value if isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS:
        raise ValueError(f"`prompt` supports up to {MAX_PROMPTS} prompts. Given: {len(several)}")
    for number, prompt in enumerate(several):
        name = "prompt" if several is not value else f"prompt.{number}"
        if type(prompt) is not type(several[0]):
            raise ValueError(f"`{name}` differs in kind from the first prompt")
        if isinstance(prompt, list):
            _check_ids(prompt, name)
    return several


def _check_ids(ids: list[Any], name: str) -> None:
    if not ids:
        raise ValueError(f"`{name}` cannot be empty")
    for index, id in enumerate(ids):
        if type(id) is not int or not 0 <= id < 2**31:
            raise ValueError(f"`{name}.{index}` must be a token id: an integer >= 0")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    """Texts or token ids; a single one of either becomes a list of one."""
    suffix: fields.Text | None = None
    max_tokens: fields.Count | None = None
    echo: bool | None = None
    logprobs: fields.Top | None = None
    best_of: int | None = Field(default=None, ge=1, le=fields.MAX_CHOICES)
    add_special_tokens: bool | None = None
    token_healing: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens` must be >= 1, or 0 with `echo`. Given: 0")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"`best_of` must be >= `n` {self.n}. Given: {self.best_of}")
        if len(self.prompt) * (self.best_of or self.n or 1) > MAX_SEQUENCES:
            raise ValueError(f"`prompt` and `n` together ask for more than {MAX_SEQUENCES} sequences")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise ValueError("`best_of` above `n` is not supported when streaming: which are best is known at the end")
        if self.suffix is not None and (self.echo or len(self.prompt) > 1 or not isinstance(self.prompt[0], str)):
            raise ValueError("`suffix` needs a `prompt` that is one string, and no `echo`")
        if self.suffix is not None and self.add_special_tokens is not None:
            raise ValueError("`add_special_tokens` cannot be combined with `suffix`")
        if self.token_healing and not isinstance(self.prompt[0], str):
            raise ValueError("`token_healing` needs prompts that are texts")
        if self.token_healing and self.source() is not None:
            raise ValueError("`token_healing` cannot be combined with a constraint on the output")
        return self

    @property
    def most_tokens(self) -> int | None:
        return default(self.max_tokens, 16)

    @property
    def num_top(self) -> int | None:
        return self.logprobs
