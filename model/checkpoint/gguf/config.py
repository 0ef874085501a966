"""GGUF metadata -> the config.json that the checkpoint's family reads, as Hugging Face's original
has it.

Invariant: a key that changes what is computed is translated or refused by name; keys of the
architecture that are not known are handed on under their own name, so that they are reported like
unknown keys of a config.json. llama.cpp's reading of the keys is followed, where it and
`transformers` differ too. It imports no torch.
"""

from array import array
from collections.abc import Callable
from typing import Any

from model.checkpoint.config import MOST, Config, short
from model.checkpoint.files import Stored
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.types import table
from model.checkpoint.pooling import IN_FILE, IN_FILE_LAYERS
from model.spec import CheckpointError

EMBEDS = "gemma-embedding"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
SECOND_NORM = "blk.0.attn_norm_2.weight"
"""Tensor that only falcon's newer architecture has."""
FREQUENCIES = "rope_freqs.weight"
"""Tensor that holds no weights, but the divisors of rotary frequencies."""
NOT_TURNING = array("f", [1e30])[0]
"""The divisor of a pair that does not turn."""
LAYER_INPUTS = "per_layer_token_embd.weight"
BASES = {"": 1e6, "_swa": 1e4}
"""Gemma 4's rotary bases where a file does not say them, of layers without and with a window."""
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_HARMLESS = ("rope.scaling.finetuned", "vocab_size")
_NEUTRAL = table("""
rope.scale_linear 1           attention.max_alibi_bias 0         attention.clamp_kqv 0
attention.scale 0             attention.temperature_scale 0      attention.temperature_length 0
attention.causal 1            embedding_scale 0                  residual_scale 0
logit_scale 0                 nextn_predict_layers 0             pooling_type 0
use_parallel_residual 0       rope.scaling.yarn_ext_factor 1     rope.scaling.yarn_attn_factor 1
rope.scaling.attn_factor 1    expert_count 0
""")
"""Keys that change what is computed, with the value that changes nothing; others are refused."""


class Metadata(Config):
    """The keys of an architecture, read by their names after its own and a dot."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.tensors, prefix = gguf.entries, f"{architecture_of(gguf)}."
        own = (key for key in gguf.metadata if key.startswith(prefix))
        values = {key.removeprefix(prefix): gguf.metadata[key] for key in own}
        super().__init__(values, str(gguf.path), prefix)


def architecture_of(gguf: GGUFFile) -> str:
    """The architecture that the metadata name. Raises CheckpointError for one that is not
    served.
    """
    found = gguf.metadata.get("general.architecture")
    if not isinstance(found, str) or found not in _FAMILIES:
        supported = f"supported: {', '.join(_FAMILIES)}"
        raise CheckpointError(f"{gguf.path}: general.architecture is {short(found)}; {supported}")
    return found


def config_of(gguf: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF checkpoint, without ids of tokens. Raises CheckpointError naming
    the file and the key that does not fit.
    """
    general = Config(gguf.metadata, str(gguf.path))
    general.only("general.type", "model", why="expected a model")
    general.only("general.quantization_version", 2, why="expected 2; convert the model again")
    metadata = Metadata(gguf)
    embeds = architecture_of(gguf) == EMBEDS
    others = {"attention.causal": "0", "pooling_type": "1"} if embeds else {}
    for key, neutral in (_NEUTRAL | others).items():
        if (value := metadata.get(key)) is not None and value != int(neutral):
            raise metadata.wrong(key, f"{neutral}: onehead serves no other")
    if EMBEDDING not in metadata.tensors:
        raise CheckpointError(f"{gguf.path}: missing tensor {EMBEDDING}")
    config = _FAMILIES[architecture_of(gguf)](metadata)
    for key in _HARMLESS:
        metadata.get(key)
    dtype = _DTYPES.get(gguf.entries[EMBEDDING].dtype, "float32")
    config |= {"torch_dtype": dtype, "tie_word_embeddings": HEAD not in metadata.tensors}
    for key in metadata.unread():
        value = metadata.values[key]
        plain = isinstance(value, bool | int | float | str)
        config[metadata.prefix + key] = value if plain else list(value)[:8]
    return config


