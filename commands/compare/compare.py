"""`onehead compare`: counts, measures, trains, prints tables and writes results.json.

What is measured is in `timing`, trained in `twins`; here is the order of things, and the bytes,
which ModelSpec counts. docs/compare.md describes results.json.
"""

import json
import math
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from commands.compare import timing, twins
from commands.options import CompareOptions
from commands.progress import progress
from commands.train.state import make_folder
from model.checkpoint.families import read_spec

CONTEXT, BFLOAT16 = 8192, 2
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Folders with the config.json of published checkpoints."""
TABLE = ("starcoderbase-1b", "starcoder", "falcon-7b", "gemma-2b")
"""Those among them that every report shows."""
Say = Callable[[str], None]
"""Reports the progress of a long measurement."""
Measure = Callable[[Say], Any]


def plan(options: CompareOptions) -> list[tuple[str, Measure]]:
    """(key in the results, what gives its value or one more entry of it), in the order of
    running.
    """
    repeats = 3 if options.quick else 9
    batches = (1, 8, 64) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts = (128, 1024) if options.quick else (128, 512, 2048)
    steps: list[tuple[str, Measure]] = []
    for context in contexts:
        for batch in batches:
            if batch * context <= 64 * 2048:  # 1 GiB of multi-head K and V
                step = partial(_decode_step, batch, context, repeats)
                steps.append(("decode", step))
    sizes = _twin_sizes(options)
    for seed in range(sizes.num_seeds):
        steps += [("quality", partial(_twin, sizes, kind, seed, options)) for kind in twins.KINDS]
    return steps


def _decode_step(batch: int, context: int, repeats: int, say: Say) -> Any:
    return timing.decode_step(batch, context, repeats)


def _twin_sizes(options: CompareOptions) -> twins.TwinSizes:
    return twins.QUICK if options.quick else twins.FULL


def _twin(
    sizes: twins.TwinSizes, kind: str, seed: int, options: CompareOptions, say: Say
) -> dict[str, Any]:
    say(f"{kind}, seed {seed}, reading the corpus")
    result: dict[str, Any] = {}
    folder = options.output / "twins" / f"{kind}-{seed}"
    for result in twins.train_twin(sizes, kind, seed, folder, options.data):
        say(f"{kind}, seed {seed}, step {len(result['losses'])}/{sizes.steps}")
    return result


def compare(options: CompareOptions) -> None:
    """Runs everything and writes options.output. Raises OptionError, before any work, where that
    cannot be written into, and CheckpointError for a --model that cannot be read.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    make_folder(options.output)
    memory = memory_of(options.model)
    if options.data is not None:
        twins.read_documents(options.data)  # Refused before the work where it holds no text.
    results: dict[str, Any] = {
        "schema": 3,
        "quick": options.quick,
        "machine": _machine(),
        "memory": memory,
    }
    measured = _measure(plan(options))
    results["decode"] = measured["decode"]
    results["quality"] = twins.quality(_twin_sizes(options), measured["quality"])
    (options.output / "results.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    Console().print(*_tables(results))


def memory_of(model: Path | None) -> list[dict[str, Any]]:
    """Bytes in bfloat16 of a token and of a sequence of CONTEXT tokens, with one key/value head and
    with one per query head, of published models and a further checkpoint folder. Raises
    CheckpointError for one that cannot be read.
    """
    rows = []
    for folder in [*(MODELS / name for name in TABLE), *([model] if model else [])]:
        spec = read_spec(folder)
        one = spec.kv_bytes_per_token(BFLOAT16)
        many = spec.multi_head_bytes_per_token(BFLOAT16)
        rows.append(
            {
                "name": folder.resolve().name,
                "num_query_heads": spec.num_query_heads,
                "context": CONTEXT,
                "mqa_bytes_per_token": one,
                "mha_bytes_per_token": many,
                "mqa_bytes_per_sequence": one * CONTEXT,
                "mha_bytes_per_sequence": many * CONTEXT,
                "ratio": many / one,
            }
        )
    return rows


def _measure(steps: list[tuple[str, Measure]]) -> dict[str, list[Any]]:
    """Runs the steps and says how far it is; key -> what its steps gave, in order."""
    measured: dict[str, list[Any]] = {}
    with progress() as shown:
        task = shown.add_task("comparing", total=len(steps))
        for key, measure in steps:

            def say(text: str, key: str = key) -> None:
                shown.update(task, description=f"{key}: {text}")

            shown.update(task, description=key)
            measured.setdefault(key, []).append(measure(say))
            shown.advance(task)
    return measured


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor())
        if hasattr(torch.cpu, "get_capabilities")
        else "",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _tables(results: dict[str, Any]) -> list[Table]:
    """The results' main figures, for the terminal."""
    memory = Table("model", "one head", "a head per query head", "ratio", title="bytes of a token")
    for row in results["memory"]:
        many, one = (f"{row[f'{kind}_bytes_per_token']:,}" for kind in twins.KINDS)
        memory.add_row(row["name"], one, many, f"{row['ratio']:.0f}")
    decode = Table("batch", "context", "attention", "layer", "bytes")
    decode.title = "a layer's decode step, multi-head over multi-query"
    for row in results["decode"]:
        many, one = (row[f"{kind}_kv_bytes"] + row[f"{kind}_weight_bytes"] for kind in twins.KINDS)
        ratios = row["attention"]["ratio"], row["layer"]["ratio"], many / one
        cells = (f"{ratio:.1f}" for ratio in ratios)
        decode.add_row(str(row["batch"]), str(row["context"]), *cells)
    quality = Table("twins", "parameters", "held-out loss", "perplexity")
    runs, difference = results["quality"]["runs"], results["quality"]["difference"]
    quality.title = f"{difference['mean']:+.4f} ± {difference['stdev']:.4f} nats a token with one"
    for kind, loss in results["quality"]["held_out_loss"].items():
        parameters = next(run["num_parameters"] for run in runs if run["kind"] == kind)
        spread = f"{loss['mean']:.4f} ± {loss['stdev']:.4f}"
        quality.add_row(kind, f"{parameters:,}", spread, f"{math.exp(loss['mean']):.2f}")
    return [memory, decode, quality]
