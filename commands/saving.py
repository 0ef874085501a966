"""Decoder -> checkpoint folder: config.json, safetensors and the manifest of its digests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint.families import weight_names
from model.checkpoint.fields import ACTIVATIONS
from model.checkpoint.identity import file_digest
from model.checkpoint.quantization_config import KEY
from model.checkpoint.weights import MANIFEST
from model.decoder import Decoder
from model.spec import ModelSpec


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A gpt_bigcode's config.json, of which `transformers` and we make the same model again."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == spec.activation)
    ends = spec.end_token_ids
    return {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "multi_query": True,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_query_heads,
        "n_inner": spec.intermediate_size,
        "activation_function": activation,
        "layer_norm_epsilon": spec.norm_epsilon,
        "scale_attn_weights": spec.attention_scale != 1.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": ends[0] if ends else None,
        "eos_token_id": list(ends) if len(ends) > 1 else ends[0] if ends else None,
    }


def save_decoder(
    folder: Path, decoder: Decoder, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    """Writes `config` as config.json, and model.safetensors in the layout of the decoder's family
    with its manifest.
    """
    parameters = dict(decoder.named_parameters())
    tensors = {}
    for ours, parts in weight_names(decoder.spec).items():
        value = parameters[ours].detach().to("cpu", dtype)
        for part, piece in zip(
            parts, value.split([part.rows or len(value) for part in parts]), strict=True
        ):
            tensors[part.name] = (piece.T if part.transposed else piece).contiguous()
    write_checkpoint(folder, tensors, config | {"dtype": str(dtype).removeprefix("torch.")})


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes config.json, model.safetensors and its manifest. The config's `quantization_config` is
    left out, as these tensors are not packed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes it readable by its owner only; a server may run as another user.
    path.chmod(0o644)
    (folder / MANIFEST).write_text(f"{file_digest(path)}  {path.name}\n", encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != KEY}, indent=2) + "\n",
        encoding="utf-8",
    )