def _sizes(metadata: Metadata) -> dict[str, Any]:
    """The sizes that every architecture has, with its one key/value head checked."""
    heads = metadata.integer("attention.head_count")
    metadata.one_key_value_head("attention.head_count_kv", heads, convertible=False)
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.layers("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": metadata.integer("context_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "vocab_size": metadata.tensors[EMBEDDING].shape[0],
    }


def _rotated(metadata: Metadata, model_type: str) -> dict[str, Any]:
    """A config with a head as wide for keys as for values and rotated whole, and RMS norms."""
    sizes = _sizes(metadata)
    default = max(1, sizes["hidden_size"] // sizes["num_attention_heads"])
    width = _width(metadata, "", default)
    return sizes | {
        "model_type": model_type,
        "num_key_value_heads": 1,
        "head_dim": width,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "rope_parameters": _rotary(metadata, sizes["max_position_embeddings"]),
    }


def _rotary(metadata: Metadata, context: int) -> dict[str, Any]:
    """RoPE's base and scaling as `rope_parameters`."""
    kind = metadata.get("rope.scaling.type") or "none"
    original = metadata.integer("rope.scaling.original_context_length", context)
    rope: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10000.0)}
    if kind == "none":
        metadata.get("rope.scaling.factor")
        return rope | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise metadata.wrong("rope.scaling.type", "one of none, linear, yarn")
    rope |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "linear":
        return rope
    return rope | {
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.integer("attention.sliding_window", 0, least=0):
        raise metadata.wrong("attention.sliding_window", "0: onehead serves no window of a llama")
    config = _rotated(metadata, "llama")
    if FREQUENCIES in metadata.tensors:
        if config["rope_parameters"]["rope_type"] != "default":
            raise metadata.wrong("rope.scaling.type", f"none beside the tensor {FREQUENCIES}")
        # The same divisors within the original context and beyond.
        config["rope_parameters"] |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": config["max_position_embeddings"],
            "attention_factor": 1.0,
            "factor": 1.0,
            "short_factor": (factors := _floats(metadata.tensors[FREQUENCIES])),
            "long_factor": factors,
        }
    return config | {"mlp_bias": "blk.0.ffn_up.bias" in metadata.tensors, "hidden_act": "silu"}


