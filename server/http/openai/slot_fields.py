"""Fields that llama.cpp's editors send to every generating route, /v1/chat/completions among
them.
"""

import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from server.http import fields
from server.http.fields import Body

Sampler = Literal[
    "dry",
    "infill",
    "min_p",
    "penalties",
    "temperature",
    "tfs_z",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typ_p",
    "typical_p",
    "xtc",
]
Samplers = Annotated[list[Sampler], Field(max_length=64, fail_fast=True)]
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "temperature": 1.0}
"""Values of protocol.Sampling at which a sampler of `samplers` does nothing."""


class SlotFields(Body):
    """Fields that llama.cpp's editors send to every generating route."""

    samplers: Samplers | None = None
    """Samplers to use; `top_k`, `top_p`, `min_p`, `typ_p` and `temperature` are off when not in
    this list. Others are accepted and add nothing, and the order is the server's own. Default: all.
    """
    cache_prompt: bool | None = None
    """False: the KV cache of this request is shared with no other. Default: true."""

    def switched_off(self) -> dict[str, Any]:
        """The values of protocol.Sampling for the samplers that are not in `samplers`."""
        if self.samplers is None:
            return {}
        used = {name.replace("typ_p", "typical_p") for name in self.samplers}
        return {name: value for name, value in OFF.items() if name not in used}

    def salt(self, otherwise: str = "") -> str:
        """The cache salt of the request."""
        return secrets.token_hex(16) if self.cache_prompt is False else otherwise


class ChatSlotFields(SlotFields):
    """Fields of llama.cpp that /v1/chat/completions takes."""

    n_predict: fields.Limit | None = None
    """llama.cpp's name of `max_tokens`; 0 computes the prompt alone, and -1 is the default."""
