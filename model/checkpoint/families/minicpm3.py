"""minicpm3: latent attention with a dense MLP, and scales on embedding, residual branches and
logits.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS, BIASES, llama_fields
from model.checkpoint.names import llama_names
from model.checkpoint.rope import rotary
from model.spec import Latent, ModelSpec


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type minicpm3. Raises CheckpointError naming the key
    that does not fit.
    """
    fields = llama_fields(config, tied=True, epsilon=1e-5, biases=BIASES)
    hidden_size, num_layers = fields["hidden_size"], fields["num_layers"]
    for key in ("num_key_value_heads", "head_dim"):
        config.get(key)  # Meaningless because the latent is the key.
    latent = Latent(
        rank=config.columns("kv_lora_rank", 256),
        query_rank=config.optional("q_lora_rank", 768),
        plain_dim=config.columns("qk_nope_head_dim", 64),
        rotary_dim=config.columns("qk_rope_head_dim", 32),
        value_dim=config.columns("v_head_dim", hidden_size // fields["num_query_heads"]),
    )
    rotation, max_positions = rotary(config, latent.rotary_dim, 32768)
    return ModelSpec(
        **fields,
        head_dim=latent.head_dim,
        max_positions=max_positions,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        attention_scale=latent.head_dim**-0.5,
        embedding_scale=config.number("scale_emb", 12.0),
        # Null means no scale; an absent key means the published model's value.
        residual_scale=config.number(
            "scale_depth", 1.4 if "scale_depth" not in config.values else num_layers**0.5
        )
        / num_layers**0.5,
        logit_scale=config.integer(
            "dim_model_base", 256 if "dim_model_base" not in config.values else hidden_size
        )
        / hidden_size,
        rotary=rotation,
        latent=latent,
    )


weight_names = llama_names
