"""gpt2 configs with multi-query attention: the layout in which bigcode/santacoder was first published, with code of its own.

GPT-2's names and transposed matrices; queries in `q_attn`, the one key/value head in `kv_attn`. The code that such a folder names in
`auto_map` is neither needed nor run.
"""

from model.config import Config
from model.names import Names, Part, renamed
from model.spec import CheckpointError, ModelSpec

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def spec_from_config(config: Config, end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type gpt2. Raises CheckpointError naming the key that does not fit."""
    hidden_size, num_heads = config.integer("n_embd"), config.integer("n_head")
    if config.get("attention_head_type") != "multiquery":
        raise CheckpointError(
            f"config.json: attention_head_type is {config.get('attention_head_type')!r}, so there are {num_heads} key/value heads, "
            "expected 'multiquery': onehead serves one key/value head; `onehead convert` makes that of several"
        )
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    config.only("add_cross_attention", False, why="onehead serves decoder-only models")
    config.only("scale_attn_by_inverse_layer_idx", False, why="onehead scales every layer alike")
    config.get("reorder_and_upcast_attn"), config.get("n_ctx")
    head_dim = hidden_size // num_heads
    return ModelSpec(
        model_type="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("n_layer"),
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("n_inner", 4 * hidden_size),
        max_positions=config.integer("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        attention_scale=head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        end_token_ids=end_token_ids,
    )


def weight_names(spec: ModelSpec) -> Names:
    """Our parameter -> the checkpoint's, for every parameter of a Decoder of this spec."""
    both = ("weight", "bias")
    names = renamed({"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe"})
    names |= renamed({"final_norm": "transformer.ln_f"}, both)
    if not spec.tied_embeddings:
        names |= renamed({"head": "lm_head"})
    query_size = spec.num_query_heads * spec.head_dim
    for layer in range(spec.num_layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        names |= renamed({f"{ours}.attention_norm": f"{theirs}.ln_1", f"{ours}.mlp_norm": f"{theirs}.ln_2"}, both)
        linears = {
            "attention.qkv": {"attn.q_attn": query_size, "attn.kv_attn": 2 * spec.head_dim},
            "attention.out": {"attn.c_proj": spec.hidden_size},
            "mlp.up": {"mlp.c_fc": spec.intermediate_size},
            "mlp.down": {"mlp.c_proj": spec.hidden_size},
        }
        for linear, parts in linears.items():
            names[f"{ours}.{linear}.weight"] = tuple(Part(f"{theirs}.{name}.weight", rows, True) for name, rows in parts.items())
            names[f"{ours}.{linear}.bias"] = tuple(Part(f"{theirs}.{name}.bias", rows) for name, rows in parts.items())
    return names
