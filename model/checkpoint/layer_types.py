"""Decoders with two kinds of layers, with a sliding window and with full attention, each with a
rotary embedding of its own: what Gemma 3's and 4's config.json say of them.
"""

from model.checkpoint.config import Config
from model.checkpoint.rope import rotary_of
from model.spec import CheckpointError, Rotary

LAYER_TYPES = ("sliding_attention", "full_attention")


def windows_of(
    config: Config, num_layers: int, default: int, ends_full: bool = False
) -> tuple[int | None, ...]:
    """The window of each layer, `default` where the config does not say it: from the list of layer
    types, else every sixth layer, and with `ends_full` the last one, has full attention. Raises
    CheckpointError.
    """
    window = config.integer("sliding_window", default)
    pattern = config.integer("sliding_window_pattern", 6)
    types = config.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[(layer + 1) % pattern == 0] for layer in range(num_layers)]
        if ends_full:
            types[-1] = LAYER_TYPES[1]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in LAYER_TYPES for kind in types)
    ):
        raise config.wrong("layer_types", f"a list of {num_layers} of {' and '.join(LAYER_TYPES)}")
    return tuple(window if kind == LAYER_TYPES[0] else None for kind in types)


def rotations_of(
    config: Config, head_dims: tuple[int, int], full: Config | None = None
) -> tuple[Rotary, Rotary, int]:
    """The rotations of layers with full attention and of layers with a window, whose heads have so
    many columns, and the number of positions that both support. `full`: what `rope_parameters` say
    of the former where they say nothing. Raises CheckpointError.
    """
    most = config.integer("max_position_embeddings", 131_072)
    base, local_base = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    scaling, new, local = config.sub("rope_scaling"), config.sub("rope_parameters"), None
    if scaling is not None and new is not None:
        raise CheckpointError(
            f"{config.path}: rope_scaling and rope_parameters are both there; expected one of them"
        )
    if new is not None:
        scaling, local = new.sub("full_attention"), new.sub("sliding_attention")
        for key in new.unread():
            raise CheckpointError(
                f"{config.path}: rope_parameters: {key} is none of {', '.join(LAYER_TYPES)}"
            )
    rotation, reach = rotary_of(scaling or full, config.path, head_dims[0], most, base)
    window_rotation, window_reach = rotary_of(local, config.path, head_dims[1], most, local_base)
    return rotation, window_rotation, min(reach, window_reach)
