"""`onehead convert`: a checkpoint with one key/value head from one with several, by the mean of
their projections (Ainslie et al. 2023, arXiv 2305.13245, section 2.1), or safetensors of a
`pytorch_model.bin`; and a tokenizer.json where there are older files.

The mean is where training goes on from, not a finished model: what it costs is measured, and the
folder says that it was only pooled. Invariant: every tensor but those of K and V leaves with the
values it came with. It alone reads pickles, and of them only weights.

Shape letters: H heads, d head size, D hidden size.
"""

import math
import os
import sys
import zipfile
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from commands import corpus
from commands.convert.tokenizer import NAME as TOKENIZER
from commands.convert.tokenizer import tokenizer_json, write_tokenizer
from commands.held_out import Logits, comparison_rows, decoder_logits, losses
from commands.options import ConvertOptions
from commands.progress import progress
from commands.record import STAGES, copy_companions, fingerprint, show, write_record
from commands.saving import config_from_spec, write_checkpoint
from model.checkpoint.config import Config, read_json, short
from model.checkpoint.conversion import KEY
from model.checkpoint.families import read_spec, spec_of, weight_names
from model.checkpoint.files import KINDS, LFS, MOST_LIST_BYTES, first_bytes
from model.checkpoint.names import Entry, Part
from model.checkpoint.safetensors_file import DTYPES
from model.checkpoint.spellings import respelt
from model.checkpoint.weights import (
    TIED_DUPLICATE,
    Checkpoint,
    check_tensors,
    check_tied,
    is_ignored,
    load_decoder,
)
from model.decoder import meta_decoder
from model.spec import CheckpointError, ModelSpec, OptionError
from server.errors import ConfigurationError

FUSED = ("gpt2", "gpt_bigcode")
"""Families whose queries, keys and values are one matrix."""
APART = {"llama": None, "mistral": 8, "gemma": 16}
"""Families whose keys and values have matrices of their own -> how many key/value heads a config
has that does not say (None: as many as queries).
"""

CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys of GPT-2's config.json that its layout does not change. One that is absent stays so: the
default of both families is the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion makes of a folder: `num_heads` are pooled into one; 0: there is one
    already, and the tensors stay as they are.
    """

    folder: Path
    model_type: str
    """Of the folder; the spec's is of what is made."""
    spec: ModelSpec
    config: dict[str, Any]
    num_heads: int


def make_plan(folder: Path) -> Plan:
    """The plan for a folder, by its JSON files alone. Raises CheckpointError where its heads cannot
    be pooled.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; --model takes a checkpoint folder with config.json and "
            "weights"
        )
    values = respelt(read_json(folder / "config.json"))
    model_type, num_heads = values.get("model_type"), _num_heads(Config(values))
    if not num_heads:
        try:
            return Plan(folder, str(model_type), read_spec(folder), values, 0)
        except CheckpointError as error:
            if model_type in (*FUSED, *APART):
                raise
            raise CheckpointError(
                f"{error}. Found model_type {short(model_type)}; heads are pooled of "
                f"{', '.join((*FUSED, *APART))}"
            ) from None
    mark = {KEY: {"method": "mean_pool", "heads": num_heads, "uptrained_steps": 0}}
    if model_type == "gpt2":
        # GPT-2's own layout has no place for a single key/value head; gpt_bigcode's is the same
        # block with one.
        spec = replace(
            spec_of(folder, values | {"attention_head_type": "multiquery"}),
            model_type="gpt_bigcode",
        )
        made = {key: value for key, value in config_from_spec(spec).items() if key not in CARRIED}
        return Plan(
            folder,
            model_type,
            spec,
            made | {key: values[key] for key in CARRIED if key in values} | mark,
            num_heads,
        )
    config = (
        values
        | ({"multi_query": True} if model_type == "gpt_bigcode" else {"num_key_value_heads": 1})
        | mark
    )
    spec = spec_of(folder, config)
    return Plan(
        folder,
        spec.model_type,
        spec,
        config if model_type in FUSED else config | {"head_dim": spec.head_dim},
        num_heads,
    )


def _num_heads(config: Config) -> int:
    """How many key/value heads there are to pool; 0 where there is one, or the family is none of
    those that are pooled.
    """
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return 0 if config.get("attention_head_type") == "multiquery" else config.integer("n_head")
    if model_type == "gpt_bigcode":
        return 0 if config.flag("multi_query", True) else config.integer("n_head")
    if isinstance(model_type, str) and model_type in APART:
        num_queries = config.integer("num_attention_heads")
        num_heads = config.integer("num_key_value_heads", APART[model_type] or num_queries)
        if num_queries % num_heads:
            raise config.wrong(
                "num_key_value_heads", f"a divisor of num_attention_heads {num_queries}"
            )
        return num_heads if num_heads > 1 else 0
    return 0


# --- tensors in


def read_tensors(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Every parameter in a folder's files, safetensors or else pytorch_model.bin, by its name
    there. Raises CheckpointError.
    """
    if not is_pickled(folder):
        return _read_safetensors(folder, spec)
    tensors: dict[str, Tensor] = {}
    for path in _pickles(folder):
        for name, value in _read_pickle(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {name} occurs in another file of the folder too"
                )
            if name == TIED_DUPLICATE or not is_ignored(name, spec):
                tensors[name] = _weight(path, name, value)
    if spec.tied_embeddings and (head := tensors.pop(TIED_DUPLICATE, None)) is not None:
        embedding = _embedding(spec, tensors)
        tied = tensors.get(embedding.name)
        if tied is None or head.dtype is not tied.dtype or not torch.equal(head, tied):
            # `transformers` would keep that head.
            raise CheckpointError(
                f"{folder}: {TIED_DUPLICATE} differs from {embedding.name}, to which config.json "
                "ties it; expected the same values, or tie_word_embeddings false"
            )
    return tensors


