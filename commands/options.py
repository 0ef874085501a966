"""The options of the tools, as plain data: the command line is built from these without importing torch."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from model.spec import OptionError

Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["multi_query", "multi_head"]
OF_A_NEW_MODEL = ("vocab_size", "hidden_size", "num_layers", "num_query_heads", "attention", "intermediate_size", "max_positions")
"""Options of `onehead train` that a checkpoint answers itself."""
FROM_SCRATCH, GOING_ON = 2e-3, 5e-4
"""Peak learning rates: a model that was trained before forgets under what a new one needs."""
MOST_THREADS = 1024


def option(default: Any, help: str) -> Any:
    """A dataclass field whose help the command line shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """onehead train: a small gpt_bigcode model from source files, or more training for a checkpoint."""

    output: Path = field(metadata={"help": "folder of the finished checkpoint"})
    init: Path | None = option(None, "checkpoint folder to go on from, whose tokenizer and sizes are kept; default: a new model")
    data: Path | None = option(None, "folder whose *.py files are the corpus; default: this Python's standard library")
    work: Path = option(Path("runs/train"), "folder of the resumable state; a second run of the same options goes on from there")
    vocab_size: int = option(4096, "tokens of the byte-level BPE, the special ones included")
    hidden_size: int = option(256, "width of the model")
    num_layers: int = option(8, "blocks")
    num_query_heads: int = option(4, "query heads")
    attention: Attention = option("multi_query", "multi_head: a key/value head for each query head, for comparison; it cannot be served")
    intermediate_size: int = option(0, "width of the MLP; 0: four times hidden_size")
    max_positions: int = option(4096, "longest context of the finished model")
    steps: int = option(4000, "optimizer steps")
    batch_tokens: int = option(8192, "tokens of one step")
    sequence: int = option(1024, "training context, up to the last long_share of the steps")
    long_share: float = option(0.1, "share of the steps at max_positions; with --init, at most four times sequence")
    fim_rate: float | None = option(
        None, "share of the documents rearranged for fill-in-the-middle; default: 0.3, or 0 if the tokenizer of --init has no marks for it"
    )
    learning_rate: float = option(0.0, f"peak of the schedule; 0: {FROM_SCRATCH}, or {GOING_ON} with --init")
    weight_decay: float = option(0.1, "of matrices")
    warmup_steps: int = option(100, "steps of linear warm-up")
    seed: int = option(0, "of initialisation and data order")
    threads: int = option(0, "CPU threads; 0 leaves torch's own choice")
    device: Device = option("auto", "auto: cuda where there is one")
    save_every: int = option(250, "steps between two saves and evaluations")

    def __post_init__(self) -> None:
        """Raises OptionError for values out of bounds, and puts the default of a learning rate in the place of 0."""
        may_be_zero = ("seed", "threads", "intermediate_size", "warmup_steps", "long_share", "fim_rate", "learning_rate", "weight_decay")
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and (value < 0 or (value == 0 and f.name not in may_be_zero)):
                raise OptionError(f"{f.name} must be above 0, got {value}")
            if self.init is not None and f.name in OF_A_NEW_MODEL and value != f.default:
                raise OptionError(f"{f.name} {value} is of a new model; --init {self.init} has its own, so leave {f.name} out")
        for name in ("long_share", "fim_rate"):
            if (getattr(self, name) or 0) > 1:
                raise OptionError(f"{name} is a share and at most 1, got {getattr(self, name)}")
        if self.init is None and self.sequence > self.max_positions:
            raise OptionError(f"sequence {self.sequence} is longer than max_positions {self.max_positions}")
        # The rate that is used, not the 0 that asks for it, is what a run's saved state belongs to.
        object.__setattr__(self, "learning_rate", self.learning_rate or (FROM_SCRATCH if self.init is None else GOING_ON))


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """onehead convert: a checkpoint with one key/value head from one with several, or safetensors of a pytorch_model.bin."""

    model: Path = field(metadata={"help": "checkpoint folder of a gpt2, gpt_bigcode, llama, mistral or gemma; of any family for a .bin"})
    output: Path = field(metadata={"help": "new folder of the converted checkpoint"})
    evaluate: bool = option(True, "measure the held-out loss before and after pooling")
    data: Path | None = option(None, "folder whose held-out *.py files that is measured on; default: this Python's standard library")
    threads: int = option(0, "CPU threads; 0 leaves torch's own choice")

    def __post_init__(self) -> None:
        """Raises OptionError for values that are out of bounds or would be ignored."""
        if not 0 <= self.threads <= MOST_THREADS:
            raise OptionError(f"threads must be from 0 to {MOST_THREADS}, got {self.threads}")
        if self.data is not None and not self.evaluate:
            raise OptionError(f"data {self.data} is what losses are measured on; leave it out with --no-evaluate")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """onehead compare: multi-head against multi-query attention, in bytes, in seconds and in what they learn."""

    output: Path = field(metadata={"help": "folder of report.html and results.json"})
    quick: bool = option(False, "fewer tokens, sizes and repetitions: minutes instead of an hour, and noisier")
    data: Path | None = option(None, "folder whose *.py files the twins are trained on; default: this Python's standard library")
    model: Path | None = option(None, "a checkpoint folder to add to the memory table")
    threads: int = option(0, "CPU threads; 0 leaves torch's own choice")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """onehead plan: what a checkpoint takes and how many sequences fit, from its config.json alone."""

    folder: Path = field(metadata={"help": "checkpoint folder or org/name of the hub, of which config.json is enough", "positional": True})
    memory: float | None = field(
        default=None, metadata={"help": "of the device, like 80GiB; default: what is free on this machine", "memory": True}
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "of the server that is planned; auto: this machine's. The cache takes 0.9 of the memory left on a GPU, 0.4 on a CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "weights and cache; auto: float32 on a CPU, bfloat16 on a GPU")
    quantization: Literal["none", "int8", "fp8"] = option("none", "weights in 8 bits; where the folder has weights, also the error")
    cache_dtype: Literal["auto", "fp8"] = option("auto", "fp8: keys and values in 8 bits")
    page_size: int = option(64, "tokens of a page")
    step_tokens: int = option(512, "most tokens computed in one step")
    data: Path | None = option(
        None, "folder whose *.py files perplexity is measured on, with weights in 8 bits; default: this Python's standard library"
    )
    format: Literal["text", "json"] = option("text", "of what is printed")
    picture: Path | None = option(None, "write the sequences that fit by context to this .svg or .png")

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory <= 1:
            raise OptionError(f"memory must be bytes, like 80GiB, got {self.memory}")
        for name, most in (("page_size", 1024), ("step_tokens", 65536)):
            if not 1 <= getattr(self, name) <= most:
                raise OptionError(f"{name} must be from 1 to {most}, got {getattr(self, name)}")
        if self.data is not None and self.quantization == "none":
            raise OptionError(f"data {self.data} is what 8 bits are tried on; expected quantization int8 or fp8 with it")
        if self.picture is not None and (self.picture.suffix not in (".svg", ".png") or not self.picture.parent.is_dir()):
            raise OptionError(f"picture {self.picture} must be a .svg or .png in a folder that exists")
