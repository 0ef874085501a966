"""The resumable state of a training run, in safetensors and JSON: parameters, both optimizers'
moments, the losses so far.

A state belongs to the options that made it, and to the files of the checkpoint it went on from;
resuming with others is refused.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from commands.options import TrainOptions
from model.checkpoint.identity import file_digest
from model.checkpoint.weights import Checkpoint
from model.decoder import Decoder
from model.spec import OptionError

# Options that do not change the parameters that come out, so a run may be resumed under other
# values of them.
FREE_OPTIONS = ("output", "work", "threads", "device", "save_every")
# Beside the weights, what of a checkpoint decides how training goes on from it.
SOURCE_FILES = ("config.json", "generation_config.json", "tokenizer.json")


@dataclass(slots=True)
class TrainState:
    """Steps done, the loss of each, and (step, held-out loss) at each save. Losses are in nats per
    token.
    """

    step: int
    losses: list[float]
    held_out: list[tuple[int, float]]
    source: str | None = None
    """Digest of the checkpoint that training went on from, taken when the run began: what is in
    that folder later is not what was read."""


def save_state(
    options: TrainOptions,
    state: TrainState,
    decoder: Decoder,
    steppers: tuple[torch.optim.Optimizer, ...],
) -> None:
    """Writes options.work/state.safetensors; the old one stays whole until the new one is."""
    tensors = {f"decoder.{name}": p.detach().cpu() for name, p in decoder.named_parameters()}
    for number, stepper in enumerate(steppers):
        for index, moments in stepper.state_dict()["state"].items():
            for name, value in moments.items():
                tensors[f"optimizer.{number}.{index}.{name}"] = (
                    torch.as_tensor(value).detach().cpu().clone()
                )
    metadata = {"options": _identity(options, state.source), "state": json.dumps(asdict(state))}
    partial = options.work / "state.safetensors.partial"
    save_file(tensors, partial, metadata=metadata)
    os.replace(partial, options.work / "state.safetensors")


def load_state(
    options: TrainOptions, decoder: Decoder, steppers: tuple[torch.optim.Optimizer, ...]
) -> TrainState:
    """Restores the state of options.work into decoder and steppers; one of no steps where there is
    none. Raises OptionError for a state of other options.
    """
    source = None if options.init is None else source_digest(options.init)
    identity, path = _identity(options, source), options.work / "state.safetensors"
    if not path.exists():
        return TrainState(0, [], [], source)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        if metadata["options"] != identity:
            old, new = json.loads(metadata["options"]), json.loads(identity)
            changed = ", ".join(
                f"{key} {old.get(key)} then, {new[key]} now"
                for key in new
                if old.get(key) != new[key]
            )
            raise OptionError(
                f"{path} belongs to a run of other options ({changed}); give another --work or "
                "remove it"
            )
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(tensors[f"decoder.{name}"])
    for number, stepper in enumerate(steppers):
        saved: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{number}."):
                _, _, index, name = key.split(".", 3)
                saved.setdefault(int(index), {})[name] = value
        stepper.load_state_dict(stepper.state_dict() | {"state": saved})
    restored = json.loads(metadata["state"])
    return TrainState(
        restored["step"],
        restored["losses"],
        [(step, loss) for step, loss in restored["held_out"]],
        source,
    )


def make_folder(folder: Path) -> None:
    """Makes a folder to write into, so that what forbids it is known before the work is done.
    Raises OptionError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"{folder} cannot be written into")


def source_digest(folder: Path) -> str:
    """SHA-256 of what training takes from a checkpoint folder. A verified manifest would say the
    same of the weights.
    """
    paths = {path for tensor in Checkpoint(folder).tensors.values() for path in tensor.paths}
    paths |= {folder / name for name in SOURCE_FILES}
    lines = [f"{file_digest(path)}  {path.name}\n" for path in sorted(paths) if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _identity(options: TrainOptions, source: str | None) -> str:
    kept = {
        key: str(value) for key, value in options.model_dump().items() if key not in FREE_OPTIONS
    }
    if source is not None:
        kept["sha256 of the files of init"] = source
    return json.dumps(kept, sort_keys=True)
