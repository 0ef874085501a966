"""What the cache really takes: bytes per token of the allocated pool, slots that hold nothing, and
what windowed layers keep between two steps and hold within one.

    python -m tests.trials.kv_memory [--requests 2000] [--output FILE.json]

Real scheduler, page tables and pools; no model: tokens are invented, time is steps. Prompts and
outputs are drawn from U(100, 1024), 64 run at a time in steps of 512 tokens. A slot is wasted while
it belongs to a sequence that has no token for it.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from cache.layout import CacheLayout, pages_for
from cache.pool import KVPool
from model.checkpoint.families import read_spec
from model.kv_layout import layout_of
from model.spec import ModelSpec
from model.step import SampledToken, Sampling, StepPlan, StepResult
from server.engine.scheduler import Limits, Scheduler
from server.engine.sequence import Sequence
from tests.support.immediate import Immediate
from tests.support.paths import MODELS
from tests.support.submitting import submit

PAGE_SIZE = 64


NAMES = (
    "starcoderbase-1b",
    "falcon-7b",
    "gemma-2b",
    "gemma-3-270m",
    "gemma-3-1b",
    "gemma-4-e2b",
    "deepseek-v2-lite",
)
SPECS = {name: read_spec(MODELS / name) for name in NAMES}


def allocated_bytes_per_token(spec: ModelSpec) -> float:
    """Bytes of a pool over the tokens that it has slots for in every layer."""
    layout = layout_of(spec, PAGE_SIZE)
    pages = 3 * layout.pages_per_block
    pool = KVPool.allocate(layout, pages, torch.bfloat16, torch.device("cpu"))
    return pool.num_bytes / (3 * PAGE_SIZE)


class InventedModel(Immediate):
    """A token for every row that asks for one."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(
            tuple(None if row.sample is None else SampledToken(7, -1.0) for row in plan.rows)
        )


def history(spec: ModelSpec, num_requests: int, seed: int = 0) -> dict[str, Any]:
    """Runs the requests to their end; the share of owned slots that held no token, and the most
    pages a window's layers kept.
    """
    layout = layout_of(spec, PAGE_SIZE)
    limits = Limits(64 * layout.most_pages(2048, 512), layout, 4096, 64, 512)
    scheduler, model, rng = Scheduler(limits), InventedModel(), random.Random(seed)
    for id in range(num_requests):
        submit(scheduler, id, [1] * rng.randint(100, 1024), rng.randint(100, 1024), Sampling())
    owned_slots = wasted_slots = most_kept = most_in_step = steps = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        most_in_step = max(
            most_in_step, *(_held(layout, sequence) for sequence in scheduler.running.values())
        )
        scheduler.commit(plan, model.run(plan))
        steps += 1
        for sequence in scheduler.running.values():
            for group, pages in zip(layout.groups, sequence.table.pages, strict=True):
                if group.window is None:
                    held = len(pages) // group.num_stacks * PAGE_SIZE
                    owned_slots = owned_slots + held
                    wasted_slots = wasted_slots + held - sequence.num_tokens
            most_kept = max(most_kept, _held(layout, sequence))
    result = {
        "steps": steps,
        "preemptions": scheduler.num_preemptions,
        "wasted": wasted_slots / owned_slots if owned_slots else 0.0,
    }
    if spec.windows:
        window = max(w for w in spec.windows if w is not None)
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
    return max(
        (
            sum(page >= 0 for page in pages) // g.num_stacks * PAGE_SIZE
            for g, pages in groups
            if g.window
        ),
        default=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    print(f"{'model':18} {'formula':>8} {'measured':>9} {'wasted':>7}  window layers keep")
    for name, spec in SPECS.items():
        measured, formula = allocated_bytes_per_token(spec), spec.kv_bytes_per_token(2)
        results[name] = {"formula": formula, "measured": measured} | history(spec, options.requests)
        row = results[name]
        kept = (
            f"{row['most_kept_tokens']} of {row['window']} + a page = {row['bound']}; "
            f"{row['most_within_a_step']} within a step"
            if "window" in row
            else ""
        )
        print(f"{name:18} {formula:8,} {measured:9,.0f} {row['wasted']:7.2%}  {kept}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
