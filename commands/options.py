"""The options of the commands that only read and write files: plan, compare, convert and train.
Importing them needs no torch.

They come from the command line alone: neither the environment nor a file of options is read.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from model.spec import OptionError
from server.config import load
from server.errors import ConfigurationError, UsageError
from server.option_types import Size, Words

Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["multi_query", "multi_head"]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
OF_A_NEW_MODEL = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_query_heads",
    "attention",
    "intermediate_size",
    "max_positions",
)
"""Options of `onehead train` that a checkpoint answers itself."""
FROM_SCRATCH, GOING_ON = 2e-3, 5e-4
"""Peak learning rates: lower for a checkpoint, which forgets under the rate that a new model
needs."""
OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def data_folder(text: str) -> tuple[Path | None, float]:
    """One entry of --data -> folder (None: the standard library) and weight. Raises OptionError."""
    folder, equals, weight = text.rpartition("=")
    if not equals:
        folder, weight = text, "1"
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1000:
        raise OptionError(f"data {text}: the weight {weight!r} is not a number from 0.01 to 1000")
    return (None if folder == "stdlib" else Path(folder)), value


class ToolOptions(BaseSettings):
    """Base of these options: frozen, and taken from nothing but what is passed to them. Flags of
    booleans take no value.
    """

    model_config = SettingsConfigDict(frozen=True, cli_implicit_flags=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


AnyOptions = TypeVar("AnyOptions", bound=ToolOptions)


def load_options(cls: type[AnyOptions], argv: list[str], prog: str) -> AnyOptions:
    """The options of one command from its arguments. Raises UsageError for values out of bounds or
    in conflict, else ConfigurationError.
    """
    try:
        return load(cls, argv, prog)
    except ConfigurationError as error:
        details = error.__cause__.errors() if isinstance(error.__cause__, ValidationError) else []
        if any(
            each["type"] in OUT_OF_BOUNDS
            or isinstance(each.get("ctx", {}).get("error"), OptionError)
            for each in details
        ):
            raise UsageError(str(error)) from None
        raise


class TrainOptions(ToolOptions):
    """onehead train: a small gpt_bigcode model from text, or more training for a checkpoint."""

    output: Path = Field(description="folder of the finished checkpoint")
    init: Path | None = Field(
        None,
        description="checkpoint folder or GGUF file to go on from; its tokenizer and sizes are "
        "kept; default: a new model",
    )
    data: Words | None = Field(
        None,
        description="folders of text, or files: the corpus, each PATH or PATH=WEIGHT, with commas "
        "between them. Files in UTF-8 of any name are read; of JSON lines each `text`, or each "
        "`completion` with its `prompt`, which is read but not learnt. An epoch holds them WEIGHT "
        "times; stdlib is this Python's standard library, which is also the default",
    )
    work: Path = Field(
        Path("runs/train"),
        description="folder of the resumable state; a second run of the same options goes on from "
        "there",
    )
    vocab_size: Positive = Field(
        4096, description="tokens of the byte-level BPE, the special ones included"
    )
    hidden_size: Positive = Field(256, description="width of the model")
    num_layers: Positive = Field(8, description="blocks")
    num_query_heads: Positive = Field(4, description="query heads")
    attention: Attention = Field(
        "multi_query",
        description="multi_head: a key/value head for each query head, for comparison; it cannot "
        "be served",
    )
    intermediate_size: Natural = Field(0, description="width of the MLP; 0: four times hidden_size")
    max_positions: Positive = Field(4096, description="longest context of the finished model")
    steps: Positive = Field(4000, description="optimizer steps")
    batch_tokens: Positive = Field(8192, description="tokens of one step")
    sequence: Positive = Field(
        1024, description="training context, up to the last long_share of the steps"
    )
    long_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the steps trained at max_positions tokens; with --init at 4 x "
        "sequence if that is less",
    )
    fim_rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the documents rearranged for fill-in-the-middle; default: 0.3, or 0 "
        "if the tokenizer of --init has no marks for it",
    )
    learning_rate: float = Field(
        0.0, ge=0, description=f"peak of the schedule; 0: {FROM_SCRATCH}, or {GOING_ON} with --init"
    )
    weight_decay: float = Field(0.1, ge=0, description="of matrices")
    warmup_steps: Natural = Field(100, description="steps of linear warm-up")
    seed: Natural = Field(0, description="of initialisation and data order")
    threads: Natural = Field(0, description="CPU threads; 0 leaves torch's own choice")
    device: Device = Field("auto", description="auto: cuda where there is one")
    save_every: Positive = Field(250, description="steps between two saves and evaluations")

    @field_validator("learning_rate")
    @classmethod
    def _rate_that_is_used(cls, value: float, info: ValidationInfo) -> float:
        """Replaces 0 by the default rate here, because a run's saved state is checked against these
        options.
        """
        return value or (FROM_SCRATCH if info.data.get("init") is None else GOING_ON)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for name in OF_A_NEW_MODEL if self.init is not None else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise OptionError(
                    f"{name} {value} applies to a new model only; with --init {self.init} it "
                    "comes from the checkpoint"
                )
        for text in self.data or ():
            data_folder(text)
        if self.init is None and self.sequence > self.max_positions:
            raise OptionError(
                f"sequence {self.sequence} is longer than max_positions {self.max_positions}"
            )
        return self


class ConvertOptions(ToolOptions):
    """onehead convert: a checkpoint with one key/value head from one with several, or safetensors
    of a pytorch_model.bin; without --output, a tokenizer.json of a folder's older tokenizer files.
    """

    model: Path = Field(
        description="checkpoint folder of a gpt2, gpt_bigcode, llama, mistral or gemma; of any "
        "family for a .bin"
    )
    output: Path | None = Field(
        None,
        description="new folder of the converted checkpoint; without it only a tokenizer.json is "
        "made, in the model's folder",
    )
    evaluate: bool = Field(True, description="measure the held-out loss before and after pooling")
    data: Path | None = Field(
        None,
        description="folder of text, or a file, of which a held-out part measures the loss; "
        "default: this Python's standard library",
    )
    threads: Natural = Field(0, le=1024, description="CPU threads; 0 leaves torch's own choice")

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if self.output is None and (self.data is not None or self.threads or not self.evaluate):
            raise OptionError(
                "data, threads and evaluate have no effect without --output; leave them out or "
                "give it"
            )
        if self.data is not None and not self.evaluate:
            raise OptionError(
                f"data {self.data} has no effect with --no-evaluate; leave one of them out"
            )
        return self


class CompareOptions(ToolOptions):
    """onehead compare: multi-head against multi-query attention, in bytes, in seconds and in what
    they learn.
    """

    output: Path = Field(description="folder of results.json")
    quick: bool = Field(
        False,
        description="fewer tokens, sizes and repetitions: minutes instead of an hour, and noisier",
    )
    data: Path | None = Field(
        None,
        description="folder of text, or a file, that the twins are trained on; default: this "
        "Python's standard library",
    )
    model: Path | None = Field(None, description="a checkpoint folder to add to the memory table")
    threads: Natural = Field(0, description="CPU threads; 0 leaves torch's own choice")


class PlanOptions(ToolOptions):
    """onehead plan: what a checkpoint takes and how many sequences fit, from its config.json alone;
    and what quantization costs it.
    """

    by_position: ClassVar[str] = "model"

    model: Path = Field(
        description="checkpoint folder or org/name of the hub, of which config.json is enough; or "
        "a GGUF file"
    )
    memory: Annotated[Size, Field(gt=1)] | None = Field(
        None, description="bytes of the device, like 80GiB; default: what is free on this machine"
    )
    device: Device = Field(
        "auto",
        description="of the server that is planned; auto: this machine's. The cache takes 0.9 of "
        "the memory left on a GPU, 0.4 on a CPU",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights and cache; auto: bfloat16 on a GPU; on a CPU weights as stored, "
        "by config.json, and a float32 cache",
    )
    quantization: Literal["auto", "none", "int8", "int4", "all"] = Field(
        "auto",
        description="of the weights, auto as engine.quantization has it; of int8 and int4 also "
        "what they cost in perplexity, measured on this machine where the weights are there. all: "
        "every form's perplexity, with memory planned for auto",
    )
    cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="fp8: keys and values in 8 bits"
    )
    page_size: Positive = Field(64, le=1024, description="tokens of a page")
    step_tokens: Positive = Field(512, le=65536, description="most tokens computed in one step")
    text: Path | None = Field(
        None,
        description="file that perplexity is measured on; default: documentation and modules of "
        "this Python, about 5,000 tokens",
    )
    format: Literal["text", "json"] = Field("text", description="of what is printed")

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.text is not None and self.quantization in ("auto", "none"):
            raise OptionError(
                f"text {self.text} has no effect with quantization {self.quantization}; expected "
                "all, or the one to be measured"
            )
        return self