def _floats(stored: Stored) -> list[float]:
    if stored.dtype != "F32":
        raise CheckpointError(f"{stored.path}: {stored.name} is {stored.dtype}, expected F32")
    values = array("f", bytes(stored.num_bytes))
    stored.read(memoryview(values).cast("B"))
    return values.tolist()


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return _rotated(metadata, "gemma") | {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Windowed layers have a rotary base of their own and no scaling, as llama.cpp has it."""
    config = _rotated(metadata, "gemma3_text")
    window = metadata.integer("attention.sliding_window", 0, least=0)
    base = metadata.number("rope.freq_base_swa", 10000.0)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[key] = _positive(metadata, key)
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
        "layer_types": _layer_types(metadata, config["num_hidden_layers"], window),
        "sliding_window": window or 1,
    }


def _gemma_embedding(metadata: Metadata) -> dict[str, Any]:
    """Gemma 3's, bidirectional, with the mean of the states and two linear layers after it."""
    if missing := [
        name for name in ("dense_2.weight", "dense_3.weight") if name not in metadata.tensors
    ]:
        raise CheckpointError(
            f"{metadata.path}: missing tensor {missing[0]}: its vectors would not be those of the "
            "published model; convert it with --sentence-transformers-dense-modules"
        )
    return _gemma3(metadata) | {
        "use_bidirectional_attention": True,
        IN_FILE: {key: metadata.integer(key) for keys in IN_FILE_LAYERS.values() for key in keys},
    }


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    """Layers with full attention have wider heads, of which a tensor says which pairs turn."""
    num_layers = metadata.layers("block_count")
    heads, mlps = (
        _each(metadata, key, num_layers)
        for key in ("attention.head_count_kv", "feed_forward_length")
    )
    num_shared = metadata.integer("attention.shared_kv_layers", 0, least=0, most=num_layers - 1)
    is_double = mlps[-1] == 2 * mlps[0]
    if mlps != [
        mlps[0] * (1 + (is_double and i >= num_layers - num_shared)) for i in range(num_layers)
    ]:
        shared = f"the same in all layers, or doubled in the last {num_shared}"
        raise metadata.wrong("feed_forward_length", shared)
    alike = {"attention.head_count_kv": max(heads), "feed_forward_length": mlps[0]}
    metadata.values = {**metadata.values, **alike}
    widths = [_width(metadata, suffix) for suffix in ("", "_swa")]
    inputs = metadata.tensors.get(LAYER_INPUTS)
    bases = [metadata.number(f"rope.freq_base{suffix}", base) for suffix, base in BASES.items()]
    return _sizes(metadata) | {
        "model_type": "gemma4_text",
        "num_key_value_heads": 1,
        "head_dim": widths[1],
        "global_head_dim": widths[0],
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": metadata.integer(
            "embedding_length_per_layer_input", 0, least=0
        ),
        "vocab_size_per_layer_input": None if inputs is None else inputs.shape[0],
        "final_logit_softcapping": _positive(metadata, "final_logit_softcapping"),
        "sliding_window": (window := metadata.integer("attention.sliding_window")),
        "layer_types": _layer_types(metadata, num_layers, window),
        "rope_parameters": {
            "full_attention": {"rope_theta": bases[0]} | _turning(metadata, widths[0] // 2),
            "sliding_attention": {"rope_type": "default", "rope_theta": bases[1]},
        },
    }


def _positive(metadata: Metadata, key: str) -> float | None:
    """A number above 0; None where there is none or it is 0."""
    return None if metadata.get(key) in (None, 0) else metadata.number(key)


def _each(metadata: Metadata, key: str, count: int) -> list[int]:
    """An integer above 0 of each of so many layers, which are listed unless they are the same."""
    value = metadata.get(key)
    if not isinstance(value, list | array):
        return [metadata.integer(key)] * count
    found = list(value)
    if len(found) != count or not all(type(each) is int and 0 < each <= MOST for each in found):
        raise metadata.wrong(key, f"an integer of at least 1, or {count} of them")
    return found


def _width(metadata: Metadata, suffix: str, default: int | None = None) -> int:
    """Columns of a head, the same of keys and values, which are rotated whole. `suffix`: of the
    keys, by the kind of layer.
    """
    width = metadata.columns(f"attention.key_length{suffix}", default)
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if metadata.columns(key, width) != width:
            served = "onehead serves keys and values of one width, rotated whole"
            raise metadata.wrong(key, f"attention.key_length{suffix}, {width}: {served}")
    return width


def _turning(metadata: Metadata, num_pairs: int) -> dict[str, Any]:
    """Which pairs of a head turn: those whose frequency is not divided by a number beyond any."""
    if FREQUENCIES not in metadata.tensors:
        return {"rope_type": "default"}
    divisors = _floats(metadata.tensors[FREQUENCIES])
    turning = [each for each in divisors if 0 < each < NOT_TURNING]
    rest = [NOT_TURNING] * (num_pairs - len(turning))
    if not turning or divisors != [turning[0]] * len(turning) + rest:
        expected = f"one divisor for the first of {num_pairs} pairs, {NOT_TURNING:g} for the others"
        raise CheckpointError(f"{metadata.path}: {FREQUENCIES} must have {expected}")
    # Half a pair more, so that a share that is no binary fraction is not rounded down.
    share = min(1.0, (len(turning) + 0.5) / num_pairs)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "factor": turning[0]}


def _layer_types(metadata: Metadata, num_layers: int, window: int) -> list[str]:
    """The kind of each layer: by a list of booleans that are true for a window, or with full
    attention in every n-th layer.
    """
    key = "attention.sliding_window_pattern"
    pattern = metadata.get(key)
    if pattern is None or type(pattern) is int:
        every = metadata.integer(key, 6)
        pattern = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif isinstance(pattern, str | float | bool) or len(pattern) != num_layers:
        raise metadata.wrong(key, f"a number of layers or {num_layers} booleans")
    return ["sliding_attention" if window and found else "full_attention" for found in pattern]


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    sizes = _sizes(metadata)
    return sizes | {
        "model_type": "gpt_bigcode",
        "n_inner": sizes.pop("intermediate_size"),
        "multi_query": True,
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_pytorch_tanh",
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("tensor_data_layout") not in (None, "jploski"):
        raise metadata.wrong("tensor_data_layout", "jploski")
    sizes = _sizes(metadata)
    rope = _rotary(metadata, sizes["max_position_embeddings"])
    return sizes | {
        "model_type": "falcon",
        "ffn_hidden_size": sizes.pop("intermediate_size"),
        "new_decoder_architecture": SECOND_NORM in metadata.tensors,
        "num_kv_heads": 1,
        "multi_query": True,
        "parallel_attn": True,
        "bias": "blk.0.attn_qkv.bias" in metadata.tensors,
        "activation": "gelu",
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "rope_parameters": rope,
    }


_FAMILIES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "falcon": _falcon,
    "gemma": _gemma,
    EMBEDS: _gemma_embedding,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama": _llama,
    "starcoder": _starcoder,
}
