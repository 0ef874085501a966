"""Request bodies of Ollama's API, and what they are in OpenAI's dialect."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.http import fields
from server.http.body import check
from server.http.fields import Body, Named, SamplingBody
from server.http.openai import chat_fields
from server.http.openai.chat_fields import Tool, ToolCall
from server.http.openai.fields import CompletionBody, Stops
from server.text.service import Source

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, for what neither the request nor the checkpoint's generation_config.json has."""
EFFORTS = ("low", "medium", "high", "max")


def _not_empty(value: Any) -> Any:
    """Stop strings without empty ones, which clients send for none."""
    return [each for each in value if each != ""] if isinstance(value, list) else value or None


class Options(SamplingBody):
    """The sampling parameters of a request. Those of loading a model, such as `num_ctx`, are left
    out and told, as the server was started with its own.
    """

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divides the logits before sampling. 0: always the most likely token (greedy). Default: the
    checkpoint's, else 0.8; of `top_k` 40 and of `top_p` 0.9.
    """
    repetition_penalty: fields.RepetitionPenalty | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    """As on /v1/completions: over the prompt and the output, whatever `repeat_last_n` is."""
    num_predict: Annotated[int, Field(ge=-2, lt=2**31), fields.INTEGRAL] | None = None
    """Most tokens to generate, or as many as the context holds if that is less, as for 0 and below.
    Default: -1."""
    stop: Annotated[Stops, BeforeValidator(_not_empty, Stops)] = None
    """Texts that end the output, one or a list, up to 16. Default: none."""
    mirostat: Literal[0] | None = None
    """Only 0, off, is supported."""
    tfs_z: Literal[1] | None = None
    """Only 1, off, is supported."""


class OllamaBody(Named):
    """What /api/generate and /api/chat share."""

    stream: bool | None = None
    """Whether the answer comes in lines of JSON, as the text is generated. Default: true."""
    format: fields.Json = None
    """A constraint on the output: `json`, or a JSON Schema. Not with `tools`. Default: none."""
    options: Options = Options()
    """Sampling parameters."""
    think: fields.Json = None
    """Whether the model thinks before it answers, or how much: low, medium, high or max. Default:
    as the chat template has it."""
    keep_alive: fields.Json = None
    """Accepted for Ollama's clients: the model stays loaded. An empty request with 0 is answered
    as if it were unloaded."""
    logprobs: bool | None = None
    """Return the log-probability of each output token. Default: false."""
    top_logprobs: fields.NumTop | None = None
    """Return this many most likely tokens at each position; only with `logprobs`. Default: 0."""
    truncate: bool | None = None
    """A prompt that does not fit the context is refused, whatever this says."""
    shift: bool | None = None
    """A context that is full ends the answer, whatever this says."""

    @model_validator(mode="after")
    def _check(self) -> "OllamaBody":
        if self.think not in (None, True, False, *EFFORTS):
            raise ValueError("`think` must be true, false, low, medium, high or max")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` is allowed only with `logprobs`")
        return self

    @property
    def source(self) -> Source | None:
        """The constraint on the output. Raises InvalidRequest for a format that there is not."""
        if self.format in (None, ""):
            return None
        if self.format != "json" and not isinstance(self.format, dict):
            raise InvalidRequest("`format` must be json or a JSON Schema", param="format")
        return Source(
            "json", {"type": "object"} if self.format == "json" else self.format, "format"
        )

    def sampled(self, generation: Generation) -> dict[str, Any]:
        """The fields that this body and one of OpenAI's dialect share. `max_tokens` is not among
        them, as only the prompt's length decides how many fit.
        """
        most = generation.ready.vocab_size
        values = DEFAULTS | {"top_k": min(DEFAULTS["top_k"], most)}
        values |= generation.codec.files.sampling_defaults
        values |= self.options.model_dump(
            exclude_none=True, exclude={"num_predict", "mirostat", "tfs_z"}
        )
        return values

    def thinking(self) -> dict[str, Any]:
        """The fields of OpenAI's chat that `think` stands for."""
        if self.think is None or isinstance(self.think, str):
            return {"reasoning_effort": self.think} if self.think else {}
        turned = {"chat_template_kwargs": {"enable_thinking": self.think}}
        return turned if self.think else turned | {"reasoning_effort": "none"}


