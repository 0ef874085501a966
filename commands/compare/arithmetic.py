"""Bytes, by counting: the tensors of the seed's walk-through, and the key/value cache of known models as MHA and as MQA. No clock.

Shape letters of the walk-through: N mini-batch, h heads, S queries, L keys, d_k head size.
"""

from dataclasses import asdict, dataclass
from typing import Any

from model.spec import ModelSpec

FLOAT32 = 4
SEED_SIZES = {"N": 16, "h": 4, "S": 99, "L": 99, "d_k": 512}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides a model's cache: layers, query heads, head size. `itemsize` bytes a number, 2 for bfloat16."""

    name: str
    num_layers: int
    num_query_heads: int
    head_dim: int
    itemsize: int = 2

    def bytes_per_token(self, num_kv_heads: int) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * num_kv_heads * self.head_dim * self.itemsize


KNOWN: tuple[CacheShape, ...] = (
    CacheShape("StarCoderBase-1B", num_layers=24, num_query_heads=16, head_dim=128),
    CacheShape("StarCoder", num_layers=40, num_query_heads=48, head_dim=128),
    CacheShape("Falcon-7B", num_layers=32, num_query_heads=71, head_dim=64),
    CacheShape("Gemma-2B", num_layers=18, num_query_heads=8, head_dim=256),
)


def shape_of(name: str, spec: ModelSpec) -> CacheShape:
    """The cache shape of a checkpoint."""
    return CacheShape(name, spec.num_layers, spec.num_query_heads, spec.head_dim)


def seed_tensors() -> dict[str, dict[str, dict[str, Any]]]:
    """The walk-through's tensors by its own names, in its three parts; megabytes are 10^6 bytes of float32."""
    n, h, s, length, d = (SEED_SIZES[key] for key in ("N", "h", "S", "L", "d_k"))
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


def cache_table(shapes: tuple[CacheShape, ...], context: int) -> list[dict[str, Any]]:
    """Bytes per token and per sequence of `context` tokens, with one key/value head and with one per query head."""
    rows = []
    for shape in shapes:
        multi_query, multi_head = shape.bytes_per_token(1), shape.bytes_per_token(shape.num_query_heads)
        rows.append(
            asdict(shape)
            | {
                "context": context,
                "mqa_bytes_per_token": multi_query,
                "mha_bytes_per_token": multi_head,
                "mqa_bytes_per_sequence": multi_query * context,
                "mha_bytes_per_sequence": multi_head * context,
                "ratio": multi_head / multi_query,
            }
        )
    return rows