def _weight(path: Path, name: str, value: Tensor) -> Tensor:
    """A copy of a pickle's tensor. Raises CheckpointError for one that safetensors cannot hold, or
    that holds no numbers.
    """
    if value.dtype not in DTYPES.values() or value.layout is not torch.strided or value.is_meta:
        found = f"{value.dtype} and layout {value.layout}{' on meta' if value.is_meta else ''}"
        raise CheckpointError(
            f"{path}: {name} has dtype {found}, expected dense {', '.join(DTYPES)}"
        )
    if value.numel() and not all(bound.isfinite() for bound in torch.aminmax(value.detach())):
        raise CheckpointError(f"{path}: {name} holds NaN or infinity; the file is damaged")
    return value.detach().clone(memory_format=torch.contiguous_format)


def _embedding(spec: ModelSpec, names: Container[str]) -> Part:
    """The token embedding as a source calls it: GPT-2's were published under the names of its inner
    model too.
    """
    part = weight_names(spec)["token_embedding.weight"][0]
    inner = part.name.removeprefix("transformer.")
    return Part(inner) if inner in names and part.name not in names else part


def _read_safetensors(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    checkpoint = Checkpoint(folder, spec.pooling)
    checkpoint.verify()
    names = [name for name in checkpoint.tensors if not is_ignored(name, spec)]
    for name in names:
        if (found := checkpoint.tensors[name].entry.dtype) not in DTYPES:
            raise CheckpointError(
                f"{folder}: {name} has dtype {found}, expected one of {', '.join(DTYPES)}"
            )
    if (
        embedding := _embedding(spec, checkpoint.tensors)
    ).name in checkpoint.tensors:  # Else it is named as missing later.
        check_tied(checkpoint, spec, embedding)
    return {name: checkpoint.read(Part(name)) for name in names}


def is_pickled(folder: Path) -> bool:
    """Whether the weights of a folder are not in safetensors."""
    return not any(
        (folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")
    )


def _pickles(folder: Path) -> list[Path]:
    """The files of pytorch_model.bin, or of its index. Raises CheckpointError."""
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.exists():
        weight_map = read_json(index, MOST_LIST_BYTES).get("weight_map")
        names = (
            sorted({str(name) for name in weight_map.values()})
            if isinstance(weight_map, dict)
            else []
        )
        plain = all(
            name.isprintable()
            and Path(name).name == name
            and name.endswith(".bin")
            and len(name.encode()) < 256
            for name in names
        )
        if not names or not plain:
            raise CheckpointError(
                f"{index}: weight_map must map tensor names to plain names of .bin files, found "
                f"{short(weight_map)}"
            )
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: expected model.safetensors or pytorch_model.bin, or the index of one; "
                f"found no {name}"
            )
    return [folder / name for name in names]


def _read_pickle(path: Path) -> dict[str, Tensor]:
    if first_bytes(path).startswith(LFS):
        raise CheckpointError(f"{path}: is {KINDS[LFS]}")
    try:
        # Files from before torch 1.6 are no archives, and cannot be mapped.
        loaded = torch.load(
            path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path)
        )
    except (
        Exception
    ) as error:  # torch raises many kinds: the file is damaged, or holds something besides tensors.
        # Its text is not passed on: it advises to read the file as code.
        found = type(error).__name__
        raise CheckpointError(
            f"{path}: expected weights and nothing else, found a file that cannot be read so "
            f"({found})"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()
    ):
        raise CheckpointError(
            f"{path}: expected tensors by name, found {type(loaded).__name__} of something else"
        )
    return loaded


