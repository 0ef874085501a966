"""What the cache really takes: bytes per token of the allocated pool, slots that hold nothing, and what windowed layers keep
between two steps and hold within one.

    python -m tests.trials.kv_memory [--requests 2000] [--output FILE.json]

Real scheduler, page tables and pools; no model: tokens are invented, time is steps. Prompts and outputs are drawn from U(100, 1024), 64
run at a time in steps of 512 tokens. A slot is wasted while it belongs to a sequence that has no token for it.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache.layout import CacheLayout, pages_for
from cache.pool import KVPool
from model.step import SampledToken, Sampling, StepPlan, StepResult
from server.engine.scheduler import Limits, Scheduler
from server.engine.sequence import Sequence

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides a model's cache."""

    layers: int
    key_dim: int
    value_dim: int
    windows: tuple[int | None, ...] = ()
    value_in_key: bool = False

    @property
    def bytes_per_token(self) -> int:
        """By the formula, in bfloat16."""
        return self.layers * (self.key_dim + (0 if self.value_in_key else self.value_dim)) * 2


def gemma3_windows(layers: int) -> tuple[int | None, ...]:
    """Five layers with a window to one that sees everything."""
    return tuple(None if (layer + 1) % 6 == 0 else 512 for layer in range(layers))


SHAPES = {
    "StarCoderBase-1B": Shape(24, 128, 128),
    "Falcon-7B": Shape(32, 64, 64),
    "Gemma-2B": Shape(18, 256, 256),
    "Gemma-3-270m": Shape(18, 256, 256, gemma3_windows(18)),
    "Gemma-3-1b": Shape(26, 256, 256, gemma3_windows(26)),
    "DeepSeek-V2-Lite": Shape(27, 576, 512, value_in_key=True),
}


def allocated_bytes_per_token(shape: Shape) -> float:
    """Bytes of a pool over the tokens that it has slots for in every layer."""
    layout = CacheLayout.of(shape.layers, shape.windows, PAGE_SIZE)
    dims = shape.key_dim, shape.value_dim
    pages = 3 * layout.pages_per_step
    pool = KVPool.allocate(layout, pages, *dims, torch.bfloat16, torch.device("cpu"), value_in_key=shape.value_in_key)
    return pool.num_bytes / (3 * PAGE_SIZE)


class InventedModel:
    """A token for every row that asks for one."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(None if row.sample is None else SampledToken(7, -1.0) for row in plan.rows))


def history(shape: Shape, num_requests: int, seed: int = 0) -> dict[str, Any]:
    """Runs the requests to their end; the share of owned slots that held no token, and the most pages a window's layers kept."""
    layout = CacheLayout.of(shape.layers, shape.windows, PAGE_SIZE)
    limits = Limits(64 * layout.most_pages(2048, 512), layout, 4096, 64, 512)
    scheduler, model, rng = Scheduler(limits), InventedModel(), random.Random(seed)
    for id in range(num_requests):
        scheduler.submit(id, [1] * rng.randint(100, 1024), rng.randint(100, 1024), Sampling())
    owned_slots = wasted_slots = most_kept = most_in_step = steps = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        most_in_step = max(most_in_step, *(_held(layout, sequence) for sequence in scheduler.running.values()))
        scheduler.commit(plan, model.run(plan))
        steps += 1
        for sequence in scheduler.running.values():
            for group, pages in zip(layout.groups, sequence.table.pages, strict=True):
                if group.window is None:
                    held = len(pages) // group.num_stacks * PAGE_SIZE
                    owned_slots, wasted_slots = owned_slots + held, wasted_slots + held - sequence.num_tokens
            most_kept = max(most_kept, _held(layout, sequence))
    result = {"steps": steps, "preemptions": scheduler.num_preemptions, "wasted": wasted_slots / owned_slots if owned_slots else 0.0}
    if shape.windows:
        window = max(w for w in shape.windows if w is not None)
        result |= {
            "window": window,
            "most_kept_tokens": most_kept,
            "most_within_a_step": most_in_step,
            "bound": (pages_for(window, PAGE_SIZE) + 1) * PAGE_SIZE,
        }
    return result


def _held(layout: CacheLayout, sequence: Sequence) -> int:
    """Slots that a sequence has in its layers with a window."""
    groups = zip(layout.groups, sequence.table.pages, strict=True)
    return max((sum(page >= 0 for page in pages) // g.num_stacks * PAGE_SIZE for g, pages in groups if g.window), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    print(f"{'model':18} {'formula':>8} {'measured':>9} {'wasted':>7}  window layers keep")
    for name, shape in SHAPES.items():
        measured = allocated_bytes_per_token(shape)
        results[name] = {"formula": shape.bytes_per_token, "measured": measured} | history(shape, options.requests)
        row = results[name]
        kept = (
            f"{row['most_kept_tokens']} of {row['window']} + a page = {row['bound']}; {row['most_within_a_step']} within a step"
            if "window" in row
            else ""
        )
        print(f"{name:18} {shape.bytes_per_token:8,} {measured:9,.0f} {row['wasted']:7.2%}  {kept}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
