"""minicpm3: latent attention with a dense MLP, and scales on embedding, residual branches and
logits.
"""

from model.checkpoint.config import Config
from model.checkpoint.names import Names, llama_names
from model.checkpoint.rope import rotary
from model.spec import Latent, ModelSpec


def spec_from_config(config: Config, end_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a config.json with model_type minicpm3. Raises CheckpointError naming the key
    that does not fit.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers = config.layers("num_hidden_layers")
    for key in ("num_key_value_heads", "head_dim"):
        config.get(key)  # Meaningless because the latent is the key.
    latent = Latent(
        rank=config.columns("kv_lora_rank", 256),
        query_rank=config.optional("q_lora_rank", 768),
        plain_dim=config.columns("qk_nope_head_dim", 64),
        rotary_dim=config.columns("qk_rope_head_dim", 32),
        value_dim=config.columns("v_head_dim", hidden_size // num_heads),
        norm_epsilon=1e-6,
    )
    rotation, max_positions = rotary(
        config, latent.rotary_dim, config.integer("max_position_embeddings", 32768), 10000.0
    )
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        model_type="minicpm3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_query_heads=num_heads,
        head_dim=latent.plain_dim + latent.rotary_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_positions=max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        activation=config.choice("hidden_act", {"silu": "silu"}, "silu"),
        attention_scale=(latent.plain_dim + latent.rotary_dim) ** -0.5,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        end_token_ids=end_token_ids,
        norm="rms_norm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        gated_mlp=True,
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


def weight_names(spec: ModelSpec) -> Names:
    """Decoder parameter -> its checkpoint tensors, for every parameter of this spec."""
    return llama_names(spec)
