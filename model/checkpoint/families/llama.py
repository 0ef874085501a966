"""llama and mistral with one key/value head: RMS norms, rotary embeddings, SwiGLU; Mistral may
limit every layer to a window.
"""

from model.checkpoint.config import Config
from model.checkpoint.names import Names, llama_names
from model.checkpoint.rope import rotary
from model.spec import ModelSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def spec_from_config(config: Config, end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type llama or mistral. Raises CheckpointError naming the
    key that does not fit.
    """
    is_mistral = config.get("model_type") == "mistral"
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers = config.layers("num_hidden_layers")
    config.one_key_value_head("num_key_value_heads", 8 if is_mistral else num_heads)
    head_dim = config.columns("head_dim", hidden_size // num_heads)
    most = config.integer("max_position_embeddings", 131_072 if is_mistral else 2048)
    rotation, max_positions = rotary(config, head_dim, most, 10000.0)
    attention_bias = False if is_mistral else config.flag("attention_bias", False)
    # transformers' Mistral has a window unless the config says null; configs that leave the key out
    # mean its default.
    window = config.optional("sliding_window", 4096) if is_mistral else None
    return ModelSpec(
        model_type="mistral" if is_mistral else "llama",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_positions=max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        activation=config.choice("hidden_act", _ACTIVATIONS, "silu"),
        attention_scale=head_dim**-0.5,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        end_token_ids=end_token_ids,
        norm="rms_norm",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=False if is_mistral else config.flag("mlp_bias", False),
        gated_mlp=True,
        rotary=rotation,
        windows=() if window is None else (window,) * num_layers,
    )


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    return llama_names(spec)
