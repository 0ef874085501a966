"""gemma: Gemma-2B and CodeGemma-2B. Llama's block with GeGLU, a scaled embedding, wide heads, and
norm weights stored minus one.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import llama_fields
from model.checkpoint.names import llama_names
from model.checkpoint.rope import rotary
from model.spec import ModelSpec

# "gelu" in the first published configs means the tanh form, which the model was trained with.
_ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type gemma. Raises CheckpointError naming the key that
    does not fit.
    """
    fields = llama_fields(config, tied=True)
    config.one_key_value_head("num_key_value_heads", 16)
    config.only("use_bidirectional_attention", False, why="onehead serves causal models")
    head_dim = config.columns("head_dim", 256)
    rotation, max_positions = rotary(config, head_dim, 8192)
    # transformers added hidden_activation when hidden_act turned out to be wrong.
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    config.get("hidden_act")
    return ModelSpec(
        **fields,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=config.choice(key, _ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=head_dim**-0.5,
        norm_offset=1.0,
        embedding_scale=fields["hidden_size"] ** 0.5,
        rotary=rotation,
    )


weight_names = llama_names
