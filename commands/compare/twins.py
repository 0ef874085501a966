"""Twins: the same model with a key/value head per query head and with one, trained on the same data
in the same order, seed by seed.

Both have equally many parameters (the multi-query twin's MLP is widened, as in the paper), the same
initialisation scale, schedule and batches; what differs is attention. It trains and reads losses;
it draws nothing.
"""

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from commands import corpus
from commands.options import Attention, TrainOptions
from commands.train.train import Training
from commands.train.twin import equal_mlp

KINDS: dict[str, Attention] = {"mha": "multi_head", "mqa": "multi_query"}
TOKENIZER = Path(__file__).resolve().parents[2] / "model" / "pretrained" / "tokenizer.json"
PAPER = {
    "difference_ln_ppl": 0.015,
    "task": "WMT14 English-German, 6 layers, 211M parameters (Shazeer 2019, table 1)",
    "mha": {"heads": 8, "d_ff": 4096, "ln_ppl": 1.424},
    "mqa": {"heads": 8, "d_ff": 5440, "ln_ppl": 1.439},
}
MANY = 500
"""Documents of a corpus from which on a part of them does."""
read_documents = lru_cache(maxsize=1)(corpus.read_documents)
"""Read once for all twins."""


@dataclass(frozen=True, slots=True)
class TwinSizes:
    """What both twins share, and how many pairs there are."""

    hidden_size: int
    num_layers: int
    num_heads: int
    steps: int
    batch_tokens: int
    sequence: int
    num_seeds: int
    every_nth: int = 1
    """Which of the corpus's documents are used, if there are many: tokenizing them all takes longer
    than a quick training."""


QUICK = TwinSizes(
    hidden_size=128,
    num_layers=2,
    num_heads=8,
    steps=60,
    batch_tokens=2048,
    sequence=128,
    num_seeds=2,
    every_nth=8,
)
FULL = TwinSizes(
    hidden_size=192,
    num_layers=4,
    num_heads=6,
    steps=400,
    batch_tokens=4096,
    sequence=256,
    num_seeds=5,
)


def options_of(
    sizes: TwinSizes, kind: str, seed: int, folder: Path, data: Path | None
) -> TrainOptions:
    """`onehead train`'s options of one twin. `folder` keeps its state, so that a cut run goes
    on.
    """
    mlp = 4 * sizes.hidden_size
    return TrainOptions(
        output=folder / "checkpoint",
        work=folder,
        data=None if data is None else (str(data),),
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_query_heads=sizes.num_heads,
        attention=KINDS[kind],
        intermediate_size=mlp
        if kind == "mha"
        else equal_mlp(sizes.hidden_size, sizes.num_heads, mlp),
        max_positions=sizes.sequence,
        steps=sizes.steps,
        batch_tokens=sizes.batch_tokens,
        sequence=sizes.sequence,
        long_share=0.0,
        fim_rate=0.0,
        warmup_steps=max(1, sizes.steps // 10),
        seed=seed,
        save_every=max(1, sizes.steps // 6),
    )


def train_twin(
    sizes: TwinSizes, kind: str, seed: int, folder: Path, data: Path | None
) -> Iterator[dict[str, Any]]:
    """Trains one twin; what is known of it now and after each step, the last of which is the
    result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    options = options_of(sizes, kind, seed, folder, data)
    documents = read_documents(data)
    every_nth = sizes.every_nth if len(documents) > MANY else 1
    training = Training(options, documents[::every_nth])
    result: dict[str, Any] = {
        "kind": kind,
        "seed": seed,
        "num_parameters": sum(p.numel() for p in training.decoder.parameters()),
        "intermediate_size": options.intermediate_size,
    }
    for state in chain([training.state], training.run()):
        yield result | {"losses": state.losses, "held_out": state.held_out}


def quality(sizes: TwinSizes, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs, and what they say: each kind's held-out loss over the seeds, and the difference
    seed by seed (MQA minus MHA).
    """
    final = {
        kind: {run["seed"]: run["held_out"][-1][1] for run in runs if run["kind"] == kind}
        for kind in KINDS
    }
    differences = [final["mqa"][seed] - final["mha"][seed] for seed in sorted(final["mha"])]
    return {
        "sizes": asdict(sizes),
        "runs": runs,
        "held_out_loss": {kind: _spread(list(losses.values())) for kind, losses in final.items()},
        "difference": _spread(differences) | {"by_seed": differences},
        "paper": PAPER,
    }


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, sample standard deviation (0 for one value), least and most, in nats per token."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": statistics.mean(values),
        "stdev": deviation,
        "min": min(values),
        "max": max(values),
    }
