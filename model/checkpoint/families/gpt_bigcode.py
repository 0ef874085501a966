"""gpt_bigcode: StarCoder, StarCoderBase, tiny_starcoder, SantaCoder, granite-code-20b and the
embedded model; and gpt2 with multi-query attention, the layout in which bigcode/santacoder was
first published (its remote code is not run).

GPT-2's block with one key/value head. The fused projection's rows are the query heads, then K, then
V, as in the decoder; the gpt2 layout keeps queries in `q_attn`, the key and the value in `kv_attn`,
and its matrices transposed.
"""

from model.checkpoint.config import Config, short
from model.checkpoint.fields import ACTIVATIONS
from model.checkpoint.names import Names, renamed, stacked, within
from model.spec import CheckpointError, ModelSpec


def _refuse_several_heads(config: Config, num_heads: int) -> None:
    """Raises CheckpointError for several key/value heads, which the two layouts spell
    differently.
    """
    first = config.get("model_type") == "gpt2"
    key, expected = ("attention_head_type", "multiquery") if first else ("multi_query", True)
    found = config.get(key) if first else config.flag(key, True)
    if found != expected:
        raise CheckpointError(
            f"config.json: {key} is {short(found)}, so there are {num_heads} key/value heads, "
            f"expected {expected!r}: "
            "onehead serves one key/value head; `onehead convert` can pool several into one"
        )


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type gpt_bigcode or gpt2. Raises CheckpointError naming
    the key that does not fit.
    """
    hidden_size, num_heads = config.integer("n_embd"), config.integer("n_head")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: n_embd {hidden_size} is not a multiple of n_head {num_heads}"
        )
    _refuse_several_heads(config, num_heads)
    config.only("add_cross_attention", False, why="onehead serves decoder-only models")
    config.only("scale_attn_by_inverse_layer_idx", False, why="onehead scales every layer alike")
    for key in ("n_ctx", "num_key_value_heads", "reorder_and_upcast_attn"):
        config.get(key)  # Redundant, or about rounding.
    head_dim = hidden_size // num_heads
    return ModelSpec(
        model_type=config.get("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.layers("n_layer"),
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("n_inner", 4 * hidden_size),
        max_positions=config.integer("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    names = renamed({"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe"})
    names |= renamed({"final_norm": "transformer.ln_f"}, bias=True)
    first = spec.model_type == "gpt2"
    query_size = spec.num_query_heads * spec.head_dim
    linears: dict[str, dict[str, int | None]] = {
        "attention.qkv": {"attn.q_attn": query_size, "attn.kv_attn": 2 * spec.head_dim}
        if first
        else {"attn.c_attn": None},
        "attention.out": {"attn.c_proj": None},
        "mlp.up": {"mlp.c_fc": None},
        "mlp.down": {"mlp.c_proj": None},
    }
    block = renamed({"attention_norm": "ln_1", "mlp_norm": "ln_2"}, bias=True)
    for linear, parts in linears.items():
        block |= stacked(linear, parts, bias=True, transposed=first)
    for layer in range(spec.num_layers):
        names |= within(f"blocks.{layer}", f"transformer.h.{layer}", block)
    return names
