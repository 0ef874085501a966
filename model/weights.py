"""Safetensors <-> Decoder. Every missing, unexpected or misshapen tensor is an error that names it.

Knows files and names; knows nothing of families beyond the name table it is handed.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.decoder import Decoder
from model.families import family_of
from model.spec import CheckpointError, ModelSpec, read_json

# Buffers that older checkpoints carry beside their parameters: causal masks, which a decoder computes.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias")
# The head of a tied checkpoint is the embedding; some files carry it a second time.
TIED_DUPLICATE = "lm_head.weight"


def load_decoder(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder of a checkpoint folder with its weights in `dtype` on `device`. Raises CheckpointError."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    expected = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    ours_by_theirs = {theirs: ours for ours, theirs in family_of(spec.model_type).weight_names(spec).items()}
    state: dict[str, Tensor] = {}
    for theirs, tensor in _tensors(folder):
        ours = ours_by_theirs.get(theirs)
        if ours is None:
            if theirs.endswith(IGNORED_SUFFIXES) or (theirs == TIED_DUPLICATE and spec.tied_embeddings):
                continue
            raise CheckpointError(f"{folder}: unexpected tensor {theirs}; a {spec.model_type} of this config has none of that name")
        if tensor.shape != expected[ours]:
            raise CheckpointError(f"{folder}: {theirs} has shape {list(tensor.shape)}, expected {list(expected[ours])}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{folder}: {theirs} has dtype {tensor.dtype}, expected a floating point one")
        state[ours] = tensor.to(device=device, dtype=dtype)
    missing = [theirs for theirs, ours in ours_by_theirs.items() if ours not in state]
    if missing:
        raise CheckpointError(f"{folder}: missing tensor {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    decoder.load_state_dict(state, assign=True)
    return decoder.requires_grad_(False).eval()


def save_decoder(folder: Path, decoder: Decoder, dtype: torch.dtype, extra_config: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors, in the layout of the decoder's own family."""
    import json

    family = family_of(decoder.spec.model_type)
    names = family.weight_names(decoder.spec)
    tensors = {names[ours]: value.detach().to("cpu", dtype).contiguous() for ours, value in decoder.named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # The library leaves it to its owner alone; a server may run as someone else.
    config = family.config_from_spec(decoder.spec) | {"dtype": str(dtype).removeprefix("torch.")} | extra_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the folder's safetensors files, each name once."""
    seen: set[str] = set()
    with ExitStack() as stack:
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in seen:
                    raise CheckpointError(f"{path}: tensor {name} occurs in two files")
                seen.add(name)
                yield name, file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that the index lists, or the single one."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index_path}: {name!r} is not a plain file name")
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.gguf") for p in folder.glob(pattern))
            hint = f"; found {others[0]}, which is not read: convert it to safetensors first" if others else ""
            raise CheckpointError(f"{path}: no such file{hint}")
    return paths
