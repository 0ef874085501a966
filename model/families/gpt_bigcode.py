"""gpt_bigcode: StarCoder, StarCoderBase, tiny_starcoder, SantaCoder (in this layout), granite-code-20b and the embedded model.

GPT-2's block with one key/value head. The fused projection's rows are the query heads, then K, then V, which is also our order.
"""

from typing import Any

from model.spec import CheckpointError, ModelSpec, positive_float, positive_int

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def spec_from_config(config: dict[str, Any], end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type gpt_bigcode. Raises CheckpointError naming the key that does not fit."""
    hidden_size = positive_int(config, "n_embd")
    num_heads = positive_int(config, "n_head")
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    if config.get("multi_query", True) is not True:
        raise CheckpointError(
            f"config.json: multi_query is {config['multi_query']!r}, so there are {num_heads} key/value heads; "
            "onehead serves checkpoints with exactly one"
        )
    if config.get("add_cross_attention"):
        raise CheckpointError("config.json: add_cross_attention is true; onehead serves decoder-only models")
    activation = config.get("activation_function", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: activation_function is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    head_dim = hidden_size // num_heads
    return ModelSpec(
        model_type="gpt_bigcode",
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=positive_int(config, "n_layer"),
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=positive_int(config, "n_inner", default=4 * hidden_size),
        max_positions=positive_int(config, "n_positions"),
        norm_epsilon=positive_float(config, "layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        attention_scale=head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        end_token_ids=end_token_ids,
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A config.json that this module and `transformers` read back as the same model."""
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == spec.activation)
    return {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "multi_query": True,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_query_heads,
        "n_inner": spec.intermediate_size,
        "activation_function": activation,
        "layer_norm_epsilon": spec.norm_epsilon,
        "scale_attn_weights": spec.attention_scale != 1.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.end_token_ids[0] if spec.end_token_ids else None,
        "eos_token_id": spec.end_token_ids[0] if spec.end_token_ids else None,
    }


def weight_names(spec: ModelSpec) -> dict[str, str]:
    """Our parameter name -> the checkpoint's, for every parameter of a Decoder of this spec."""
    names = {
        "token_embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    modules = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for layer in range(spec.num_layers):
        for ours, theirs in modules.items():
            for kind in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"transformer.h.{layer}.{theirs}.{kind}"
    if not spec.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    return names
