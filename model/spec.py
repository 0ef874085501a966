"""ModelSpec: what a decoder is, as data.

A family module turns a checkpoint's config.json into one of these; the decoder is built from it and from nothing else.
Invariant: there is exactly one key/value head. It knows no file names, no tensors and no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class OptionError(ValueError):
    """Options of a tool that do not fit together or do not fit the data; the message names them."""


class CheckpointError(Exception):
    """A checkpoint folder that cannot be served; the message names the file and key, what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions and switches of one decoder. Sizes are counts of elements; `head_dim` is shared by queries, the key and the value."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_epsilon: float
    activation: str
    attention_scale: float
    tied_embeddings: bool
    end_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token occupies over all layers: 2 * layers * head_dim * itemsize."""
        return 2 * self.num_layers * self.head_dim * itemsize


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError where it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`config[key]` as an integer of at least 1; null and absent mean `default`. Raises CheckpointError naming the key."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} must be an integer of at least 1, found {value!r}")
    return value


def positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    """`config[key]` as a number above 0; absent means `default`. Raises CheckpointError naming the key."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a number above 0, found {value!r}")
    return float(value)


def end_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of the end-of-sequence ids in config.json and generation_config.json, sorted."""
    found: set[int] = set()
    sources: dict[str, Mapping[str, Any]] = {"config.json": config}
    if (folder / "generation_config.json").exists():
        sources["generation_config.json"] = read_json(folder / "generation_config.json")
    for name, source in sources.items():
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise CheckpointError(f"{name}: eos_token_id must be an id, a list of ids or null, found {value!r}")
        found.update(ids)
    return tuple(sorted(found))
