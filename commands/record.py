"""What a checkpoint made of another takes over from it: the files beside the weights, and
conversion.json, the record of what was measured.

The losses of a record were all measured on the same sequences, which it names by a digest. Knows
nothing of how the weights were made.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from model.checkpoint.config import Config, read_json
from model.checkpoint.files import MOST_TOKENIZER_BYTES, read_file

RECORD = "conversion.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
STAGES = {"before": "as it came", "pooled": "pooled", "uptrained": "trained since"}


def copy_companions(source: Path, output: Path) -> None:
    """The files of a folder that are about text and sampling. Raises CheckpointError."""
    for name in COMPANIONS:
        if (data := read_file(source / name, MOST_TOKENIZER_BYTES)) is not None:
            (output / name).write_bytes(data)


def fingerprint(rows_BU: np.ndarray) -> dict[str, Any]:
    """How a record names the sequences that its losses belong to."""
    count, length = rows_BU.shape
    return {
        "sequences": count,
        "tokens": length - 1,
        "sha256": hashlib.sha256(rows_BU.astype("<i8").tobytes()).hexdigest(),
    }


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder but for what training added to it; None where it has none. Raises
    CheckpointError.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    values = read_json(path)
    record = Config(values, str(path))
    losses = record.sub("losses")
    if losses is not None:
        losses.number("before"), losses.number("pooled")
    return {"source": values.get("source"), "kind": str(values.get("kind"))} | {
        key: values.get(key) for key in ("losses", "held_out")
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def show(record: dict[str, Any]) -> None:
    """Prints the losses of a record, where it has any, as a table."""
    losses = record["losses"]
    if not losses:
        return
    uptrained = record["uptrained"] or {}
    table = Table(
        "held-out loss, nats per token",
        "",
        "against before",
        title=record["kind"],
        title_justify="left",
        box=None,
    )
    for stage, loss in (losses | {"uptrained": uptrained.get("loss")}).items():
        if loss is not None:
            steps = f" for {uptrained['steps']} steps" if stage == "uptrained" else ""
            difference = "" if stage == "before" else f"{loss - losses['before']:+.4f}"
            table.add_row(STAGES[stage] + steps, f"{loss:.4f}", difference)
    Console().print(table)
