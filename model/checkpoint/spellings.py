"""Earlier model types and names of keys in config.json, in the spelling of today's `transformers`.

Invariant: two keys that mean the same and differ are refused. It knows no family's arithmetic and
no torch.
"""

from collections.abc import Mapping
from typing import Any

from model.checkpoint.config import NAME, short
from model.spec import CheckpointError

TYPES: dict[str, dict[str, Any]] = {
    "RefinedWebModel": {"model_type": "falcon"},
    "RefinedWeb": {"model_type": "falcon", "new_decoder_architecture": True},
}
"""Falcon-7B and Falcon-40B as first published, before `transformers` had the family."""
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4",
    "gemma4_assistant": "gemma4_assistant",
}
"""Models around a text model, and how what their text_config describes is called here."""
_GPT = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_EXPERTS = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
KEYS = {
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "falcon": {
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
}
"""Of each model type: another name of a key -> the one that its family reads."""


def respelt(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json as the families read them. Raises CheckpointError."""
    found = dict(values)
    whole = str(found.get("model_type"))
    if whole in TEXT_TYPES and isinstance(text := found.pop("text_config", None), Mapping):
        ends = [found.get("eos_token_id"), text.get("eos_token_id")]
        found |= {**text, "model_type": TEXT_TYPES[whole]}
        if None not in ends:  # What ends the whole model's texts ends these too.
            found["eos_token_id"] = [
                id for each in ends for id in (each if isinstance(each, list) else [each])
            ]
    found |= TYPES.get(str(found.get("model_type")), {})
    for other, name in KEYS.get(str(found.get("model_type")), {}).items():
        value = found.pop(other, None)
        if value is None:
            continue
        if found.get(name) not in (None, value):
            both = f"{other} is {short(value)} and {name} {short(found[name])}"
            raise CheckpointError(f"{NAME}: {both}, which mean the same; expected one of them")
        found[name] = value
    return found
