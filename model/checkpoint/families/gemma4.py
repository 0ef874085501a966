"""gemma4 and gemma4_text: Gemma 4 E2B, of which the text is served. Layers with full attention have
wider heads than those with a window, the last layers read the keys and values of earlier ones, and
every layer is given columns of its own of each token. gemma4_assistant drafts tokens for it: a
small decoder all of whose layers read the keys and values of the large one.
"""

import re
from dataclasses import replace

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS, llama_fields
from model.checkpoint.layer_types import rotations_of, windows_of
from model.checkpoint.names import Names, Part, llama_names, renamed, within
from model.spec import CheckpointError, ModelSpec

_LAYER_INPUT = {
    "layer_input.up": "per_layer_input_gate",
    "layer_input.down": "per_layer_projection",
    "layer_input_norm": "post_per_layer_input_norm",
}
_OUTER_INPUT = {
    "layer_inputs.table": "model.embed_tokens_per_layer",
    "layer_inputs.projection": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
}
_FULL_ROTATION = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_OTHERS = """
vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id boa_token_id
eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image
num_experts top_k_experts moe_intermediate_size
"""
"""Keys of the whole model that say nothing of its text, and of experts that there are not."""
_DRAFTER = "gemma4_assistant"
_PROJECTIONS = {"input_projection": "pre_projection", "output_projection": "post_projection"}
_CLUSTERS = ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
"""Keys of a clustered output layer, which computes some logits only; onehead computes all."""
_OTHER_PARTS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.")
_SHARED = re.compile(
    r"model\.(?:language_model\.)?layers\.(\d{1,4})\.self_attn\.[kv]_(?:proj|norm)\.weight"
)


def _refuse_others(config: Config) -> None:
    """Raises CheckpointError for a Gemma 4 that is not served; reads the keys that say nothing of
    the text.
    """
    config.one_key_value_head("num_key_value_heads", 4, convertible=False)
    config.only("num_global_key_value_heads", 1, why="onehead serves one key/value head")
    config.only("use_bidirectional_attention", "vision", why="onehead serves causal models")
    config.only("attention_k_eq_v", False, why="onehead reads a value projection in every layer")
    config.only("enable_moe_block", False, why="onehead serves Gemma 4 without experts")
    for key in _OTHERS.split():
        config.get(key)


