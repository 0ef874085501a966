"""The options of the tools, as plain data: the command line is built from these without importing torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`onehead train`: what to train, on what, for how long. Every field is a command-line option of the same name."""

    output: Path
    """Folder of the finished checkpoint."""
    data: Path | None = None
    """Folder whose *.py files are the corpus; the standard library of this Python where absent."""
    work: Path = Path("runs/train")
    """Folder of the resumable state, the log and the tokenizer; a second run of the same options goes on from there."""
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_query_heads: int = 4
    max_positions: int = 4096
    steps: int = 4000
    batch_tokens: int = 8192
    sequence: int = 1024
    """Training context in tokens, up to the last `long_share` of the steps, which run at max_positions."""
    long_share: float = 0.1
    fim_rate: float = 0.3
    """Share of the documents that are rearranged for fill-in-the-middle."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    seed: int = 0
    threads: int = 0
    """CPU threads; 0 leaves torch's own choice."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    save_every: int = 250
    """Steps between two saves of the resumable state and two evaluations on held-out documents."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`onehead compare`: multi-head against multi-query attention, in bytes and in seconds."""

    output: Path
    """Folder of report.html and results.json."""
    quick: bool = False
    """Fewer tokens, sizes and repetitions: minutes instead of an hour, and noisier."""
    model: Path | None = None
    """A checkpoint folder to add to the memory table."""
    threads: int = 0
    """CPU threads; 0 leaves torch's own choice."""
