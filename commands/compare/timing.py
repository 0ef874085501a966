"""Seconds, by measuring: a decode step of multi-head against multi-query attention.

Two sides of a comparison are timed in turn within one run, several times, and reported as medians
with their range: machines are noisy, ratios less so. It knows nothing of files or pages.

Shape letters: b batch, d model size, h heads, k head size.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

PAPER = {"d": 1024, "h": 8, "k": 128, "mha_ff": 4096, "mqa_ff": 5440}
"""The paper's decoder layer; the multi-query one's MLP is widened so that both have equally many
parameters."""


def in_turn(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Each side `repeats` times, alternating, after one unmeasured run: median, least and most
    seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()
    for _ in range(repeats):
        for name, work in sides.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {
        name: {"median_s": statistics.median(t), "min_s": min(t), "max_s": max(t)}
        for name, t in times.items()
    }


@torch.inference_mode()
def decode_step(batch: int, context: int, repeats: int) -> dict[str, Any]:
    """Seconds of one decode step of the paper's layer at this batch and context, MHA and MQA:
    attention alone, and the whole layer.
    """
    d, h, k = PAPER["d"], PAPER["h"], PAPER["k"]
    x_bd = torch.randn(batch, d)
    q_bhk = torch.randn(batch, h, k)
    kv = {
        name: torch.randn(2, batch, heads, context, k) for name, heads in (("mha", h), ("mqa", 1))
    }
    weights = {
        name: _layer_weights((h + 2 * heads) * k, PAPER[f"{name}_ff"])
        for name, heads in (("mha", h), ("mqa", 1))
    }

    def attention(name: str) -> torch.Tensor:
        # With one head the queries are rows over the same keys; with h, each has keys of its own.
        q = q_bhk[:, None] if name == "mqa" else q_bhk[:, :, None]
        return F.scaled_dot_product_attention(q, kv[name][0], kv[name][1])

    def layer(name: str) -> torch.Tensor:
        qkv, out, up, down = weights[name]
        F.linear(x_bd, qkv)
        y_bd = x_bd + F.linear(attention(name).reshape(batch, h * k), out)
        return y_bd + F.linear(F.relu(F.linear(y_bd, up)), down)

    result: dict[str, Any] = {"batch": batch, "context": context}
    for part, work in (("attention", attention), ("layer", layer)):
        times = in_turn({name: partial(work, name) for name in ("mha", "mqa")}, repeats)
        result[part] = times | {"ratio": times["mha"]["median_s"] / times["mqa"]["median_s"]}
    for name in ("mha", "mqa"):
        result[f"{name}_kv_bytes"] = kv[name].nbytes
        result[f"{name}_weight_bytes"] = sum(weight.nbytes for weight in weights[name])
    return result


def _layer_weights(qkv_rows: int, ff: int) -> tuple[torch.Tensor, ...]:
    """(qkv, out, up, down) of one layer of the paper's, random."""
    d, width = PAPER["d"], PAPER["h"] * PAPER["k"]
    return torch.randn(qkv_rows, d), torch.randn(d, width), torch.randn(ff, d), torch.randn(d, ff)