class GenerateBody(OllamaBody):
    """The body of POST /api/generate."""

    prompt: fields.Text = ""
    """The text to answer by the chat template, or to continue where there is none, with `raw` and
    with `suffix`."""
    suffix: fields.Text = ""
    """Text after the gap to fill: the output stands between `prompt` and this. Default: none."""
    system: fields.Text = ""
    """A system message for the chat template. Default: none."""
    raw: bool | None = None
    """Whether `prompt` is continued as it is, without the chat template. Default: false."""
    context: list[fields.TokenId] | None = Field(default=None, max_length=2**20, fail_fast=True)
    """The `context` of an earlier answer, which this request goes on from. Default: none."""
    template: fields.Unsupported = None
    """A template of its own is not supported."""
    images: fields.Unsupported = None
    """Images are not supported."""

    @model_validator(mode="after")
    def _check_raw(self) -> "GenerateBody":
        if self.raw and (self.system or self.context):
            raise ValueError("`raw` cannot be combined with `system` and `context`")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether it asks for nothing but to have the model loaded."""
        return not (self.prompt or self.suffix)

    def is_chat(self, generation: Generation) -> bool:
        """Whether the chat template makes the prompt."""
        return not (self.raw or self.suffix) and generation.codec.files.chat_template is not None

    def as_chat(self, generation: Generation) -> chat_fields.ChatBody:
        """The same request to /v1/chat/completions. Raises InvalidRequest."""
        roles = {"system": self.system, "user": self.prompt}
        messages = [{"role": role, "content": text} for role, text in roles.items() if text]
        given = {"messages": messages}
        return check(self.sampled(generation) | self.thinking() | given, chat_fields.ChatBody)[0]

    def as_completion(self, generation: Generation) -> CompletionBody:
        """The same request to /v1/completions. Raises InvalidRequest."""
        if self.system:
            text = "`system` needs a model with a chat template, and no `suffix`"
            raise InvalidRequest(text, param="system")
        # A grammar needs the last token as it is.
        heals = bool(self.suffix) and self.source is None
        given = {"prompt": self.prompt, "suffix": self.suffix or None, "token_healing": heals}
        return check(self.sampled(generation) | given | {"max_tokens": -1}, CompletionBody)[0]


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """The author of the message."""
    content: fields.Text = ""
    """The text."""
    thinking: fields.Text | None = Field(default=None, serialization_alias="reasoning_content")
    """The thought of an assistant's message."""
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128, fail_fast=True)
    """The calls of an assistant's message; their `arguments` are objects."""
    tool_name: fields.Name | None = Field(default=None, serialization_alias="name")
    """Of a `tool`'s message the function's name."""
    tool_call_id: fields.Name | None = None
    """Of a `tool`'s message the id of the call."""
    images: fields.Unsupported = None
    """Images are not supported."""


class ChatBody(OllamaBody):
    """The body of POST /api/chat."""

    messages: list[Message] = Field(default=[], max_length=1024, fail_fast=True)
    """The conversation, oldest message first. Up to 1024."""
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    """Functions that the model may call. Up to 128. Default: none."""

    @model_validator(mode="after")
    def _check_format(self) -> "ChatBody":
        if self.tools and self.format:
            raise ValueError("`format` cannot be combined with `tools`")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether it asks for nothing but to have the model loaded."""
        return not self.messages

    def as_chat(self, generation: Generation) -> chat_fields.ChatBody:
        """The same request to /v1/chat/completions. Raises InvalidRequest."""
        given = self.model_dump(include={"messages", "tools"}, exclude_none=True, by_alias=True)
        return check(self.sampled(generation) | self.thinking() | given, chat_fields.ChatBody)[0]


class ShowBody(Named):
    """The body of POST /api/show."""

    name: fields.Name | None = None
    """The older name of `model`."""


class LoadedBody(Named):
    """What /api/embed and /api/embeddings share."""

    truncate: bool | None = None
    """Whether a text that is longer than the context is cut; else it is refused. Default: true."""
    options: fields.Json = None
    """Accepted for Ollama's clients; the model was loaded with its own."""
    keep_alive: fields.Json = None
    """Accepted for Ollama's clients: the model stays loaded."""


class EmbeddingBody(LoadedBody):
    """The body of POST /api/embeddings."""

    prompt: fields.Text
    """The text to embed."""


class EmbedBody(LoadedBody):
    """The body of POST /api/embed."""

    input: Annotated[
        list[fields.Text],
        Field(max_length=2048),
        BeforeValidator(fields.in_list, fields.Text | list[fields.Text]),
    ]
    """A text, or a list of up to 2048."""
    dimensions: fields.Positive | None = None
    """Keep only this many numbers of each embedding, which are normalised again. Default: all."""


class PullBody(ShowBody):
    """The body of POST /api/pull."""

    stream: bool | None = None
    """Whether the answer comes in lines of JSON. Default: true."""
