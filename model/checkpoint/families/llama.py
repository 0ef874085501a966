"""llama and mistral with one key/value head: RMS norms, rotary embeddings, SwiGLU; Mistral may
limit every layer to a window.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS, BIASES, llama_fields
from model.checkpoint.names import llama_names
from model.checkpoint.rope import rotary
from model.spec import ModelSpec


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type llama or mistral. Raises CheckpointError naming the
    key that does not fit.
    """
    is_mistral = config.get("model_type") == "mistral"
    # Mistral's layers have no biases, whatever its config says.
    fields = llama_fields(config, tied=False, biases=() if is_mistral else BIASES)
    num_heads = fields["num_query_heads"]
    config.one_key_value_head("num_key_value_heads", 8 if is_mistral else num_heads)
    head_dim = config.columns("head_dim", fields["hidden_size"] // num_heads)
    rotation, max_positions = rotary(config, head_dim, 131_072 if is_mistral else 2048)
    # transformers' Mistral has a window unless the config says null; configs that leave the key out
    # mean its default.
    window = config.optional("sliding_window", 4096) if is_mistral else None
    return ModelSpec(
        **fields,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        attention_scale=head_dim**-0.5,
        rotary=rotation,
        windows=() if window is None else (window,) * fields["num_layers"],
    )


weight_names = llama_names
