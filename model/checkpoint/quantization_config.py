"""quantization_config of config.json: which packed weights a checkpoint has, as the package
compressed-tensors writes it.

Only its format pack-quantized is read, with 4-bit integers in groups of inputs. Invariant: every
other format, and every key that would change the numbers, is refused by name. It knows no tensors
and no torch.
"""

from model.checkpoint.config import Config

KEY = "quantization_config"
BLOCK = 32
_TOP: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "kv_cache_scheme": {},
}
_TOP |= {key: {} for key in ("sparsity_config", "moe_sparsity_config", "transform_config")}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False}
"""Keys with the only value that is read. An absent or null one is allowed: the shapes of the
tensors are checked in any case."""
_WHY = (
    "of quantised checkpoints onehead reads compressed-tensors pack-quantized with num_bits 4 "
    "and strategy group, weights only"
)


def packed_groups(config: Config) -> set[tuple[int, bool]]:
    """(inputs of a group, whether numbers are symmetric around 0) for every kind of packed weight;
    empty if the checkpoint has none. Raises CheckpointError naming the key.
    """
    found = config.sub(KEY)
    if found is None:
        return set()
    for key, value in _TOP.items():
        found.only(key, value, why=_WHY)
    groups = found.sub("config_groups")
    if groups is None or not groups.values:
        raise found.wrong("config_groups", "an object of groups")
    return {_group(groups, name) for name in groups.values}


def _group(groups: Config, name: str) -> tuple[int, bool]:
    group = groups.sub(name)
    weights = group and group.sub("weights")
    if group is None or weights is None:
        raise groups.wrong(name, "an object with weights")
    for key in ("input_activations", "output_activations"):
        group.only(key, why=_WHY)
    for key, value in _WEIGHTS.items():
        weights.only(key, value, why=_WHY)
    weights.only(
        "actorder",
        "weight",
        "static",
        why="inputs in another order than the weights' (g_idx) are not read",
    )
    size = weights.integer("group_size")
    if size % BLOCK:
        raise weights.wrong("group_size", f"a multiple of {BLOCK}")
    return size, weights.flag("symmetric", True)
