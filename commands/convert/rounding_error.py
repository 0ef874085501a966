"""What weights in 8 bits cost a checkpoint: how far its matrices are from float32's, and its perplexity on held-out text in both.

Knows nothing of how either is served.
"""

import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from commands import corpus
from commands.held_out import comparison_rows, decoder_logits, losses
from model.checkpoint.weights import load_decoder
from model.decoder import Decoder
from model.devices.products import Products
from model.devices.quantized_modules import QuantizedMatrix
from model.spec import ModelSpec

NUM_SEQUENCES = 8


def rounding_errors(folder: Path, spec: ModelSpec, kind: str, data: Path | None, progress: Progress) -> dict[str, Any]:
    """Relative error of the quantized matrices (of their norms, mean and worst), and where the folder has a tokenizer, perplexities."""
    whole, small = (load_decoder(folder, spec, torch.float32, torch.device("cpu"), Products(form)) for form in ("none", kind))
    errors = matrix_errors(whole, small)
    worst = max(errors, key=lambda name: errors[name])
    found: dict[str, Any] = {"mean": sum(errors.values()) / len(errors), "worst_matrix": {"name": worst, "error": errors[worst]}}
    if (folder / "tokenizer.json").is_file():
        tokenizer = corpus.read_tokenizer(folder, spec.vocab_size)
        rows_BU = comparison_rows(corpus.read_documents(data), tokenizer, spec)[:NUM_SEQUENCES]
        task = progress.add_task(f"perplexity in float32 and {kind}", total=2 * len(rows_BU))
        nats = {"float32": 0.0, kind: 0.0}
        with torch.inference_mode():
            for form, decoder in (("float32", whole), (kind, small)):
                for loss in losses(decoder_logits(decoder), rows_BU):
                    nats[form] += loss / len(rows_BU)
                    progress.advance(task)
        tokens = rows_BU.shape[0] * (rows_BU.shape[1] - 1)
        found |= {"tokens": tokens, "perplexity": {form: math.exp(value) for form, value in nats.items()}}
    return found


def matrix_errors(whole: Decoder, small: Decoder) -> dict[str, float]:
    """Name of a quantized module -> the norm of what rounding changed over the norm of its float matrix."""
    errors = {}
    for name, module in small.named_modules():
        if isinstance(module, QuantizedMatrix):
            errors[name] = _relative(whole.get_submodule(name), module)
    return errors


def _relative(whole: nn.Module, small: QuantizedMatrix) -> float:
    weight_OI: Tensor = whole.weight  # type: ignore[assignment]
    difference_OI = small.weight.float() * small.scale[:, None] - weight_OI
    return float(difference_OI.norm() / weight_OI.norm().clamp(min=torch.finfo(torch.float32).tiny))
