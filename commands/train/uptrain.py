"""What `onehead train --init` does besides training: it reads the checkpoint to go on from, and
writes one of the same layout.

All files but the weights are copied from it. Knows nothing of optimizers, and of steps only how
many there were.
"""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from commands import corpus
from commands.held_out import comparison_rows, decoder_logits, losses
from commands.options import TrainOptions
from commands.record import RECORD, copy_companions, fingerprint, read_record, show, write_record
from commands.saving import save_decoder
from commands.train.export import plot_losses
from commands.train.state import TrainState
from model.checkpoint.config import NAME, read_json
from model.checkpoint.conversion import KEY, only_pooled
from model.checkpoint.families import read_spec, weight_names
from model.checkpoint.safetensors_file import DTYPES
from model.checkpoint.weights import Checkpoint, load_decoder
from model.decoder import Decoder
from model.spec import ModelSpec, OptionError


def load(options: TrainOptions, folder: Path) -> tuple[Tokenizer, Decoder]:
    """A checkpoint's tokenizer, and its decoder ready to be trained. Raises OptionError and
    CheckpointError.
    """
    if options.output.resolve() == folder.resolve():
        raise OptionError(f"output {options.output} is the folder of init, expected another")
    spec = read_spec(folder)
    # Checks conversion.json before hours of training: `export` reads it at the end.
    only_pooled(folder)
    if options.sequence > spec.max_positions:
        raise OptionError(
            f"sequence {options.sequence} is longer than the positions of {folder}, of which "
            f"there are {spec.max_positions}; give --sequence {spec.max_positions}"
        )
    tokenizer = corpus.read_tokenizer(folder, spec.vocab_size)
    return tokenizer, load_decoder(folder, spec, torch.float32, torch.device("cpu")).requires_grad_(
        True
    )


def yardstick(
    folder: Path, documents: list[corpus.Document], tokenizer: Tokenizer, spec: ModelSpec
) -> np.ndarray | None:
    """The sequences that the losses in a folder's record belong to; None where it has none, or
    these documents give others.
    """
    record = read_record(folder)
    if record is None or record["held_out"] is None:
        return None
    rows_BU = comparison_rows(documents, tokenizer, spec)
    if fingerprint(rows_BU) == record["held_out"]:
        return rows_BU
    others = (
        "its losses are of other sequences than this --data gives; convert again with it to compare"
    )
    print(f"{folder / RECORD}: {others}")
    return None


def export(
    output: Path, folder: Path, decoder: Decoder, state: TrainState, rows_BU: np.ndarray | None
) -> None:
    """Writes `output` in the layout and dtype of `folder`, which training began from, with its
    record. `rows_BU` as from `yardstick`.
    """
    spec, config, steps = decoder.spec, read_json(folder / NAME), state.step
    if config.get(KEY) is not None:
        steps += config[KEY]["uptrained_steps"]
        config[KEY] |= {"uptrained_steps": steps}
    embedding = weight_names(spec)["token_embedding.weight"][0].name
    dtype = DTYPES[Checkpoint(folder).tensors[embedding].entry.dtype]
    save_decoder(output, decoder, dtype, config)
    copy_companions(folder, output)
    plot_losses(output / "loss.svg", state)
    record = read_record(folder)
    if record is None:
        return
    loss = None
    if rows_BU is not None:
        written = load_decoder(output, spec, torch.float32, torch.device("cpu"))
        loss = float(np.mean(list(losses(decoder_logits(written), rows_BU))))
    record["uptrained"] = {"steps": steps, "loss": loss}
    write_record(output, record)
    show(record)
