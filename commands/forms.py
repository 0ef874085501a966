"""Forms in which the weights of a checkpoint can be held, and their bytes, from the headers of its
files or from shapes alone.
"""

from collections import Counter
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn

from model.checkpoint.config import read_json
from model.checkpoint.families import weight_names
from model.checkpoint.quantization_config import KEY
from model.checkpoint.weights import Checkpoint, check_tensors
from model.decoder import Decoder
from model.devices.blocks import FORMATS, BlockFormat
from model.devices.replacement import Held
from model.layers import Router
from model.spec import CheckpointError, ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIXED = "mixed"
"""The form of weights that a checkpoint stores in several dtypes and block formats."""


def stored(
    folder: Path, decoder: Decoder, keeps_blocks: bool, left: Set[Tensor] = frozenset()
) -> tuple[str, dict[str, int], Counter[str]]:
    """The form in which a CPU holds the matrices of a checkpoint as they are stored: by the headers
    of its files or, where these are not there, by its config.json. (its name, the bytes of all
    parameters but those that are `left` in the file where it is MIXED, matrices by the format of
    their blocks)
    """
    found, blocks, total = set[str](), Counter[str](), 0
    with suppress(CheckpointError):
        checkpoint = Checkpoint(folder, decoder.spec.pooling)
        entries = {name: tensor.entry for name, tensor in checkpoint.tensors.items()}
        check_tensors(folder, decoder, entries)
        names = weight_names(decoder.spec)
        matrices = _matrices(decoder)
        for name, parameter in decoder.named_parameters():
            if parameter in left:
                continue
            if parameter not in matrices:
                total += parameter.numel() * ITEM_BYTES["float32"]
                continue
            for part in names[name]:
                held = checkpoint.held_as(part) if keeps_blocks else checkpoint.dtype(names[name])
                form, row_bytes = _form(held, parameter.shape[1])
                found.add(form)
                blocks.update([form] * (form in FORMATS))
                total += (part.rows or len(parameter)) * row_bytes
    if len(found) > 1:
        return MIXED, {MIXED: total}, blocks
    config = read_json(folder / "config.json")
    configured = config.get("dtype") or config.get("torch_dtype")
    return (
        next(
            iter(found), configured if configured in ITEM_BYTES and KEY not in config else "float32"
        ),
        {},
        blocks,
    )


def _form(held: Held, columns: int) -> tuple[str, int]:
    """What a CPU holds such rows in, and the bytes of one."""
    if isinstance(held, BlockFormat):
        return held.name, held.row_bytes(columns)
    name = str(held).removeprefix("torch.")
    name = name if name in ITEM_BYTES else "float32"
    return name, columns * ITEM_BYTES[name]


def bytes_of_more_heads(
    spec: ModelSpec, heads: int, form: str, dtype: str, vectors: str | None
) -> int:
    """Bytes of the rows of K's and V's projections that pooling `heads` heads into one takes
    away.
    """
    rows = 2 * spec.num_layers * (heads - 1) * spec.head_dim
    bias = ITEM_BYTES[vectors or (form if form in ITEM_BYTES else dtype)] * spec.qkv_bias
    floats = form in ITEM_BYTES
    row = (
        spec.hidden_size * ITEM_BYTES[form] if floats else FORMATS[form].row_bytes(spec.hidden_size)
    )
    return rows * (row + bias)


def weight_bytes(
    decoder: Decoder,
    dtype: str = "float32",
    vectors: str | None = None,
    left: Set[Tensor] = frozenset(),
) -> dict[str, int]:
    """Bytes of all parameters of a decoder, but those that are `left` in the checkpoint's file, in
    each form that the server can hold them in; quantized ones beside what stays in `dtype`. What is
    no linear layer or table, and routers, are in `vectors`; if that is None, in what these are in.
    """
    matrices = _matrices(decoder)
    parameters = [p for p in decoder.parameters() if p not in left]
    counted = {
        form: sum(
            p.numel() * ITEM_BYTES[form if vectors is None or p in matrices else vectors]
            for p in parameters
        )
        for form in ITEM_BYTES
    }
    for kind, form in FORMATS.items():
        # Norms, biases and what is not quantized are in the server's dtype.
        counted[kind] = sum(
            len(p) * form.row_bytes(p.shape[1]) if p in matrices else p.numel() * ITEM_BYTES[dtype]
            for p in parameters
        )
    return counted


def left_in_file(decoder: Decoder, device: str) -> set[Tensor]:
    """Parameters that a device does not hold: on a CPU the table of layer inputs."""
    inputs = decoder.layer_inputs
    return set() if inputs is None or device != "cpu" else {*inputs.table.parameters()}


def _matrices(decoder: Decoder) -> set[Tensor]:
    """The weights of linear layers and tables, without routers'."""
    return {
        module.weight
        for module in decoder.modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module, Router)
    }
