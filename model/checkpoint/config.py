"""config.json and its neighbours, read strictly: every key is read with its type and bounds, and
errors name the key.

Invariant: keys that were never read are known (`unread`), so that they can be reported. It knows no
family and no torch.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoint.files import MOST_CONFIG_BYTES, read_object
from model.spec import CheckpointError

NAME = "config.json"
MOST = 2**31 - 1
# More than any published checkpoint has, and small enough that a malicious config costs neither
# time nor memory.
MOST_LAYERS, MOST_COLUMNS = 1024, 8192
# Keys that do not affect serving: provenance, training, and how transformers itself runs a model.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class
_commit_hash _experts_implementation _experts_implementation_internal _flash_attn_2_enabled
_from_model_config _model_name_or_path _name_or_path _sliding_window_pattern
apply_residual_connection_post_layernorm architectures attention_dropout attention_softmax_in_fp32
attn_implementation attn_pdrop auto_map bos_token_id cache_implementation chunk_size_feed_forward
cls_token_id dtype embd_pdrop embedding_initializer_range eos_token_id finetuning_task
gradient_checkpointing hidden_dropout id2label inference_runner initializer_range is_decoder
is_encoder_decoder label2id max_batch_size max_length max_sequence_length model_type num_labels
onehead_conversion output_attentions output_hidden_states output_past output_router_logits
output_scores pad_key_length pad_token_id pre_allocate_kv_cache pretraining_tp problem_type
qk_head_dim resid_pdrop return_dict return_dict_in_generate scale_attention_softmax_in_fp32
sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj task_specific_params tf_legacy_loss tie_encoder_decoder tie_word_embeddings
tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache validate_runner_input
"""
HARMLESS = frozenset(_HARMLESS.split())


def read_json(path: Path, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError where it is missing, unreadable, too large
    or not an object.
    """
    value = read_object(path, most)
    if value is None:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder needs it")
    return value


def short(value: object) -> str:
    """A value, shortened for a message, however large or deeply nested it is."""
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0; booleans are not numbers."""
    return isinstance(value, int | float) and value is not True and 0 < value < 1e30


class Config:
    """The keys of one JSON object, called `path` in messages, where `prefix` is put before the
    keys. Every method raises CheckpointError naming the key.
    """

    def __init__(self, values: Mapping[str, Any], path: str = NAME, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix
        self._read: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> "Config":
        """The object in a JSON file, as `read_json` reads it."""
        return cls(read_json(path), str(path))

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for a key whose value is not as expected."""
        found = f"found {short(self.values[key])}" if key in self.values else "and is missing"
        return CheckpointError(f"{self.path}: {self.prefix}{key} must be {expected}, {found}")

    def get(self, key: str) -> Any:
        """The value of any type; None if there is none."""
        self._read.add(key)
        return self.values.get(key)

    def unread(self) -> list[str]:
        """Keys with a value that were not read and are not known to be harmless."""
        return sorted(
            key
            for key, value in self.values.items()
            if value is not None and key not in self._read | HARMLESS
        )

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        """An integer from `least` to `most`; null and absent mean `default`, which has to be in
        range too.
        """
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            bounds = (
                f"an integer of at least {least}"
                if most == MOST
                else f"an integer from {least} to {most}"
            )
            raise self.wrong(
                key,
                bounds
                if value is self.values.get(key)
                else f"{bounds}; by default it would be {value}",
            )
        return value

    def optional(self, key: str, default: int) -> int | None:
        """An integer of at least 1; absent means `default`, and null means None."""
        return None if key in self.values and self.get(key) is None else self.integer(key, default)

    def layers(self, key: str) -> int:
        """A number of layers."""
        return self.integer(key, most=MOST_LAYERS)

    def columns(self, key: str, default: int | None = None) -> int:
        """A number of columns, as of a head."""
        return self.integer(key, default, most=MOST_COLUMNS)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; null and absent mean `default`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive(value):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` numbers above 0."""
        value = self.get(key)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(map(_is_positive, value)):
            raise self.wrong(key, f"a list of {count} numbers above 0")
        return [float(v) for v in value]

    def flag(self, key: str, default: bool) -> bool:
        """true or false; null and absent mean `default`."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def choice(self, key: str, ours: Mapping[str, str], default: str) -> str:
        """`ours[value]`; null and absent mean the value `default`."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in ours:
            raise self.wrong(key, f"one of {', '.join(sorted(ours))}")
        return ours[value]

    def only(self, key: str, *values: Any, why: str) -> None:
        """Raises CheckpointError for any value but these; null and absent are allowed."""
        value = self.get(key)
        if value is not None and not any(
            value is v or (type(value) is type(v) and value == v) for v in values
        ):
            raise CheckpointError(f"{self.path}: {key} is {short(value)}; {why}")

    def one_key_value_head(self, key: str, default: int, convertible: bool = True) -> None:
        """Raises CheckpointError for any number of key/value heads but 1."""
        if (found := self.integer(key, default)) != 1:
            way_out = "; `onehead convert` can pool several into one" if convertible else ""
            head = f"onehead serves one key/value head{way_out}"
            raise CheckpointError(f"{self.path}: {self.prefix}{key} is {found}, expected 1: {head}")

    def sub(self, key: str) -> "Config | None":
        """The object under a key; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Config(value, f"{self.path}: {key}")


def end_token_ids(folder: Path, config: Config) -> tuple[int, ...]:
    """The union of the end-of-sequence ids in config.json and generation_config.json, sorted."""
    found: set[int] = set()
    name = "generation_config.json"
    generation = Config(read_object(folder / name, MOST_CONFIG_BYTES) or {}, name)
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise source.wrong("eos_token_id", "an id, a list of ids or null")
        found.update(ids)
    return tuple(sorted(found))
