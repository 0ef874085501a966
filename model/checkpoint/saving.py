"""Decoder -> checkpoint folder: config.json, safetensors and the manifest of its digests. Serving
does not need it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint.families import weight_names
from model.checkpoint.identity import file_digest
from model.checkpoint.quantization_config import KEY
from model.checkpoint.weights import MANIFEST
from model.decoder import Decoder


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
