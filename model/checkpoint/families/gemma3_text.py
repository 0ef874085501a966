"""gemma3_text: Gemma-3-270m and 1b. Five layers with a sliding window to one with full attention,
each kind with its own rotary embedding; queries and keys are normalised, and so are the outputs of
attention and MLP.
"""

from model.checkpoint.config import Config
from model.checkpoint.fields import ACTIVATIONS, llama_fields
from model.checkpoint.layer_types import rotations_of, windows_of
from model.checkpoint.names import llama_names
from model.spec import ModelSpec


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a config.json with model_type gemma3_text. Raises CheckpointError naming the key
    that does not fit.
    """
    fields = llama_fields(config, tied=True, vocab_size=262_208)
    config.one_key_value_head("num_key_value_heads", 4, convertible=False)
    bidirectional = config.flag("use_bidirectional_attention", False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.only(key, why="onehead does not cap logits")
    head_dim = config.columns("head_dim", 256)
    rotation, window_rotation, max_positions = rotations_of(config, (head_dim, head_dim))
    windows = windows_of(config, fields["num_layers"], 4096)
    return ModelSpec(
        **fields,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=1.0,
        branch_norms=True,
        query_key_norm=True,
        embedding_scale=fields["hidden_size"] ** 0.5,
        rotary=rotation,
        window_rotary=window_rotation,
        windows=_both_ways(config, windows) if bidirectional else windows,
        bidirectional=bidirectional,
    )


def _both_ways(config: Config, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The windows of one direction: bidirectional configs count the tokens of both. Raises
    CheckpointError for an odd one, which an older `transformers` has halved before it was saved.
    """
    if any(window is not None and window % 2 for window in windows):
        raise config.wrong("sliding_window", "even, as both directions count")
    return tuple(None if window is None else window // 2 + 1 for window in windows)


weight_names = llama_names
