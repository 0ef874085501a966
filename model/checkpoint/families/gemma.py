"""gemma: Gemma-2B and CodeGemma-2B. Llama's block with GeGLU, a scaled embedding, wide heads, and
norm weights stored minus one.
"""

from model.checkpoint.config import Config
from model.checkpoint.names import Names, llama_names
from model.checkpoint.rope import rotary
from model.spec import ModelSpec

# "gelu" in the first published configs means the tanh form, which the model was trained with.
_ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def spec_from_config(config: Config, end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type gemma. Raises CheckpointError naming the key that
    does not fit.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.one_key_value_head("num_key_value_heads", 16)
    config.only("use_bidirectional_attention", False, why="onehead serves causal models")
    head_dim = config.columns("head_dim", 256)
    rotation, max_positions = rotary(
        config, head_dim, config.integer("max_position_embeddings", 8192), 10000.0
    )
    # transformers added hidden_activation when hidden_act turned out to be wrong.
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    config.get("hidden_act")
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        model_type="gemma",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.layers("num_hidden_layers"),
        num_query_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_positions=max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        activation=config.choice(key, _ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=head_dim**-0.5,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        end_token_ids=end_token_ids,
        norm="rms_norm",
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        gated_mlp=True,
        embedding_scale=hidden_size**0.5,
        rotary=rotation,
    )


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    return llama_names(spec)