# --- one head of several


def pool(plan: Plan, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plan's checkpoint. Raises CheckpointError naming the one that cannot be
    pooled.
    """
    if not plan.num_heads:
        return tensors
    pooled: dict[str, Tensor] = {}
    for old, value in tensors.items():
        # GPT-2's were published under the names of its inner model.
        name = (
            f"transformer.{old}"
            if plan.model_type in FUSED and not old.startswith(("transformer.", "lm_head."))
            else old
        )
        if name in pooled:
            raise CheckpointError(
                f"{plan.folder}: {name} occurs with and without `transformer.` before it"
            )
        pooled[name] = (_pool_fused if plan.model_type in FUSED else _pool_apart)(
            plan, name, value
        ).contiguous()
    return pooled


def _pool_fused(plan: Plan, name: str, value: Tensor) -> Tensor:
    """c_attn's rows are all queries, all keys, all values (GPT-2), or q, k and v head by head
    (gpt_bigcode) -> queries, one K, one V.
    """
    is_gpt2 = plan.model_type == "gpt2"
    if is_gpt2 and value.ndim == 2 and (".attn." in name or ".mlp." in name):
        value = value.T  # GPT-2 keeps matrices as [in, out].
    if ".attn.c_attn." not in name:
        return value
    if is_gpt2:
        q_Hd, k_Hd, v_Hd = _split(plan, name, value, 3, plan.num_heads)
    else:
        q_Hd, k_Hd, v_Hd = _split(plan, name, value, plan.num_heads, 3).transpose(0, 1)
    return torch.cat([q_Hd.flatten(0, 1), _mean(k_Hd), _mean(v_Hd)])


def _pool_apart(plan: Plan, name: str, value: Tensor) -> Tensor:
    if not any(f".self_attn.{projection}_proj." in name for projection in "kv"):
        return value
    return _mean(_split(plan, name, value, plan.num_heads))


def _split(plan: Plan, name: str, value: Tensor, *sizes: int) -> Tensor:
    """The rows of a matrix or bias by `sizes` and columns of a head. Raises CheckpointError where
    they are not as many.
    """
    expected = math.prod(sizes) * plan.spec.head_dim
    if value.shape[:1] != (expected,):
        raise CheckpointError(
            f"{plan.folder}: {name} has shape {list(value.shape)}, expected {expected} rows for "
            f"{plan.num_heads} key/value heads"
        )
    by_head: Tensor = value.unflatten(0, (*sizes, plan.spec.head_dim))
    return by_head


def _mean(value_Hd: Tensor) -> Tensor:
    """Over the heads, rounded once."""
    return value_Hd.double().mean(dim=0).to(value_Hd.dtype)


# --- the tool


def convert(options: ConvertOptions) -> None:
    """Writes options.output, or without it the model's tokenizer.json, whole or not at all. Raises
    CheckpointError and ConfigurationError for a source that cannot be converted, OptionError for
    unusable options.
    """
    model, output = options.model, options.output
    if output is None:
        write_tokenizer(model)
        return
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise OptionError(f"output {output} exists, expected a new or empty folder")
    if options.threads:
        torch.set_num_threads(options.threads)
    plan = make_plan(model)
    if not plan.num_heads and not is_pickled(model):
        way_out = (
            ""
            if (model / TOKENIZER).exists()
            else "; leave out --output to make its tokenizer.json"
        )
        raise CheckpointError(
            f"{model}: has one key/value head already; nothing to convert{way_out}"
        )
    with _beside(output) as beside:
        made = Path(beside) / "made"
        record = _make(options, plan, made)
        try:
            os.replace(made, output.resolve())
        except OSError as error:
            raise OptionError(f"output {output} cannot be made: {error.strerror}") from None
    if record is None:
        print(f"{output}: the weights of {model} as safetensors, unchanged")
        return
    show(record)
    print(
        f"{output}: pooled, and not trained since; go on with `onehead train --init {output} "
        "--output NEW`"
    )


def _beside(output: Path) -> TemporaryDirectory[str]:
    """A folder on the file system of the output that goes away whatever happens. Raises OptionError
    where there can be none.
    """
    target = output.resolve()
    if target.is_mount():
        raise OptionError(
            f"output {output} is a mount point, which cannot be replaced; expected a folder in it"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise OptionError(f"output {output} cannot be made: {error.strerror}") from None


def _tokenizer(folder: Path) -> str | None:
    """The tokenizer.json to write; None where the folder has one, or where none can be made."""
    if (folder / TOKENIZER).exists():
        return None
    try:
        return tokenizer_json(folder)
    except ConfigurationError as error:
        print(f"onehead convert: {error}; the weights are converted without it", file=sys.stderr)
        return None


def _make(options: ConvertOptions, plan: Plan, made: Path) -> dict[str, Any] | None:
    """Everything of the output, in the folder `made`; the record of a pooled checkpoint."""
    rows_BU = _rows(options, plan.spec) if plan.num_heads else None
    tokenizer = _tokenizer(plan.folder)
    tensors = _tensors(plan)
    try:
        write_checkpoint(made, tensors, plan.config)
        copy_companions(plan.folder, made)
        if tokenizer is not None:
            (made / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise OptionError(f"output {options.output} cannot be written: {error}") from None
    if not plan.num_heads:
        return None
    del tensors  # Measuring loads them anew, in float32.
    record: dict[str, Any] = {
        "source": str(plan.folder),
        "kind": f"{plan.num_heads} key/value heads pooled into 1",
        "losses": None,
    }
    record |= {"held_out": None, "uptrained": None}
    if rows_BU is not None:
        record |= {
            "losses": _measure(options.model, made, plan.spec, rows_BU),
            "held_out": fingerprint(rows_BU),
        }
    write_record(made, record)
    return record


def _tensors(plan: Plan) -> dict[str, Tensor]:
    """The weights, once they are known to be a checkpoint that can be served."""
    tensors = pool(plan, read_tensors(plan.folder, plan.spec))
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    entries = {
        name: Entry(dtypes.get(value.dtype, str(value.dtype)), tuple(value.shape), 0)
        for name, value in tensors.items()
    }
    check_tensors(plan.folder, meta_decoder(plan.spec), entries)
    return tensors


def _rows(options: ConvertOptions, spec: ModelSpec) -> np.ndarray | None:
    """The sequences that losses are measured on; None where none are. Raises OptionError and
    CheckpointError.
    """
    if not options.evaluate:
        return None
    if not (options.model / "tokenizer.json").is_file():
        print(f"{options.model}: has no tokenizer.json, so the held-out loss is not measured")
        return None
    if find_spec("transformers") is None:
        raise OptionError(
            "evaluate measures the original with transformers, which is not installed; install it "
            "or give --no-evaluate"
        )
    tokenizer = corpus.read_tokenizer(options.model, spec.vocab_size)
    (documents,) = corpus.split([corpus.read_documents(options.data)])
    return comparison_rows(documents, tokenizer, spec)


def _measure(original: Path, made: Path, spec: ModelSpec, rows_BU: np.ndarray) -> dict[str, float]:
    """The held-out loss before and after. Only one of the two models is in memory at a time."""
    cpu = torch.device("cpu")
    stages: dict[str, Callable[[], Logits]] = {
        "before": lambda: _original(original),
        "pooled": lambda: decoder_logits(load_decoder(made, spec, torch.float32, cpu)),
    }
    found = {}
    with progress() as shown:
        for stage, load in stages.items():
            task = shown.add_task(f"held-out loss, {STAGES[stage]}", total=len(rows_BU))
            each = []
            for loss in losses(load(), rows_BU):
                each.append(loss)
                shown.advance(task)
            found[stage] = float(np.mean(each))
    return found


def _original(folder: Path) -> Logits:
    """The Logits function of the checkpoint to convert, by `transformers`."""
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()

    def logits_of(ids_T: Tensor) -> Tensor:
        logits_TV: Tensor = model(ids_T[None], use_cache=False).logits[0]
        return logits_TV

    return logits_of
