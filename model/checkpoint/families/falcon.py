"""falcon: Falcon-7B and its kin. Rotary positions; attention and MLP in parallel after one norm, or
in sequence.

The fused projection's rows are the query heads, then K, then V, which is also the decoder's order.
ALiBi variants are refused: those published have many key/value heads.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS
from model.checkpoint.names import Names, renamed, within
from model.checkpoint.rope import rotary
from model.spec import CheckpointError, ModelSpec


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type falcon. Raises CheckpointError naming the key that
    does not fit.
    """
    hidden_size = config.integer("hidden_size" if config.get("n_embed") is None else "n_embed")
    num_heads = config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}"
        )
    # The newer architecture ignores multi_query and parallel_attn, and has a number of key/value
    # heads.
    newer = config.flag("new_decoder_architecture", False)
    multi_query = config.flag("multi_query", True)
    parallel = config.flag("parallel_attn", True) or newer
    if newer:
        config.one_key_value_head("num_kv_heads", num_heads, convertible=False)
    elif not multi_query:
        raise CheckpointError(
            f"config.json: multi_query is False, so there are {num_heads} key/value heads; "
            "onehead serves exactly one"
        )
    else:
        config.get("num_kv_heads")  # Ignored by this architecture: published configs say 71.
    config.only(
        "alibi", False, why="ALiBi is not supported; falcon is served with rotary positions only"
    )
    rotation, max_positions = rotary(config, hidden_size // num_heads, 2048)
    bias = config.flag("bias", False)
    # Only the newer architecture reads this key; there, null means two norms.
    norms = config.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    if norms > 2 or (norms == 2 and not newer):
        raise config.wrong("num_ln_in_parallel_attn", "1, or 2 with new_decoder_architecture")
    return ModelSpec(
        model_type="falcon",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.layers("num_hidden_layers"),
        num_query_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=config.integer("ffn_hidden_size", 4 * hidden_size),
        max_positions=max_positions,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
        attention_scale=(hidden_size // num_heads) ** -0.5,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        shared_norm=parallel and norms == 1,
        rotary=rotation,
    )


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    names = renamed({"token_embedding": "transformer.word_embeddings"})
    names |= renamed({"final_norm": "transformer.ln_f"}, bias=True)
    if spec.shared_norm:
        norms = {"attention_norm": "input_layernorm"}
    elif spec.parallel:
        norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    else:
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    linears = {
        "attention.qkv": "self_attention.query_key_value",
        "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    block = renamed(norms, bias=True) | renamed(linears, spec.qkv_bias)
    for layer in range(spec.num_layers):
        names |= within(f"blocks.{layer}", f"transformer.h.{layer}", block)
    return names
