"""What several families read of a config.json alike: names of activations, and the fields of specs
with Llama's block.

It knows no family and no torch.
"""

from typing import Any

from model.checkpoint.config import Config

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""`transformers`' names of activations -> ours."""
BIASES = ("attention_bias", "mlp_bias")


def llama_fields(
    config: Config,
    *,
    tied: bool,
    vocab_size: int | None = None,
    epsilon: float = 1e-6,
    biases: tuple[str, ...] = BIASES[:1],
) -> dict[str, Any]:
    """Fields of a ModelSpec with Llama's block and keys. `tied`, `vocab_size` and `epsilon` are
    what keys that are absent mean; of BIASES, `biases` are those that the family has. Raises
    CheckpointError naming the key that does not fit.
    """
    attention_bias, mlp_bias = (key in biases and config.flag(key, False) for key in BIASES)
    return {
        "model_type": config.get("model_type"),
        "vocab_size": config.integer("vocab_size", vocab_size),
        "hidden_size": config.integer("hidden_size"),
        "num_layers": config.layers("num_hidden_layers"),
        "num_query_heads": config.integer("num_attention_heads"),
        "intermediate_size": config.integer("intermediate_size"),
        "norm_epsilon": config.number("rms_norm_eps", epsilon),
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
        "norm": "rms_norm",
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "gated_mlp": True,
    }
