"""model_type -> the module that translates such a checkpoint: its config into a ModelSpec, its weight names into ours.

A family is data and contains no maths. Families never import each other, and only the one asked for is imported.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from model.spec import CheckpointError, ModelSpec, end_token_ids, read_json

MODEL_TYPES = {"gpt_bigcode": "model.families.gpt_bigcode"}


class Family(Protocol):
    """What a family module provides."""

    def spec_from_config(self, config: dict[str, Any], end_token_ids: tuple[int, ...]) -> ModelSpec: ...

    def config_from_spec(self, spec: ModelSpec) -> dict[str, Any]: ...

    def weight_names(self, spec: ModelSpec) -> dict[str, str]: ...


def family_of(model_type: object) -> Family:
    """The family module for a config's `model_type`. Raises CheckpointError where there is none."""
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        supported = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(f"config.json: model_type is {model_type!r}; supported: {supported}")
    return cast(Family, import_module(MODEL_TYPES[model_type]))


def read_spec(folder: Path) -> ModelSpec:
    """The ModelSpec of a checkpoint folder, from its JSON files alone: no weights are read. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; --model takes a checkpoint folder with config.json and model.safetensors")
    config = read_json(folder / "config.json")
    family = family_of(config.get("model_type"))
    spec = family.spec_from_config(config, end_token_ids(folder, config))
    for token in spec.end_token_ids:
        if token >= spec.vocab_size:
            raise CheckpointError(f"config.json: eos_token_id {token} is not below vocab_size {spec.vocab_size}")
    return spec
