"""`onehead compare`: counts, measures, and writes results.json and report.html. What is counted and measured is in `arithmetic` and
`timing`, how it looks in `report`; here is only the order of things.
"""

import json
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from model.families import read_spec
from model.tools import arithmetic, report, timing
from model.tools.options import CompareOptions

CONTEXT = 8192


def plan(options: CompareOptions) -> list[tuple[str, Callable[[], Any]]]:
    """(key in the results, what gives its value or one more entry of it), in the order of running."""
    repeats = 3 if options.quick else 9
    batches = (1, 8, 64) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts = (128, 1024) if options.quick else (128, 512, 2048)
    heads = (4, 16) if options.quick else (1, 2, 4, 8, 16, 32)
    steps: list[tuple[str, Callable[[], Any]]] = [("cache", lambda: timing.cache_or_none(96 if options.quick else 1000))]
    for context in contexts:
        for batch in batches:
            if batch * context <= 64 * 2048:  # 1 GiB of multi-head K and V
                steps.append(("decode", lambda b=batch, c=context: timing.decode_step(b, c, repeats)))  # type: ignore[misc]
    steps += [("classes", lambda h=count: timing.classes(h, repeats)) for count in heads]  # type: ignore[misc]
    return steps


def compare(options: CompareOptions) -> None:
    """Runs everything and writes options.output. Raises CheckpointError for a --model that cannot be read."""
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = arithmetic.KNOWN
    if options.model is not None:
        shapes += (arithmetic.shape_of(options.model.resolve().name, read_spec(options.model)),)
    memory = {"seed": arithmetic.seed_tensors(), "models": arithmetic.cache_table(shapes, CONTEXT)}
    results: dict[str, Any] = {"schema": 1, "quick": options.quick, "machine": _machine(), "memory": memory, "decode": [], "classes": []}
    console = Console()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        steps = plan(options)
        task = progress.add_task("comparing", total=len(steps))
        for key, measure in steps:
            progress.update(task, description=key)
            value = measure()
            if key == "cache":
                results[key] = value
            else:
                results[key].append(value)
            progress.advance(task)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.output / "report.html").write_text(report.page(results), encoding="utf-8")
    for summary in _summaries(results):
        console.print(summary)
    console.print(f"{options.output / 'report.html'}")


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor()) if hasattr(torch.cpu, "get_capabilities") else "",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _summaries(results: dict[str, Any]) -> list[Table]:
    """The report's main figures, for the terminal."""
    cache = Table("", "cached s", "uncached s", "ratio", title=f"cache or no cache, {results['cache']['num_tokens']} tokens")
    for name in ("ours", "transformers"):
        if name in results["cache"]:
            side = results["cache"][name]
            cache.add_row(name, f"{side['cached_s']:.2f}", f"{side['uncached_s']:.2f}", f"{side['ratio']:.2f}x")
    decode = Table("batch", "context", "attention", "layer", title="decode, time of MHA over time of MQA")
    for row in results["decode"]:
        decode.add_row(str(row["batch"]), str(row["context"]), f"{row['attention']['ratio']:.1f}x", f"{row['layer']['ratio']:.1f}x")
    classes = Table("heads", "forward", "forward and backward", title="a list of heads over one class")
    for row in results["classes"]:
        classes.add_row(str(row["heads"]), f"{row['forward']['ratio']:.2f}x", f"{row['forward_backward']['ratio']:.2f}x")
    return [cache, decode, classes]