def _sources(config: Config, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """For each layer the one whose keys and values it reads: the last ones read those of the last
    layer of their kind that has its own.
    """
    if windows[-1] is not None:
        raise config.wrong("layer_types", "a list that ends with full_attention")
    num_own = len(windows) - config.integer(
        "num_kv_shared_layers", 0, least=0, most=len(windows) - 1
    )
    last = {windows[layer]: layer for layer in range(num_own)}
    if not last.keys() >= set(windows):
        kinds = "a layer of each kind before those that share its keys and values"
        raise config.wrong("num_kv_shared_layers", kinds)
    own = range(num_own)
    return (*own, *(last[window] for window in windows[num_own:])) if num_own < len(windows) else ()


def _backbone(config: Config, num_layers: int) -> int:
    """The hidden size of the model for which a drafter drafts."""
    size = config.integer("backbone_hidden_size", 1536)
    config.integer("num_kv_shared_layers", num_layers, least=num_layers, most=num_layers)
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        config.integer(key, 0, most=0, least=0)
    config.only("use_double_wide_mlp", False, why="a drafter's layers are alike")
    for key in _CLUSTERS:
        config.get(key)
    return size


def _intermediate_sizes(config: Config, sources: tuple[int, ...]) -> tuple[int, ...]:
    """Columns within each layer's MLP; empty where all have the same."""
    size, is_double = config.integer("intermediate_size"), config.flag("use_double_wide_mlp", False)
    return tuple(size * (1 + (is_double and layer != s)) for layer, s in enumerate(sources))


def _layer_inputs(config: Config, vocab_size: int) -> tuple[int, int]:
    """The columns that a layer is given of each token, and the rows of the table of them."""
    size = config.integer("hidden_size_per_layer_input", 256, least=0)
    num_rows = config.integer("vocab_size_per_layer_input", 262_144, vocab_size)
    return size, num_rows if size else 0


def _cap(config: Config) -> float | None:
    key = "final_logit_softcapping"
    return None if config.get(key) is None else config.number(key)


def _wide_head_dim(config: Config, head_dim: int, windows: tuple[int | None, ...]) -> int:
    """Columns of a head in layers with full attention. transformers writes them for each such
    layer.
    """
    layers = config.sub("per_layer_config")
    if layers is None:
        return config.columns("global_head_dim", 512)
    config.get("global_head_dim")
    full = [layer for layer, window in enumerate(windows) if window is None]
    # Written as "4", or as "04" where there are more than ten layers; empty where all are alike.
    given = sorted(name.zfill(4) for name in layers.values)
    if given and given != [f"{layer:04}" for layer in full]:
        raise config.wrong("per_layer_config", f"of the layers with full attention, {full}")
    found = set()
    for name in layers.values:
        own = layers.sub(name) or Config({}, layers.path)
        found.add(own.columns("head_dim", head_dim))
        own.one_key_value_head("num_key_value_heads", 1, convertible=False)
        for key in own.unread():
            raise CheckpointError(f"{layers.path}: {name}: {key} is not known")
    if len(found) > 1:
        raise config.wrong("per_layer_config", "one head_dim for all layers with full attention")
    return found.pop() if found else head_dim


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type gemma4 or gemma4_text. Raises CheckpointError
    naming the key that does not fit.
    """
    fields = llama_fields(config, tied=True, vocab_size=262_144)
    num_layers = fields["num_layers"]
    _refuse_others(config)
    head_dim, windows = config.columns("head_dim", 256), windows_of(config, num_layers, 512, True)
    wide = _wide_head_dim(config, head_dim, windows)
    rotation, window_rotation, max_positions = rotations_of(
        config, (wide, head_dim), Config(_FULL_ROTATION, config.path)
    )
    backbone = _backbone(config, num_layers) if fields["model_type"] == _DRAFTER else 0
    sources = () if backbone else _sources(config, windows)
    input_size, input_vocab_size = (
        (0, 0) if backbone else _layer_inputs(config, fields["vocab_size"])
    )
    return ModelSpec(
        **fields,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=1.0,
        branch_norms=True,
        query_key_norm=True,
        value_norm=True,
        embedding_scale=fields["hidden_size"] ** 0.5,
        rotary=rotation,
        window_rotary=window_rotation,
        windows=windows,
        wide_head_dim=wide,
        kv_sources=sources,
        intermediate_sizes=_intermediate_sizes(config, sources),
        layer_input_size=input_size,
        layer_input_vocab_size=input_vocab_size,
        layer_scale=True,
        logit_cap=_cap(config),
        backbone_size=backbone,
    )


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    names = llama_names(spec)
    block: Names = {"scale": (Part("layer_scalar"),)}
    if spec.layer_input_size:
        names |= renamed(_OUTER_INPUT)
        block |= renamed(_LAYER_INPUT)
    for layer in range(spec.num_layers):
        names |= within(f"blocks.{layer}", f"model.layers.{layer}", block)
    if spec.model_type == _DRAFTER:
        return names | renamed(_PROJECTIONS)
    if spec.model_type == "gemma4_text":
        return names
    return {
        ours: tuple(
            replace(part, name=part.name.replace("model.", "model.language_model.", 1))
            for part in parts
        )
        for ours, parts in names.items()
    }


def is_ignored(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor belongs to what is not served, images and sound, or to keys and values that
    a layer reads from another one instead.
    """
    if _OTHER_PARTS.match(name) or (spec.backbone_size and name.startswith("masked_embedding.")):
        return True
    found = _SHARED.fullmatch(name)
    return found is not None and spec.num_storing_layers <= int(found[1]) < spec.num_layers
