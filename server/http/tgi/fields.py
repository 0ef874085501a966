"""Request body of TGI's dialect, with vLLM's names inside `parameters` for fields that TGI
lacks.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from server.http import fields
from server.http.fields import Body, Format, LimitedBody, SamplingBody

MAX_TOP_N_TOKENS = 5


class Parameters(SamplingBody):
    """How to generate. Null is the default of every field."""

    do_sample: bool | None = None
    """Whether tokens are drawn at random. Default: true without `parameters`; with them, true if
    `temperature`, `top_p` or `typical_p` is set to another value than 1.0, or `top_k` or `min_p` to
    one above 0; else false (greedy).
    """
    temperature: float | None = Field(default=None, gt=0, le=2)
    """Divides the logits before sampling. Default: 1.0."""
    max_new_tokens: fields.Positive | None = None
    """Most tokens to generate. Default: as many as still fit into the context."""
    stop: fields.StopStrings | None = None
    """Texts of 1 to 1024 characters that end the output, and stay at its end; up to 16.
    Default: none.
    """
    truncate: fields.Positive | None = None
    """Keep only this many tokens of the prompt, its last ones. Default: all."""
    return_full_text: bool | None = None
    """Whether `generated_text` begins with the prompt. Default: true on /, else false."""
    details: bool | None = None
    """Whether the answer has `details`: the tokens with their log-probabilities, the finish reason
    and the seed. Default: false."""
    decoder_input_details: bool | None = None
    """Also return the log-probability of each prompt token, in `details.prefill`. Not when
    streaming. Default: false."""
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_TOP_N_TOKENS), fields.INTEGRAL] | None = None
    """Return this many most likely tokens at each position of the output. Default: 0."""
    best_of: fields.Choices | None = None
    """Generate this many outputs and return the one with the highest mean log-probability. Above 1
    only with sampling, without `seed` and without streaming. Default: 1.
    """
    grammar: Format | None = None
    """A constraint on the output. Default: none."""
    token_healing: bool | None = None
    """Whether the prompt's last token is removed and generated again under the constraint that its
    text is kept, for prompts that end within a word. Default: false.
    """
    # Clients send this by default: accepted at the value that changes nothing.
    watermark: Literal[False] | None = None
    """Watermarks are not supported: only false is accepted."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "Parameters":
        fields.check_minimum(
            self.min_tokens, self.max_new_tokens, ("parameters.min_tokens", "max_new_tokens")
        )
        fields.check_logit_bias(self.logit_bias, "parameters.logit_bias")
        if (self.best_of or 1) > 1:
            if not self.samples:
                raise ValueError("you must use sampling when `best_of` is > 1")
            if self.seed is not None:
                raise ValueError("`seed` must not be set when `best_of` > 1")
        if self.grammar is not None:
            self.grammar.source("parameters.grammar")
            if self.token_healing:
                raise ValueError("`parameters.token_healing` cannot be combined with `grammar`")
        return self

    @property
    def samples(self) -> bool:
        """Whether to sample, by TGI's rule: `do_sample` is true, or a parameter has a value that
        would change random draws.
        """
        warped = any(
            value not in (None, 1.0) for value in (self.temperature, self.top_p, self.typical_p)
        )
        return bool(self.do_sample) or warped or (self.top_k or 0) > 0 or bool(self.min_p)


class Options(Body):
    """`options` of Hugging Face's inference API."""

    use_cache: bool | None = None
    """Accepted for Hugging Face's clients; it changes nothing: answers are not cached."""
    wait_for_model: bool | None = None
    """Accepted for Hugging Face's clients; it changes nothing: a server that is not ready answers
    503."""


class GenerateBody(LimitedBody):
    """The body of POST /generate, /generate_stream and /. Null is the default of every field but
    `inputs`.
    """

    inputs: str = Field(min_length=1, max_length=2**24)
    """The prompt. Special tokens are recognised in it."""
    parameters: Parameters | None = None
    """How to generate. Without it, tokens are sampled at temperature 1.0; with an empty object,
    generation is greedy."""
    # Accepted without effect.
    options: Options | None = None
    """Accepted for Hugging Face's clients; it changes nothing."""
    use_cache: bool | None = None
    """Accepted for Hugging Face's clients; it changes nothing: answers are not cached."""
    model: fields.Name | None = None
    """Accepted at any name; it changes nothing: there is one model."""
