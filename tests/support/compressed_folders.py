"""Checkpoint folders with weights packed to 4 bits by the definition of compressed-tensors'
pack-quantized, and their twins in float32.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families import llama_like
from tests.support.gguf_models import make_folder

CONFIG = llama_like(
    "gemma3_text", 128, 4, 3, 310, 256, head_dim=64, sliding_window=16, query_pre_attn_scalar=64
)
TABLE = "model.embed_tokens.weight"


def described(size: int, symmetric: bool, **changes: Any) -> dict[str, Any]:
    """A quantization_config. `changes`: of the weights' keys."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "group_size": size,
        "strategy": "group",
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights | {"actorder": None} | changes,
        "input_activations": None,
        "output_activations": None,
    }
    top: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }
    return top | {
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def words(numbers_RC: Tensor) -> Tensor:
    """Numbers from 0 to 15, eight of a row in a word of 32 bits, the first in the lowest; the last
    word is filled with 0.
    """
    padded_RC = torch.nn.functional.pad(numbers_RC.long(), (0, -numbers_RC.shape[1] % 8))
    sums_RC = (padded_RC.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(sums_RC < 2**31, sums_RC, sums_RC - 2**32).to(torch.int32)


def make_compressed(
    folder: Path,
    twin: Path,
    size: int = 32,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    packs_table: bool = False,
) -> None:
    """Writes a random checkpoint with packed linear layers into `folder`, and the same numbers in
    float32 into `twin`.
    """
    make_folder(twin, CONFIG)
    generator = torch.Generator().manual_seed(1)
    plain = load_file(twin / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, weight in plain.items():
        if weight.ndim < 2 or (name == TABLE and not packs_table):
            plain[name] = weight.to(dtype).float()
            packed[name] = weight.to(dtype)
            continue
        rows, columns = weight.shape
        numbers_RC = torch.randint(0, 16, (rows, columns), generator=generator)
        scale_RG = (0.02 + 0.05 * torch.rand(rows, columns // size, generator=generator)).to(dtype)
        zero_RG = (
            torch.full(scale_RG.shape, 8)
            if symmetric
            else torch.randint(0, 16, scale_RG.shape, generator=generator)
        )
        plain[name] = (
            (numbers_RC.unflatten(1, (-1, size)) - zero_RG[..., None]) * scale_RG.float()[..., None]
        ).flatten(1)
        packed |= {
            f"{name}_packed": words(numbers_RC),
            f"{name}_scale": scale_RG,
            f"{name}_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            packed[f"{name}_zero_point"] = words(zero_RG.T).T.contiguous()
    (twin / "SHA256SUMS").unlink()
    folder.mkdir()
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = CONFIG | {"dtype": "bfloat16", "quantization_config": described(size, symmetric)}
    (folder / "config.json").write_text(json.dumps(config))
