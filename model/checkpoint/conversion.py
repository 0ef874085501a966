"""The record that `onehead convert` leaves in a checkpoint folder, which decides whether the model
is served.

`onehead_conversion` in config.json says what was done, conversion.json what that cost. It knows
nothing of weights and torch.
"""

from pathlib import Path

from model.checkpoint.config import NAME, Config, read_json

KEY = "onehead_conversion"
RECORD = "conversion.json"


def only_pooled(folder: Path) -> str | None:
    """A sentence that says so if a checkpoint's heads were pooled into one and it was not trained
    since. Raises CheckpointError.
    """
    conversion = Config(read_json(folder / NAME)).sub(KEY)
    if conversion is None or conversion.integer("uptrained_steps", least=0) > 0:
        return None
    heads = conversion.integer("heads")
    return (
        f"{folder}: its {heads} key/value heads were pooled into one, and the model was not "
        f"trained since{_cost(folder)}"
    )


def _cost(folder: Path) -> str:
    """How pooling changed the held-out loss, if that was measured."""
    path = folder / RECORD
    losses = Config(read_json(path), RECORD).sub("losses") if path.exists() else None
    if losses is None:
        return ""
    before, pooled = losses.number("before"), losses.number("pooled")
    return (
        f": its held-out loss is {pooled:.3f} nats per token and was {before:.3f} before, "
        f"{pooled - before:+.3f}"
    )
