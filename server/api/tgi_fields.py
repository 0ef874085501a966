"""The body of the routes in TGI's dialect, with vLLM's names inside `parameters` where TGI has none."""

from typing import Literal

from pydantic import Field, model_validator

from server.api import fields
from server.api.fields import Body, Format, Nothing, SamplingBody

MAX_TOP_N_TOKENS = 5


class Parameters(SamplingBody):
    """`parameters` of a request. Null is the default everywhere."""

    do_sample: bool | None = None
    temperature: float | None = Field(default=None, gt=0, le=2)
    max_new_tokens: fields.Positive | None = None
    stop: list[fields.StopString] | None = Field(default=None, fail_fast=True)
    truncate: fields.Positive | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: int | None = Field(default=None, ge=0, le=MAX_TOP_N_TOKENS)
    best_of: int | None = Field(default=None, ge=1, le=fields.MAX_CHOICES)
    grammar: Format | None = None
    token_healing: bool | None = None
    # What clients send as a matter of course and what changes nothing: accepted at that value alone.
    watermark: Literal[False] | None = None
    adapter_id: Nothing = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Parameters":
        fields.check_fewest(self.min_tokens, self.max_new_tokens, ("parameters.min_tokens", "max_new_tokens"))
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
        """TGI's rule: sampling is asked for by name, or by any value that only sampling could honour."""
        warped = any(value not in (None, 1.0) for value in (self.temperature, self.top_p, self.typical_p))
        return bool(self.do_sample) or warped or (self.top_k or 0) > 0 or bool(self.min_p)

    @property
    def detailed(self) -> bool:
        """Whether a whole answer has `details`."""
        return bool(self.details or self.decoder_input_details)


class GenerateBody(Body):
    """The body of all routes; `stream` decides on /generate and /."""

    inputs: str = Field(min_length=1, max_length=2**24)
    parameters: Parameters | None = None
    stream: bool | None = None
    priority: fields.Priority | None = None
    timeout_s: fields.Seconds | None = None
    resumable: bool | None = None
    # Requests with another one share nothing that is computed.
    cache_salt: fields.Salt | None = None
