"""The record that `onehead convert` leaves in a checkpoint folder, of which a server warns.

`onehead_conversion` in config.json says what was done. It knows nothing of weights and torch.
"""

from pathlib import Path

from model.checkpoint.config import NAME, Config, read_json

KEY = "onehead_conversion"


def only_pooled(folder: Path) -> str | None:
    """A sentence that says so if a checkpoint's heads were pooled into one and it was not trained
    since. Raises CheckpointError.
    """
    conversion = Config(read_json(folder / NAME)).sub(KEY)
    if conversion is None or conversion.integer("uptrained_steps", least=0) > 0:
        return None
    heads = conversion.integer("heads")
    return (
        f"{folder}: its {heads} key/value heads were averaged into one, and the model was not "
        "trained since"
    )
