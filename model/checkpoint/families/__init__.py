"""Checkpoint families: model_type -> the module that translates its config to a ModelSpec and its
weight names to the decoder's.

A family is data and contains no maths. Families never import each other; only the family that is
needed is imported.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from model.checkpoint.config import Config, end_token_ids, read_json, short
from model.checkpoint.names import Names, renamed
from model.checkpoint.pooling import pooling_of
from model.checkpoint.quantization_config import packed_groups
from model.checkpoint.spellings import respelt
from model.spec import CheckpointError, ModelSpec

MODEL_TYPES = {
    "deepseek_v2": "model.checkpoint.families.deepseek",
    "deepseek_v3": "model.checkpoint.families.deepseek",
    "falcon": "model.checkpoint.families.falcon",
    "gemma": "model.checkpoint.families.gemma",
    "gemma3_text": "model.checkpoint.families.gemma3_text",
    "gemma4": "model.checkpoint.families.gemma4",
    "gemma4_assistant": "model.checkpoint.families.gemma4",
    "gemma4_text": "model.checkpoint.families.gemma4",
    "gpt2": "model.checkpoint.families.gpt_bigcode",
    "gpt_bigcode": "model.checkpoint.families.gpt_bigcode",
    "llama": "model.checkpoint.families.llama",
    "minicpm3": "model.checkpoint.families.minicpm3",
    "mistral": "model.checkpoint.families.llama",
    "youtu": "model.checkpoint.families.deepseek",
}
MOST_NUMBERS = 2**40
"""Of a table: more than any checkpoint has, and few enough that its bytes can be counted."""
log = logging.getLogger("onehead")


def family_of(model_type: object) -> ModuleType:
    """The family module for a config's `model_type`: `spec_from_config(config)` gives its
    ModelSpec, `weight_names(spec)` the Names of all parameters but the head and what pools, which
    are called alike in all families. Raises CheckpointError where there is none.
    """
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        supported = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(
            f"config.json: model_type is {short(model_type)}; supported: {supported}"
        )
    return import_module(MODEL_TYPES[model_type])


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    names: Names = family_of(spec.model_type).weight_names(spec)
    if not spec.tied_embeddings:
        # One of the largest comes first, so that no thread of the loader is left alone with it.
        names = renamed({"head": "lm_head"}) | names
    for number, layer in enumerate(spec.pooling.layers if spec.pooling else ()):
        names |= renamed({f"pooler.layers.{number}": layer.name}, layer.bias)
    return names


def read_spec(
    folder: Path, warn: bool = True, drafts: bool = False, pools: bool = False
) -> ModelSpec:
    """The ModelSpec of a checkpoint folder, from its JSON files alone. `warn`: logs keys that are
    not supported; `drafts`: it may be a model that can only draft tokens for another one; `pools`:
    one that makes vectors of texts and draws no tokens. Raises CheckpointError.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; expected a checkpoint folder with config.json and "
            "model.safetensors"
        )
    spec = spec_of(folder, read_json(folder / "config.json"), warn)
    if spec.backbone_size and not drafts:
        raise CheckpointError(
            f"{folder}: {spec.model_type} drafts tokens for another model; name it with "
            "--engine.draft, and that model with --model"
        )
    if spec.pooling and not pools:
        raise CheckpointError(
            f"{folder}: makes vectors of texts and generates none; only `onehead serve` takes it"
        )
    return spec


def spec_of(folder: Path, values: Mapping[str, Any], warn: bool = True) -> ModelSpec:
    """`read_spec` for a folder whose config.json would contain `values`."""
    try:
        config = Config(respelt(values))
        family = family_of(config.get("model_type"))
        packed_groups(config)
        spec: ModelSpec = family.spec_from_config(config)
        pooling = pooling_of(folder, config, spec.hidden_size)
        if spec.bidirectional and pooling is None:
            raise CheckpointError(
                "config.json: use_bidirectional_attention is true, and there is no modules.json, "
                "which says what is made of a text; take the whole folder of the published model"
            )
        # A model that makes vectors has no head, or none that is read.
        spec = replace(
            spec,
            end_token_ids=end_token_ids(folder, config),
            pooling=pooling,
            tied_embeddings=spec.tied_embeddings or bool(pooling),
        )
        _check(spec)
    except CheckpointError as error:
        bare = str(error).startswith(("config.json", "generation_config.json"))
        raise CheckpointError(f"{folder}/{error}" if bare else str(error)) from None
    except RecursionError:
        raise CheckpointError(
            f"{folder / 'config.json'}: objects or lists are nested too deeply"
        ) from None
    if warn:
        _warn(folder, config)
    return spec


def _warn(folder: Path, config: Config) -> None:
    """Logs the keys of a config that have no effect."""
    if config.values.get("auto_map") is not None:
        log.warning(
            "%s: auto_map names code that comes with the checkpoint; it is not run",
            folder / "config.json",
        )
    if unread := config.unread():
        log.warning(
            "%s: keys that onehead does not know and ignores: %s",
            folder / "config.json",
            ", ".join(map(short, unread[:20])),
        )


def _check(spec: ModelSpec) -> None:
    """Raises CheckpointError for a spec that no family can have."""
    inputs = spec.layer_input_vocab_size * spec.num_layers * spec.layer_input_size
    if max(spec.vocab_size * spec.hidden_size, inputs) > MOST_NUMBERS:
        raise CheckpointError(
            f"config.json: a table of {max(spec.vocab_size * spec.hidden_size, inputs)} numbers; "
            f"expected at most {MOST_NUMBERS}"
        )
    for token in spec.end_token_ids:
        if token >= spec.vocab_size:
            raise CheckpointError(
                f"eos_token_id {token} of config.json or generation_config.json, expected below "
                f"vocab_size {spec.vocab_size} of config.json"
            )
