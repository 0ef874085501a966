"""gpt_bigcode: StarCoder, StarCoderBase, tiny_starcoder, SantaCoder (in this layout), granite-code-20b and the embedded model.

GPT-2's block with one key/value head. The fused projection's rows are the query heads, then K, then V, which is also our order.
"""

from typing import Any

from model.config import Config
from model.names import Names, renamed
from model.spec import CheckpointError, ModelSpec

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def spec_from_config(config: Config, end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type gpt_bigcode. Raises CheckpointError naming the key that does not fit."""
    hidden_size, num_heads = config.integer("n_embd"), config.integer("n_head")
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    if not config.flag("multi_query", True):
        raise CheckpointError(
            f"config.json: multi_query is False, so there are {num_heads} key/value heads, expected True: "
            "onehead serves one key/value head; `onehead convert` makes that of several"
        )
    config.only("add_cross_attention", False, why="onehead serves decoder-only models")
    config.get("n_ctx"), config.get("num_key_value_heads")
    head_dim = hidden_size // num_heads
    return ModelSpec(
        model_type="gpt_bigcode",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("n_layer"),
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("n_inner", 4 * hidden_size),
        max_positions=config.integer("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation_function", _ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", True),
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


def weight_names(spec: ModelSpec) -> Names:
    """Our parameter -> the checkpoint's, for every parameter of a Decoder of this spec."""
    both = ("weight", "bias")
    names = renamed({"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe"})
    names |= renamed({"final_norm": "transformer.ln_f"}, both)
    if not spec.tied_embeddings:
        names |= renamed({"head": "lm_head"})
    modules = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for layer in range(spec.num_layers):
        names |= renamed({f"blocks.{layer}.{a}": f"transformer.h.{layer}.{b}" for a, b in modules.items()}, both)
    return names
