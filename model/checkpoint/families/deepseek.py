"""deepseek_v2, deepseek_v3 and youtu: multi-head latent attention, which absorbed is multi-query
attention, and a mixture of experts; youtu has V3's attention and dense MLPs.

Layers for predicting several tokens, which published V3 checkpoints append, are left unread.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS, llama_fields
from model.checkpoint.names import llama_names
from model.checkpoint.rope import rotary, scaling_of, yarn_scale
from model.spec import CheckpointError, Experts, Latent, ModelSpec

# The most experts of all layers together.
MOST_EXPERTS = 2**16
MOST_POSITIONS = {"deepseek_v2": 2048, "deepseek_v3": 4096, "youtu": 131_072}
"""Where a config does not say."""


def _experts(config: Config, is_v3: bool, num_layers: int) -> Experts | None:
    """Routing and sizes; None if every layer is dense."""
    first_layer = config.integer("first_k_dense_replace", 3 if is_v3 else 0, least=0)
    config.only(
        "moe_layer_freq", 1, why="onehead serves experts in every layer after the dense ones"
    )
    scoring = "sigmoid" if is_v3 else "softmax"
    config.only("scoring_func", scoring, why=f"expected {scoring}")
    method = config.get("topk_method")
    methods = ["noaux_tc"] if is_v3 else ["greedy", "group_limited_greedy"]
    if method not in (None, *methods):
        raise config.wrong("topk_method", " or ".join(methods))
    # Null means false.
    normalised = config.flag("norm_topk_prob", is_v3 and "norm_topk_prob" not in config.values)
    if normalised and not is_v3:
        # DeepSeek's own code divides by the sum and then leaves out the scale; transformers' does
        # neither. None is published.
        raise CheckpointError(
            "config.json: norm_topk_prob is True; onehead does not serve that of a deepseek_v2"
        )
    num_experts = config.integer(
        "n_routed_experts", 256 if is_v3 else 64, most=MOST_EXPERTS // num_layers
    )
    groups, chosen_groups = config.integer("n_group", 8), config.integer("topk_group", 4)
    if not (is_v3 or method == "group_limited_greedy"):
        groups = chosen_groups = 1
    chosen = config.integer("num_experts_per_tok", 8 if is_v3 else None)
    if (
        num_experts % groups
        or chosen_groups > groups
        or chosen > chosen_groups * (num_experts // groups)
    ):
        raise CheckpointError(
            f"config.json: num_experts_per_tok {chosen} of n_routed_experts {num_experts} in "
            f"n_group {groups}, topk_group {chosen_groups}: "
            "groups must divide the experts, and the chosen groups hold as many as are chosen"
        )
    if is_v3 and num_experts // groups < 2:
        raise CheckpointError(
            f"config.json: n_group {groups} leaves fewer than 2 of n_routed_experts {num_experts} "
            "in a group"
        )
    size = config.integer("moe_intermediate_size", 2048 if is_v3 else 1407)
    shared = config.integer("n_shared_experts", 1 if is_v3 else 2, least=0)
    scale = config.number("routed_scaling_factor", 2.5 if is_v3 else 1.0)
    if first_layer >= num_layers:
        return None
    return Experts(
        first_layer,
        num_experts,
        chosen,
        size,
        size * shared,
        scoring,
        groups,
        chosen_groups,
        normalised,
        scale,
    )


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type deepseek_v2, deepseek_v3 or youtu. Raises
    CheckpointError naming the key that does not fit.
    """
    model_type = config.get("model_type")
    is_v3, is_dense = model_type == "deepseek_v3", model_type == "youtu"
    fields = llama_fields(config, tied=is_dense)
    for key in ("num_key_value_heads", "ep_size", "aux_loss_alpha", "seq_aux", "head_dim"):
        config.get(key)  # Training only, or meaningless because the latent is the key.
    latent = Latent(
        rank=config.columns("kv_lora_rank", 512),
        query_rank=config.optional("q_lora_rank", 1536),
        plain_dim=config.columns("qk_nope_head_dim", 128),
        rotary_dim=config.columns("qk_rope_head_dim", 64),
        value_dim=config.columns("v_head_dim", 128),
    )
    interleaved = not (is_v3 or is_dense) or config.flag(
        "rope_interleave", "rope_interleave" not in config.values
    )
    rotation, max_positions = rotary(
        config, latent.rotary_dim, MOST_POSITIONS[model_type], interleaved=interleaved
    )
    scale = latent.head_dim**-0.5
    scaling = scaling_of(config)
    if scaling is not None and scaling.get("mscale_all_dim"):
        scale *= yarn_scale(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2
    config.only("mlp_bias", False, why="onehead serves these models' MLPs without")
    return ModelSpec(
        **fields,
        head_dim=latent.head_dim,
        max_positions=max_positions,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        attention_scale=scale,
        rotary=rotation,
        latent=latent,
        experts=None if is_dense else _experts(config, is_v3, fields["num_layers"]),
        num_unread_layers=config.integer(
            "num_nextn_predict_layers",
            config.integer("num_mtp_layers", int(is_v3), least=0),
            least=0,
        ),
    )


weight_names = llama_names
