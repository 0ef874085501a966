"""Bytes, counted: the tensors of a tutorial on multi-query attention, and the KV cache of models as MHA and as MQA. No clock.

The tutorial is 01_MHA_vs_MQA.ipynb of github.com/shahabday/DSR-LLMQuantization. How many bytes a token takes is computed by ModelSpec
alone. Shape letters of the tutorial: N mini-batch, h heads, S queries, L keys, d_k head size.
"""

from pathlib import Path
from typing import Any

from model.spec import ModelSpec

BFLOAT16, FLOAT32 = 2, 4
TUTORIAL_SIZES = {"N": 16, "h": 4, "S": 99, "L": 99, "d_k": 512}
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Folders with the config.json of published checkpoints."""
TABLE = ("starcoderbase-1b", "starcoder", "falcon-7b", "gemma-2b")
"""Those among them that every report shows."""


def tutorial_tensors() -> dict[str, dict[str, dict[str, Any]]]:
    """The tutorial's tensors by its own names, in its three parts; megabytes are 10^6 bytes of float32."""
    n, h, s, length, d = (TUTORIAL_SIZES[key] for key in ("N", "h", "S", "L", "d_k"))
    parts = {
        "multi_head": {
            "K": (n, h, length, d),
            "V": (n, h, length, d),
            "Q": (n, h, s, d),
            "logits": (n, h, s, length),
            "attn_out": (n, h, s, d),
        },
        "multi_head_cached": {
            "K": (n, h, length + 1, d),
            "V": (n, h, length + 1, d),
            "Q_incr": (n, h, 1, d),
            "logits": (n, h, 1, length + 1),
            "attn_out": (n, h, 1, d),
        },
        "multi_query_cached": {
            "K_single": (n, 1, length, d),
            "V_single": (n, 1, length, d),
            "Q_incr": (n, h, 1, d),
            "logits": (n, h, 1, length),
            "attn_out": (n, h, 1, d),
        },
    }
    return {part: {name: _tensor(shape) for name, shape in tensors.items()} for part, tensors in parts.items()}


def _tensor(shape: tuple[int, ...]) -> dict[str, Any]:
    elements = 1
    for size in shape:
        elements *= size
    return {"shape": list(shape), "megabytes": elements * FLOAT32 / 1e6}


def cache_table(models: dict[str, ModelSpec], context: int) -> list[dict[str, Any]]:
    """Bytes in bfloat16 of a token and of a sequence of `context` tokens, with one key/value head and with one per query head."""
    rows = []
    for name, spec in models.items():
        multi_query, multi_head = spec.kv_bytes_per_token(BFLOAT16), spec.multi_head_bytes_per_token(BFLOAT16)
        rows.append(
            {
                "name": name,
                "num_layers": spec.num_layers,
                "num_query_heads": spec.num_query_heads,
                "head_dim": spec.head_dim,
                "itemsize": BFLOAT16,
                "context": context,
                "mqa_bytes_per_token": multi_query,
                "mha_bytes_per_token": multi_head,
                "mqa_bytes_per_sequence": multi_query * context,
                "mha_bytes_per_sequence": multi_head * context,
                "ratio": multi_head / multi_query,
            }
        )
    return rows
