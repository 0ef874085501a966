"""Checkpoint folders of random weights, and the GGUF files that llama.cpp's converter makes of such
folders.

Names come from the `gguf` package's own table, and the metadata is written with its GGUFWriter, so
that nothing of what is tested is used.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from commands.saving import save_decoder
from model.checkpoint.families import spec_of
from model.checkpoint.gguf.types import BY_NAME
from model.decoder import meta_decoder

SCALES: dict[str, tuple[int, ...]] = {kind: (0,) for kind in ("Q8_0", "Q4_0", "Q5_0")}
SCALES |= {kind: (0, 2) for kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")} | {"Q6_K": (208,)}
"""Bytes at which each type's float16 scales and minima begin in a block."""
ARCHITECTURES = {
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "llama": gguf.MODEL_ARCH.LLAMA,
}


def make_folder(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Writes a config and random weights for it."""
    decoder = meta_decoder(spec_of(folder, config)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    save_decoder(folder, decoder, torch.float32, config)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    **metadata: Any,
) -> None:
    """Converts a folder's weights, matrices with columns for whole blocks to the type `kind` and
    all others to F32, without the tensors to `leave_out`. `kinds`: other types by what tensors are
    called in their layer (`attn_v`). `metadata`: keys of the architecture to be written besides, or
    in the place of the converter's.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    embeds = bool(config.get("use_bidirectional_attention"))
    if embeds:
        for number in (2, 3):
            dense = load_file(folder / f"{number}_Dense/model.safetensors")["linear.weight"]
            tensors[f"dense_{number}.weight"] = dense
            metadata |= {
                f"dense_{number}_feat_in": dense.shape[1],
                f"dense_{number}_feat_out": dense.shape[0],
            }
        vocabulary = {"vocab_size": config["vocab_size"]}  # Which has no texts in this file.
        metadata |= {"attention.causal": False, "pooling_type": 1} | vocabulary
        metadata["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config["layer_types"]
        ]
    model_type = config["model_type"]
    architecture = gguf.MODEL_ARCH.GEMMA_EMBEDDING if embeds else ARCHITECTURES[model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name)
    if embeds:
        writer.add_tokenizer_model("no_vocab")
    keys = {
        f"{name}.{key}": value
        for key, value in (_METADATA[config["model_type"]](config) | metadata).items()
        if value is not None
    }
    adders: Any = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        adders[type(value)](key, value)
    for tensor, array in _converted(config, tensors, architecture).items():
        if tensor in leave_out:
            continue
        module = tensor.removesuffix(".weight").rpartition(".")[2]
        _add(writer, tensor, np.ascontiguousarray(array), (kinds or {}).get(module, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, array: Any, kind: str) -> None:
    found = gguf.GGMLQuantizationType[kind]
    if array.ndim < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[found][0]:
        found = gguf.GGMLQuantizationType.F32
    written = not found.name.endswith("_K")  # The package reads these and writes none.
    data = gguf.quants.quantize(array, found) if written else random_rows(found.name, *array.shape)
    writer.add_tensor(name, data, raw_dtype=found)


def random_rows(kind: str, num_rows: int, num_columns: int) -> Any:
    """Rows of random bytes in blocks of a type, with small scales."""
    rng, found = np.random.default_rng(num_rows), BY_NAME[kind]
    data = rng.integers(
        0, 256, (num_rows, num_columns // found.block_elements, found.block_bytes), dtype=np.uint8
    )
    for begin in SCALES[kind]:
        scales = rng.uniform(0.0005, 0.002, data.shape[:2]).astype(np.float16)
        data[..., begin : begin + 2] = scales[..., None].view(np.uint8)
    return data.reshape(num_rows, -1)


def _converted(
    config: dict[str, Any], tensors: dict[str, Any], architecture: gguf.MODEL_ARCH
) -> dict[str, Any]:
    """Arrays under their names in a GGUF file, changed as the converter changes them."""
    kind, heads = config["model_type"], config.get("num_attention_heads", 1)
    num_layers = config["n_layer" if "n_layer" in config else "num_hidden_layers"]
    names, found = gguf.get_tensor_name_map(architecture, num_layers), dict[str, Any]()
    for theirs, tensor in tensors.items():
        array = tensor.numpy()
        if kind == "llama" and ".q_proj." in theirs:
            array = _interleaved(array, heads)
        elif kind == "llama" and ".k_proj." in theirs:
            array = _interleaved(array, 1)
        elif kind in ("gemma", "gemma3_text") and theirs.endswith("norm.weight"):
            array = array + np.float32(1)
        found[_name(names, theirs + (".weight" if theirs.endswith("scalar") else ""))] = array
    return found | _factors(config)


def _name(names: gguf.TensorNameMap, theirs: str) -> str:
    if theirs.startswith("dense_"):
        return theirs
    found = names.get_name(theirs, (".weight", ".bias"))
    assert found is not None, theirs
    return found


def _interleaved(array: Any, heads: int) -> Any:
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _factors(config: dict[str, Any]) -> dict[str, Any]:
    """The divisors of rotary frequencies that the converter computes for Llama 3."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        full = rope.get("full_attention", {"partial_rotary_factor": 0.25})
        num_pairs = config["global_head_dim"] // 2
        num_turning = int(full["partial_rotary_factor"] * num_pairs)
        divisors = [full.get("factor", 1.0)] * num_turning + [1e30] * (num_pairs - num_turning)
        return {"rope_freqs.weight": np.array(divisors, np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, context = config["head_dim"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(0, dim, 2):
        turns = context * rope["rope_theta"] ** (-pair / dim) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config.get("max_position_embeddings", config.get("n_positions")),
        "embedding_length": config.get("hidden_size", config.get("n_embd")),
        "block_count": config.get("num_hidden_layers", config.get("n_layer")),
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads", config.get("n_head")),
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    keys: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
        keys |= {
            "rope.scaling.original_context_length": rope.get("original_max_position_embeddings")
        }
    return keys


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    more = {
        "rope.dimension_count": dim,
        "vocab_size": config["vocab_size"],
        "attention.key_length": config.get("head_dim"),
    }
    return _sizes(config) | _rope(config) | more


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    return _sizes(config) | {
        f"attention.{kind}_length": config["head_dim"] for kind in ("key", "value")
    }


def _gemma3(config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(config) | {
        "rope.freq_base": 1e6,
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    rope, keys = config.get("rope_parameters") or {}, dict[str, Any]()
    for suffix, kind, name, base in (
        ("", "full_attention", "global_head_dim", 1e6),
        ("_swa", "sliding_attention", "head_dim", 1e4),
    ):
        keys |= {f"attention.{part}_length{suffix}": config[name] for part in ("key", "value")}
        keys[f"rope.dimension_count{suffix}"] = config[name]
        keys[f"rope.freq_base{suffix}"] = float(rope.get(kind, {}).get("rope_theta", base))
    if config.get("use_double_wide_mlp"):
        size = config["intermediate_size"]
        keys["feed_forward_length"] = [size] * (len(kinds) - shared) + [2 * size] * shared
    return (
        _sizes(config)
        | keys
        | {
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
            "attention.sliding_window": config.get("sliding_window", 512),
            "final_logit_softcapping": config.get("final_logit_softcapping"),
        }
    )


def _starcoder(config: dict[str, Any]) -> dict[str, Any]:
    epsilon = {
        "attention.layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "attention.layer_norm_rms_epsilon": None,
    }
    return (
        _sizes(config)
        | epsilon
        | {"feed_forward_length": config.get("n_inner", 4 * config["n_embd"])}
    )


def _falcon(config: dict[str, Any]) -> dict[str, Any]:
    epsilon = {
        "attention.layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "attention.layer_norm_rms_epsilon": None,
    }
    return (
        _sizes(config)
        | epsilon
        | {"feed_forward_length": 4 * config["hidden_size"], "tensor_data_layout": "jploski"}
    )


_METADATA: dict[str, Any] = {
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "gpt_bigcode": _starcoder,
    "llama": _llama,
}
